"""LoRA in a checkpoint of verl: the adapter beside the base's weights, and both in one.

A checkpoint has PEFT's names. `base_model.model.NAME.base_layer.weight` is the base's weight of a layer with an
adapter, `….lora_A.default.weight` (rank × inputs) and `….lora_B.default.weight` (outputs × rank) are the adapter's, and
`base_model.model.NAME.weight` is a weight without one. A checkpoint that was saved with `save_lora_only` has the
adapter alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.models.location import Model

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
_PART = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.default\.weight")
_ADAPTER = re.compile(r"\.lora_|\.modules_to_save\.|\.adapter_")
_OTHER_SCALES = ("use_rslora", "use_dora", "alpha_pattern")


@dataclass(frozen=True)
class Lora:
    """An adapter of LoRA.

    Attributes:
        alpha: Its `lora_alpha`; an update is weighted by alpha / rank.
        ranks: Rank of each layer that has an update, by the layer's name in the model.
        parts: A (rank × inputs) and B (outputs × rank) of each layer.
    """

    alpha: float
    ranks: dict[str, int]
    parts: dict[str, tuple[Tensor, Tensor]]


def has_adapter(tensors: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is one of LoRA."""
    return any(_ADAPTER.search(name) for name in tensors)


def has_base(tensors: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint of LoRA has more than the adapter."""
    return not all(_ADAPTER.search(name) for name in tensors)


def split_lora(tensors: Mapping[str, Tensor], model: Model) -> tuple[dict[str, Tensor], Lora]:
    """Return the base's weights, by their names in the model, and the adapter of a checkpoint.

    Raises:
        ConfigError: The adapter is none of plain LoRA on linear layers, or its alpha is not known.
    """
    base: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX)
        if found := _PART.fullmatch(plain):
            parts.setdefault(found["layer"], {})[found["part"]] = tensor
        elif _ADAPTER.search(name):
            raise ConfigError(f"{name!r} is no weight of plain LoRA on a linear layer; merge this adapter with PEFT")
        else:
            base[re.sub(r"\.base_layer(?=\.(weight|bias)$)", "", plain)] = tensor
    if half := next((layer for layer, pair in parts.items() if len(pair) != 2), None):
        raise ConfigError(f"{str(model.folder)!r} has only one of lora_A and lora_B of {half!r}; name another one")
    pairs = {layer: (pair["A"], pair["B"]) for layer, pair in parts.items()}
    return base, Lora(_alpha(model), {layer: len(pair[0]) for layer, pair in pairs.items()}, pairs)


def merge_lora(base: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Return the weights of a model with its adapter in them: W + B·A·alpha/rank, computed in float32.

    A weight that has an update is float32; all others stay as they are.

    Args:
        base: The base's weights by name.
        lora: The adapter.

    Raises:
        ConfigError: The base has no weight of that name and shape.
    """
    merged = dict(base)
    for layer, (down, up) in lora.parts.items():
        name = f"{layer}.weight"
        weight = base.get(name)
        if weight is None or tuple(weight.shape) != (up.shape[0], down.shape[1]):
            shape = "none" if weight is None else list(weight.shape)
            raise ConfigError(
                f"the adapter changes {name!r} of shape {[up.shape[0], down.shape[1]]}, and the base has {shape}; "
                "merge this adapter with PEFT"
            )
        merged[name] = weight.float() + (up.float() @ down.float()) * (lora.alpha / lora.ranks[layer])
    return merged


def _alpha(model: Model) -> float:
    """Return an adapter's `lora_alpha`: as the trainer noted it, else as the run was configured."""
    _refuse_other_scales(model)
    note = model.folder / "lora_train_meta.json"
    noted: Any = None
    if note.is_file():
        try:
            noted = json.loads(note.read_text(encoding="utf-8"))["lora_alpha"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{str(note)!r} tells no lora_alpha; name another checkpoint") from None
    alpha = model.setting("actor_rollout_ref.model.lora_alpha") if noted is None else noted
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
        raise ConfigError(
            f"the lora_alpha of {str(model.folder)!r} is {alpha!r}; expected a number above 0 in lora_train_meta.json "
            "or in the run's configuration: without it nobody knows how much the adapter counts"
        )
    return float(alpha)


def _refuse_other_scales(model: Model) -> None:
    """Refuse a run that began with an adapter of another kind, which verl's note does not describe."""
    adapter = model.setting("actor_rollout_ref.model.lora_adapter_path")
    if not adapter:
        return
    path = model.named_path(Path(str(adapter)) / "adapter_config.json")
    if path is None:
        raise ConfigError(
            f"the run of {str(model.run)!r} is not yours, and it began with the adapter {str(adapter)!r}, outside of "
            "its folder, which is not read; merge this adapter with PEFT"
        )
    try:
        if not path.is_file():
            raise FileNotFoundError(f"no file {path.name}")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the run began with the adapter {str(adapter)!r}, which cannot be read ({error}); put it "
                          "there again") from None  # fmt: skip
    if odd := [key for key in _OTHER_SCALES if config.get(key)]:
        raise ConfigError(f"{str(path)!r} sets {', '.join(odd)}; merge this adapter with PEFT")
