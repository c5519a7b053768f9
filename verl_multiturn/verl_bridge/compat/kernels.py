"""Kernels of flash-attn, where they are installed and can do the computation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


@cache
def _varlen() -> Callable[..., Any] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    found: Callable[..., Any] = flash_attn_varlen_func
    return found


def varlen_attention(query: Tensor) -> Callable[..., Any] | None:
    """Return flash-attn's attention of variable lengths; None where it is not installed, or cannot compute this.

    It aligns the causal mask to the last query and the last key.

    Args:
        query: The queries. flash-attn computes on a GPU, in half precision: under autocast float32 becomes that.
    """
    device = query.device.type
    if device != "cuda" or not (query.dtype in _HALVES or torch.is_autocast_enabled(device)):
        return None
    return _varlen()
