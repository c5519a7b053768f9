"""Two computations of verl's that go through a tensor number by number, which on a CPU costs more than they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import verl.utils.seqlen_balancing
import verl.utils.torch_functional

_LOGITS = 1 << 22
"""Number of logits of which the log-probabilities are computed at once: 16 MiB in float32."""
_verls_log_probs = verl.utils.torch_functional.logprobs_from_logits_v2
_verls_partitions: Callable[..., list[list[int]]] = verl.utils.seqlen_balancing.karmarkar_karp


def compute_at_once() -> None:
    """Put the functions below in the place of verl's, in this process."""
    verl.utils.torch_functional.logprobs_from_logits_v2 = log_probs
    verl.utils.seqlen_balancing.karmarkar_karp = partitions


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of labels, many rows at once; verl's engine asks where flash-attn is missing.

    verl computes them row by row, to bound the memory. Rows of a few MiB together bound it, too. The sums have another
    order than verl's, so that a value may differ in its last digit.

    Args:
        logits: Logits `(…, V)`. Of another type than float32 and float64, verl's own function computes them.
        labels: Token ids `(…)`, int64.

    Returns:
        Log-probabilities `(…)`, of the logits' type.
    """
    if logits.dtype not in (torch.float32, torch.float64) or logits.numel() == 0:
        return _verls_log_probs(logits, labels)  # type: ignore[no-any-return]
    values = torch.gather(logits, -1, labels.unsqueeze(-1)).squeeze(-1)
    rows = torch.split(logits.reshape(-1, logits.shape[-1]), max(1, _LOGITS // logits.shape[-1]))
    sums = [torch.logsumexp(part, -1) for part in rows]
    return values - torch.cat(sums).view_as(values)


def partitions(seqlen_list: Sequence[Any], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Return verl's partition of a batch's rows, which the trainer asks for; verl compares one-element tensors.

    Args:
        seqlen_list: Work of each row: tensors of one whole number each, or numbers.
        k_partitions: Number of parts.
        equal_size: Whether the parts have equally many rows.
    """
    work = [each.item() if isinstance(each, torch.Tensor) else each for each in seqlen_list]
    return _verls_partitions(work, k_partitions, equal_size)
