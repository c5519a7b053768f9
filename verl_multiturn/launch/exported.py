"""What an export wrote, and what its check found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_multiturn.launch.lora import Lora


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and what its check found.

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
