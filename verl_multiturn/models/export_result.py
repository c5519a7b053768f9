"""The files that an export wrote, and the findings of its check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.models.lora import Lora

TOOLS = "tools.json"
"""File of an exported model with the schemas of its tools."""


def is_schema(value: Any) -> bool:
    """Return whether a value of somebody else's file is a tool's schema: a function that has a name."""
    function = value.get("function") if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


@dataclass(frozen=True)
class ExportReport:
    """The files that an export wrote, and the findings of its check.

    Attributes:
        folder: The folder.
        model: Hash of its weights, as `model_hash` has it.
        dtype: Data types of its weights.
        tensors: Number of its tensors.
        parameters: Number of its parameters.
        size: Bytes of its weights.
        lora: The adapter that was merged; None: there was none.
        difference: Largest difference between its logits and the checkpoint's.
        allowed: Largest difference that passes.
        rounding: Largest difference that rounding to `--dtype` made; None: nothing was rounded.
        from_base: Largest difference between its logits and the base's; None: the base is not at hand.
        base: Hash of the base's weights; None: it is not at hand.
        written: Names of the files beside the weights that the run's settings gave.
    """

    folder: Path
    model: str
    dtype: str
    tensors: int
    parameters: int
    size: int
    lora: Lora | None
    difference: float
    allowed: float
    rounding: float | None
    from_base: float | None
    base: str | None
    written: list[str]
