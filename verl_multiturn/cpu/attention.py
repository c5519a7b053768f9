"""`SharedPrefixAttention`: attention of SGLang's engine on a CPU, which reads a shared prefix of requests once.

SGLang's `torch_native` goes through a batch request by request. Each request reads its whole context, and a prefill
computes the queries of its cached prefix again. Here a batch is cut into pieces, and each piece is computed at once.
The requests of a piece share the first slots of the cache, whose keys and values are read once. The rest is padded
to the longest.

Invariants:
- a slot is shared where its number is the same in all rows of SGLang's table, from the first token on;
- a layer or batch that `handles` refuses is computed by SGLang's `torch_native`;
- padding at most doubles the tokens of a piece, and its scores are at most `_NUMBERS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType

_NUMBERS = 1 << 23
"""Most scores of a piece, and most numbers among its keys, so that each takes 32 MiB at most in float32."""
_PIECE = 1 << 17
"""Numbers that are read in the time that one more piece takes."""
_PARTITIONS = 8
"""How many ways of sharing are compared for a batch."""


class AttentionPiece(NamedTuple):
    """Names the slots of k requests that are computed at once: P shared ones, up to m of their own, up to e queries."""

    queries: torch.Tensor
    """Rows of the queries `(k, e)`. A request with fewer has its last one several times."""
    shared: torch.Tensor
    """Slots that all requests of the piece share `(H, P)`: rows of a cache that is seen as `(slots × H, D)`."""
    own: torch.Tensor
    """The same of each request's tokens behind it `(H, k, m)`. One with fewer repeats its last row."""
    hidden: torch.Tensor | None
    """Which of its own slots a query does not see `(k, e, m)`; None: it sees all."""


