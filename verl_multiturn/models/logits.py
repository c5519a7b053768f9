"""A model's logits, computed in three ways that share no code of ours: the check of an export.

Every way computes in float32, on the CPU, for the same token ids. `logits_of_tensors` puts tensors into a model by
hand, `logits_with_adapter` lets PEFT compute base and adapter apart, and `logits_of_folder` loads a folder as a user
would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.models.lora import Lora

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _TOKENS, _SEED = 4, 64, 0
_SPARE, _MODELS = 4, 16
"""How many times the tensors of the weights a model may have, and how often it may be made within an export."""
_MOST_TENSORS, _MOST_VALUES = 1_000, 1 << 20
_OTHER = "name another folder"
_KINDS = {"ForCausalLM": "AutoModelForCausalLM", "ForConditionalGeneration": "AutoModelForImageTextToText"}


def read_config(folder: Path, trusts_code: bool = False) -> Any:
    """Return the configuration of a Hugging Face folder, as transformers has it.

    Args:
        folder: The folder.
        trusts_code: Whether code that lies in the folder may run.

    Raises:
        ConfigError: transformers cannot read it, or it is of a model that does not generate text.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code, local_files_only=True)
    except Exception as error:  # a damaged file may raise anything, and so may code of the folder's
        if not trusts_code and "trust_remote_code" in str(error):
            raise ConfigError(
                f"{str(folder)!r} is a model with Python files of its own; say --trust-remote-code if you would run "
                "them as a program of whoever made the folder"
            ) from None
        raise ConfigError(f"{str(folder)!r} cannot be read as a model ({_first_line(error)}); {_OTHER}") from None
    _class_of(config)
    return config


def empty_model(config: Any, dtype: Any, trusts_code: bool = False) -> Any:
    """Return a model of a configuration whose weights have shapes and no values."""
    from accelerate import init_empty_weights

    try:
        with init_empty_weights():
            return _class_of(config).from_config(config, dtype=dtype, trust_remote_code=trusts_code).eval()
    except ConfigError:
        raise
    except Exception as error:  # somebody else's configuration may have any content
        raise ConfigError(f"no model can be made of config.json ({_first_line(error)}); {_OTHER}") from None


@contextlib.contextmanager
def bounded_models(tensors: int, values: int) -> Iterator[None]:
    """Refuse, within, a model whose parameters are many more than the weights that are there.

    A configuration may name a million layers, or a vocabulary of 10^9, for which memory would be taken.

    Args:
        tensors: Number of tensors in the weights.
        values: Number of their values.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    most, count, size = (_SPARE * tensors + _MOST_TENSORS, _SPARE * values + _MOST_VALUES), 0, 0

    def note(module: Any, name: str, parameter: Any) -> None:
        nonlocal count, size
        if parameter is None or "lora_" in name:
            return
        count, size = count + 1, max(size, parameter.numel())
        if count > most[0] * _MODELS or size > most[1]:
            raise ConfigError(
                f"config.json speaks of more parameters than its weights have ({tensors:,} tensors of {values:,} "
                f"values); {_OTHER}"
            )

    hook = register_module_parameter_registration_hook(note)
    try:
        yield
    finally:
        hook.remove()


def logits_of_tensors(config: Any, tensors: Mapping[str, Tensor], trusts_code: bool = False) -> Tensor:
    """Return the logits (rows × tokens × vocabulary) of a model with these weights."""
    return _logits(_filled(config, tensors, trusts_code))


def logits_with_adapter(config: Any, base: Mapping[str, Tensor], lora: Lora, trusts_code: bool = False) -> Tensor:
    """Return the logits of a base with an adapter beside it, as PEFT computes them, unmerged."""
    import torch
    from peft import LoraConfig, get_peft_model

    ranks = lora.ranks
    first = next(iter(ranks.values()))
    adapter = LoraConfig(
        r=first, lora_alpha=lora.alpha,
        target_modules=list(ranks), rank_pattern=dict(ranks),
        alpha_pattern=dict.fromkeys(ranks, lora.alpha), lora_dropout=0.0, bias="none",
    )  # fmt: skip
    model: Any = get_peft_model(_filled(config, base, trusts_code), adapter).eval()
    layers = dict(model.base_model.model.named_modules())
    with torch.no_grad():
        for layer, (down, up) in lora.parts.items():
            layers[layer].lora_A["default"].weight.copy_(down)
            layers[layer].lora_B["default"].weight.copy_(up)
    return _logits(model)


def logits_of_folder(folder: Path, trusts_code: bool = False) -> Tensor:
    """Return the logits of the model in a Hugging Face folder.

    Raises:
        ConfigError: It cannot be loaded, or lacks a weight.
    """
    return _logits(load_folder(folder, "float32", trusts_code))


def load_folder(folder: Path, dtype: str, trusts_code: bool = False) -> Any:
    """Return the model of a Hugging Face folder.

    Args:
        folder: The folder.
        dtype: A data type's name, or `auto`.
        trusts_code: Whether code that lies in the folder may run.

    Raises:
        ConfigError: It cannot be loaded, or lacks a weight, which transformers would draw at random.
    """
    kind = _class_of(read_config(folder, trusts_code))
    try:
        model, found = kind.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=trusts_code,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
        )
    except ConfigError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise ConfigError(f"{str(folder)!r} cannot be loaded ({_first_line(error)}); {_OTHER}") from None
    if odd := [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]:
        raise ConfigError(f"{str(folder)!r} does not fit its own configuration: {sorted(map(str, odd))[0]!r}")
    return model.eval()


def _class_of(config: Any) -> Any:
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    for end, kind in _KINDS.items():
        if name.endswith(end):
            return getattr(transformers, kind)
    raise ConfigError(f"a model of the kind {name!r} cannot be exported; expected one that generates text: "
                      f"{' or '.join(f'…{end}' for end in _KINDS)}")  # fmt: skip


def _filled(config: Any, tensors: Mapping[str, Tensor], trusts_code: bool) -> Any:
    import torch

    model = empty_model(config, torch.float32, trusts_code)
    try:
        return _with_values(model, tensors)
    except Exception as error:  # shapes that differ, for example
        raise ConfigError(f"the weights do not fit config.json ({_first_line(error)}); {_OTHER}") from None


def _with_values(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    whole = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    model.load_state_dict(whole, strict=False, assign=True)
    model.tie_weights()
    return model


def _logits(model: Any) -> Tensor:
    try:
        return _computed(model)
    except Exception as error:  # somebody else's configuration may have any content
        raise ConfigError(f"its logits cannot be computed ({_first_line(error)}); {_OTHER}") from None


def _computed(model: Any) -> Tensor:
    import torch

    text = model.config.get_text_config()
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    ids = torch.randint(text.vocab_size, (_ROWS, length), generator=torch.Generator().manual_seed(_SEED))
    ids[torch.isin(ids, torch.tensor(_marks(model.config)))] = text.vocab_size // 2
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    return found


def _marks(config: Any) -> list[int]:
    """Return the ids that represent images and the like, without which a model refuses them."""
    named = [value for key, value in config.to_dict().items() if key.endswith("_token_id")]
    return [value for value in named if isinstance(value, int)]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
