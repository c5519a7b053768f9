"""Repairs of Qwen2-VL and Qwen2.5-VL in SGLang 0.5.12, for transformers 5.9, which verl 0.9.1 pins.

Two things no longer fit. Qwen3-VL needs neither repair.
- SGLang uses transformers' rotary embedding for the vision tower of Qwen2.5-VL, and calls it with a length. In
  transformers 5.9 it takes positions instead, so every request with an image would fail. SGLang has one of its own
  since 0.5.19 and calls it with positions, so that the repair does nothing.
- The trainer sends weights under the names of transformers' modules, which these two models do not know. verl would
  translate them into the names of the checkpoint, but transformers no longer has the table that verl uses for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.models import qwen2_5_vl, qwen2_vl

_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model."}

Weights = Iterable[tuple[str, torch.Tensor]]


def _checkpoint_names(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        yield _PREFIXES.get(prefix, "") + name.removeprefix(prefix), tensor


class VisionRotaryEmbedding(qwen2_5_vl.Qwen2_5_VisionRotaryEmbedding):
    """Rotary embedding of transformers, or of SGLang, that can also be called with a length."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles `(N, D)` of positions.

        Args:
            positions: Positions `(N, 1)`; or the single number N, which means the positions 0 to N - 1.
        """
        if positions.ndim == 0:
            positions = torch.arange(int(positions), device=self.inv_freq.device).unsqueeze(-1)
        angles: torch.Tensor = super().forward(positions)
        return angles


class Qwen2_5_VLForConditionalGeneration(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """SGLang's Qwen2.5-VL, which takes weights under the checkpoint's names and under transformers' names."""

    def load_weights(self, weights: Weights) -> Any:
        """Load weights under either kind of name."""
        return super().load_weights(_checkpoint_names(weights))


class Qwen2VLForConditionalGeneration(qwen2_vl.Qwen2VLForConditionalGeneration):
    """SGLang's Qwen2-VL, which takes weights under the checkpoint's names and under transformers' names."""

    def load_weights(self, weights: Weights) -> Any:
        """Load weights under either kind of name."""
        return super().load_weights(_checkpoint_names(weights))


qwen2_5_vl.Qwen2_5_VisionRotaryEmbedding = VisionRotaryEmbedding
EntryClass = [Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration]