class SharedPrefixAttention(TorchNativeAttnBackend):
    """SGLang's `torch_native`, with other kernels for the layers and batches that `handles` accepts."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._layer: Any = None
        self._batch: Any = None
        self._planned: tuple[Any, tuple[int, int, int], list[AttentionPiece] | None] | None = None

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return the output of one query of each request. SGLang calls it for each layer of a decode step."""
        with self._at(layer, forward_batch):
            return super().forward_decode(q, k, v, layer, forward_batch, *rest, **kwargs)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return the output of the queries of new tokens. SGLang calls it for each layer of a prefill."""
        with self._at(layer, forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, *rest, **kwargs)

    @contextmanager
    def _at(self, layer: Any, batch: Any) -> Iterator[None]:
        """Let the kernels below know the layer and the batch, which SGLang does not give them."""
        self._layer, self._batch = layer, batch
        try:
            yield
        finally:
            self._layer = self._batch = None

    def _run_sdpa_forward_decode(self, *given: Any, **options: Any) -> Any:
        if self._attend(*given[:7], before=given[6] - 1):
            return given[1]
        return super()._run_sdpa_forward_decode(*given, **options)

    def _run_sdpa_forward_extend(self, *given: Any, **options: Any) -> Any:
        if self._attend(*given[:7], before=given[7]):
            return given[1]
        return super()._run_sdpa_forward_extend(*given, **options)

    def _attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        before: torch.Tensor,
    ) -> bool:
        """Fill `output`, and return True; False where SGLang's own kernel is to do it.

        The arguments are those of SGLang's kernels, and how many tokens of each request come before its first query.
        """
        if not handles(self._layer, self._batch, query, k_cache, v_cache):
            return False
        heads = query.shape[1], *k_cache.shape[1:]
        planned = self._planned
        # Each forward pass has a batch of its own; its first layer plans for all.
        if planned is None or planned[0]() is not self._batch or planned[1] != heads:
            ends = seq_lens.numpy().astype(np.int64)
            slots = req_to_token[req_pool_indices, : int(ends.max())].numpy()
            pieces = plan(slots, before.numpy().astype(np.int64), ends, heads)
            self._planned = planned = weakref.ref(self._batch), heads, pieces
        if planned[2] is None:
            return False
        for piece in planned[2]:
            rows = piece.queries.flatten()
            output[rows] = attend(query[rows], k_cache, v_cache, piece, self._layer.scaling)
        return True


def handles(layer: Any, batch: Any, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether attention of a layer over a batch is causal, over plain keys and values, and has queries.

    Args:
        layer: SGLang's `RadixAttention`.
        batch: SGLang's `ForwardBatch`.
        query: The queries `(tokens, heads, D)`.
        k_cache: Keys of each slot `(slots, H, D)`. A latent cache has other heads, and a quantised one another type.
        v_cache: The same of the values.
    """
    return (
        len(query) > 0
        and layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and not layer.logit_cap
        and layer.sliding_window_size == -1
        and not layer.use_irope
        and layer.xai_temperature_len == -1
        and batch.spec_info is None
        and all(
            cache.shape[1:] == (layer.tp_k_head_num, query.shape[2])
            and cache.dtype == query.dtype
            and cache.is_contiguous()
            for cache in (k_cache, v_cache)
        )
    )


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: AttentionPiece, scaling: float
) -> torch.Tensor:
    """Return the output of a piece's queries `(k × e, heads, D)`, in their type.

    Args:
        queries: `(k × e, heads, D)`.
        keys: The cache `(slots, H, D)`, where H divides the number of heads.
        values: The same of the values.
        piece: The piece.
        scaling: Factor of the scores.
    """
    (k, e), (H, shared), D = piece.queries.shape, piece.shared.shape, keys.shape[2]
    rows = e * queries.shape[1] // H
    # Scores and sums in float32, as torch's own kernel has them.
    exact = torch.promote_types(queries.dtype, torch.float32)
    # The heads come first, (H, k, rows, D), so that each product below is one of stacked matrices.
    asked = (queries.to(exact) * scaling).view(k, e, H, -1, D).permute(2, 0, 1, 3, 4).reshape(H * k, rows, D)

    def read(cache: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return cache.view(-1, D).index_select(0, chosen.flatten()).to(exact).view(-1, chosen.shape[-1], D)

    scores = torch.bmm(asked, read(keys, piece.own).transpose(1, 2))
    if piece.hidden is not None:
        hidden = piece.hidden.unsqueeze(2).expand(-1, -1, rows // e, -1).reshape(k, rows, -1)
        scores.view(H, k, rows, -1).masked_fill_(hidden, float("-inf"))
    if shared:
        before = torch.bmm(asked.view(H, k * rows, D), read(keys, piece.shared).transpose(1, 2))
        scores = torch.cat([before.view(H * k, rows, shared), scores], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    output = torch.bmm(weights[..., shared:], read(values, piece.own))
    if shared:
        first = weights[..., :shared].reshape(H, k * rows, shared)
        output += torch.bmm(first, read(values, piece.shared)).view_as(output)
    return output.view(H, k, e, -1, D).permute(1, 2, 0, 3, 4).reshape(k * e, -1, D).to(queries.dtype)


def plan(
    slots: np.ndarray, before: np.ndarray, ends: np.ndarray, heads: tuple[int, int, int]
) -> list[AttentionPiece] | None:
    """Return the pieces of a batch, or None where a request has no query, or by itself too many scores.

    Args:
        slots: Slots of each request's tokens `(requests, tokens)`; behind its end a row has anything.
        before: How many tokens of each request come before its first query `(requests,)`.
        ends: How many tokens each request has `(requests,)`; those that are not before are queries.
        heads: Number of heads of the queries, of the keys, and numbers of a head.
    """
    count = ends - before
    if not count.all() or ((count > 1).any() and int((count * ends).max()) * heads[0] > _NUMBERS):
        return None
    starts = np.cumsum(count) - count
    slots, head = slots.astype(np.int64), np.arange(heads[1])[:, None, None]
    pieces = []
    for group, shared in _groups(slots, before, ends, _PIECE // (heads[1] * heads[2])):
        for some in _cut(group, shared, count, ends - shared, heads):
            most, own = count[some, None] - 1, ends[some, None] - shared - 1
            query = np.minimum(np.arange(most.max() + 1), most)
            column = np.arange(own.max() + 1)
            hidden = column > (before[some, None] + query - shared)[..., None]
            pieces.append(
                AttentionPiece(
                    queries=torch.from_numpy(starts[some, None] + query),
                    shared=torch.from_numpy(slots[some[0], :shared] * heads[1] + head[:, 0]),
                    own=torch.from_numpy(slots[some[:, None], shared + np.minimum(column, own)] * heads[1] + head),
                    hidden=torch.from_numpy(hidden) if hidden.any() else None,
                )
            )
    return pieces


def _groups(slots: np.ndarray, before: np.ndarray, ends: np.ndarray, piece: int) -> Iterable[tuple[np.ndarray, int]]:
    """Return groups of requests, each with the number of slots that they share, so that few slots are read.

    Rows are sorted, so that those with the same beginning are neighbours. A group is a run of neighbours that have at
    least so many slots in common; several such numbers are tried.

    Args:
        slots: As in `plan`.
        before: As in `plan`. Of the slots that others share, a query sees only these.
        ends: As in `plan`.
        piece: Slots that are read in the time that one more group takes.
    """
    number, tokens = slots.shape
    order = np.ascontiguousarray(slots, dtype=">i4").view(f"V{4 * tokens}").ravel().argsort()
    rows, before, ends = slots[order], before[order], ends[order]
    differs = rows[1:] != rows[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), tokens)
    common = np.minimum(common, np.minimum(before[1:], before[:-1]))
    tried = np.sort(common)[:: max(1, number // _PARTITIONS)]
    best: tuple[int, np.ndarray, np.ndarray] | None = None
    for least in np.unique(tried) if number > 1 else [0]:
        firsts = np.flatnonzero(np.concatenate([[True], common < least]))
        links = np.concatenate([before[:1], common])
        links[firsts] = before[firsts]
        shared = np.minimum.reduceat(links, firsts)
        sizes = np.diff(np.append(firsts, number))
        read = int((shared + sizes * (np.maximum.reduceat(ends, firsts) - shared) + piece).sum())
        if best is None or read < best[0]:
            best = read, firsts, shared
    assert best is not None
    return zip(np.split(order, best[1][1:]), best[2].tolist(), strict=True)


def _cut(
    group: np.ndarray, shared: int, queries: np.ndarray, own: np.ndarray, heads: tuple[int, int, int]
) -> Iterator[np.ndarray]:
    """Yield the requests of a group in pieces that are not padded too far and not too large.

    Args:
        group: Numbers of the requests.
        shared: Slots that they share.
        queries: How many queries each request of the batch has.
        own: How many slots it has behind the shared ones.
        heads: As in `plan`.
    """
    some: list[int] = []
    sizes: Sequence[int] = ()
    for request in group[np.lexsort((-own[group], -queries[group]))].tolist():
        count, slots = int(queries[request]), int(own[request])
        if some:
            most, longest = max(sizes[0], count), max(sizes[1], slots)
            all_queries, all_slots = sizes[2] + count, sizes[3] + slots
            k = len(some) + 1
            if (
                k * most > 2 * all_queries
                or k * longest > 2 * all_slots
                or (shared + k * longest) * heads[1] * heads[2] > _NUMBERS
                or k * most * (shared + longest) * heads[0] > _NUMBERS
            ):
                yield np.array(some)
                some = []
        sizes = (most, longest, all_queries, all_slots) if some else (count, slots, count, slots)
        some.append(request)
    yield np.array(some)
