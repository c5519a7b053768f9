"""Images of verl's rows, and processors of the models that take images."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import get_processor_token_id, hf_processor
from verl.utils.tokenizer.continuous_token_wiring import _MODEL_TYPE_TO_FAMILY, get_continuous_token_builder_class

from verl_multiturn.chat.images import Message, ReadImages, Vision
from verl_multiturn.errors import ConfigError

_MEDIA = ("image", "video", "audio")
# The processors of Qwen and GLM write this text while they count an image's tokens. In a row's text it would become an
# image token.
_PLACEHOLDER = "<|placeholder|>"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def takes_images(model_type: str | None) -> bool:
    """Return whether verl's token builder for a model takes images, and so needs a processor.

    Args:
        model_type: `model_type` of the model's config.json.
    """
    family = _MODEL_TYPE_TO_FAMILY.get(str(model_type).lower())
    return family is not None and bool(get_continuous_token_builder_class(family).supports_multimodal())


def load_processor(path: str, model_type: str | None, trust_remote_code: bool) -> Any:
    """Load the processor that verl's workers would load for a model on this machine.

    Args:
        path: Folder of the model.
        model_type: `model_type` of the model's config.json.
        trust_remote_code: Whether code that lies with the model may run.

    Returns:
        The processor; None where verl loads none, as for a text model without a processor's files.

    Raises:
        ConfigError: The model takes images, and verl cannot load a processor for it.
    """
    needed = takes_images(model_type)
    if not needed and not any((Path(path) / name).is_file() for name in _PROCESSOR_FILES):
        return None
    with warnings.catch_warnings(record=True) as said:  # verl returns None, with the reason in a warning
        warnings.simplefilter("always")
        processor = hf_processor(path, trust_remote_code=trust_remote_code, local_files_only=True)
    if processor is None and needed:
        why = "; ".join(str(warning.message) for warning in said) or "no processor lies there"
        raise ConfigError(
            f"{path!r} (model_type {model_type!r}) takes images, and verl cannot load its processor: {why}"[:500]
            + "; put the model's preprocessor_config.json there, or use a text model"
        )
    return processor


def own_processor(processor: Any) -> Any:
    """Return a copy of a processor with its own tokenizer; verl's worker uses the original in another thread."""
    own = copy.copy(processor)
    own.tokenizer = copy.deepcopy(processor.tokenizer)
    return own


def vision_of(processor: Any) -> Vision:
    """Return the placeholder tokens of a processor.

    Raises:
        ConfigError: The processor does not name the token of an image.
    """
    ids = {name: get_processor_token_id(processor, name) for name in _MEDIA}
    image_id = ids["image"]
    if image_id is None:
        raise ConfigError(f"{type(processor).__name__} names no image token; use a model whose processor has one")
    tokens = [getattr(processor, f"{name}_token", None) for name in _MEDIA]
    tokenizer = processor.tokenizer
    texts = {tokenizer.decode([image_id]), _PLACEHOLDER, *(token for token in tokens if isinstance(token, str))}
    return Vision(image_id, [index for index in ids.values() if index is not None], texts, tokenizer.decode)


def image_reader(processor: Any, data_config: Any, dataset_cls: Any = RLHFDataset) -> ReadImages:
    """Return a function that loads and resizes images as the data set class of the run does.

    Args:
        processor: The model's processor, which has a patch size (14 where it names none).
        data_config: verl's `data` section.
        dataset_cls: The data set class; a user's own class is used where the run names one.
    """
    patch_size = getattr(getattr(processor, "image_processor", None), "patch_size", 14)

    async def read(messages: Sequence[Message]) -> list[Any]:
        given = {"image_patch_size": patch_size, "config": data_config}
        # `process_vision_info` is the older name of the method; a user's own class may still have it.
        extract = getattr(dataset_cls, "process_multi_modal_info", None) or dataset_cls.process_vision_info
        images, *_ = await extract(list(messages), **given)
        return list(images or [])

    return read


def row_messages(row: Mapping[str, Any], processor: Any) -> list[Message]:
    """Return the messages of a data file's row as verl's data set builds them, with images in place of `<image>`.

    Args:
        row: The row as it lies in the file, with `prompt` and, where it has images, `images`.
        processor: The model's processor.

    Raises:
        ConfigError: verl's data set would refuse the row.
    """
    keys = {"image_key": "images", "video_key": "videos", "audio_key": "audios", "processor": processor}
    try:
        messages: list[Message] = RLHFDataset._build_messages(
            SimpleNamespace(**keys), copy.deepcopy(dict(row)), "prompt"
        )
    except (AssertionError, OSError, TypeError, KeyError) as error:
        raise ConfigError(f"its images do not fit its prompt: {error}") from error
    return messages


def engine_image_settings(mm_processor_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's `mm_process_config` that means the same as `data.mm_processor_kwargs`.

    SGLang gets the settings when it starts, because verl 0.9.1 sends none with a request. Example:
        {"max_pixels": 9, "images_kwargs": {"do_resize": True}}
        → {"image": {"max_pixels": 9, "do_resize": True}}
    """
    flat = {key: value for key, value in mm_processor_kwargs.items() if not key.endswith("_kwargs")}
    image = {**flat, **(mm_processor_kwargs.get("images_kwargs") or {})}
    return {"image": image} if image else {}


def plain_dict(section: Any) -> dict[str, Any]:
    """Return a section of the configuration as a plain dictionary; None gives an empty one."""
    plain: Any = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    return dict(plain or {})
