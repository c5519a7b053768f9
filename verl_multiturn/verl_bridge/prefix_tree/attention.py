"""Attention in a forest: each segment attends over its ancestors and, causally, over itself.

A model takes it from transformers' registry of attention functions, under the name `ATTENTION`; the forest comes as the
keyword argument `FOREST`, which models hand down to their attention.

On a GPU with flash-attn all segments are one call: their keys are gathered, one segment behind the other. Elsewhere
neighbouring segments that are small are one block with one mask, so that a forest of a thousand twigs is a few calls,
and a long segment without ancestors needs no mask.

Invariants:
- A token sees exactly the tokens of its rows up to itself.
- A feature of attention that a forest lacks (`refusal`) is not dropped in silence: the forest keeps it, and
  the engine raises it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.compat.kernels import varlen_attention
from verl_multiturn.verl_bridge.prefix_tree.forest import PrefixForest, Segment

ATTENTION = "verl_multiturn_prefix_tree"
FOREST = "prefix_forest"
NOT_HANDED_DOWN = "a model that does not hand further arguments down to its attention"

_CALL = 1 << 14
"""A further call of the attention costs about as much as this many pairs of a query and a key."""

# Arguments of an attention function that change nothing, whatever their value is, or that a forest takes care of.
_UNDERSTOOD = {"attention_mask", "dropout", "scaling", "is_causal", "position_ids", "use_cache", "cache_position"}


class Block:
    """Neighbouring segments that are computed in one call.

    Args:
        start: First token of the block.
        end: Behind its last token.
        keys: The tokens that it sees: those before it, and its own, `(keys,)`; None: its own alone.
        mask: Whether each token sees each key, `(tokens, keys)`; None: it sees its own tokens, causally.
    """

    def __init__(self, start: int, end: int, keys: Tensor | None, mask: Tensor | None) -> None:
        self.start, self.end, self.keys = start, end, keys
        self._mask = mask
        self._added: Tensor | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as numbers to add, made once for all layers: SDPA would make and keep one in each."""
        if self._mask is None:
            return None
        if self._added is None or self._added.dtype != dtype:
            self._added = torch.zeros(self._mask.shape, dtype=dtype, device=self._mask.device)
            self._added.masked_fill_(~self._mask, float("-inf"))
        return self._added


class ForestLayout:
    """The data of a forest that attention needs, on one device; shared by all layers of one forward pass."""

    def __init__(self, forest: PrefixForest, device: torch.device | str) -> None:
        self._forest, self._device = forest, device
        self._blocks: list[Block] | None = None
        self._packed: tuple[Tensor, Tensor, Tensor, int, int] | None = None
        self.layers: set[int] = set()
        """Layers that attended in the forest, by the identity of their modules."""
        self.refusal: str | None = None
        """A layer's feature that a forest lacks."""

    @property
    def blocks(self) -> list[Block]:
        """Return the forest's blocks."""
        if self._blocks is None:
            self._blocks = [self._block(part) for part in gathered(self._forest.segments)]
        return self._blocks

    def _block(self, segments: Sequence[Segment]) -> Block:
        first, start, end = segments[0], segments[0].start, segments[-1].end
        if len(segments) == 1 and not len(first.ancestors):
            return Block(start, end, None, None)
        keys = np.concatenate([first.ancestors, np.arange(start, end)])
        # In ascending order. An ancestor of a later segment that lies before the block is one of the first's, too.
        mask = np.zeros((end - start, len(keys)), dtype=bool)
        for each in segments:
            rows = slice(each.start - start, each.end - start)
            mask[rows, np.searchsorted(keys, each.ancestors)] = True
            own = len(first.ancestors) + each.start - start
            mask[rows, own : own + each.end - each.start] = np.tri(each.end - each.start, dtype=bool)
        return Block(start, end, self._tensor(keys), self._tensor(mask))

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return the arguments of one call of variable lengths.

        These are the keys of all segments, one behind the other; where each segment's queries begin, and its keys; the
        most queries of a segment, and the most keys.
        """
        if self._packed is None:
            segments = self._forest.segments
            keys = [np.concatenate([each.ancestors, np.arange(each.start, each.end)]) for each in segments]
            queries = [each.end - each.start for each in segments]
            sizes = [len(each) for each in keys]
            begins, key_begins = (self._tensor(np.cumsum([0, *each]).astype(np.int32)) for each in (queries, sizes))
            self._packed = (self._tensor(np.concatenate(keys)), begins, key_begins, max(queries), max(sizes))
        return self._packed

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def gathered(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments in parts of neighbours; a part is computed in one call where that costs least."""
    parts: list[list[Segment]] = []
    for each in segments:
        size, before = each.end - each.start, len(each.ancestors)
        if parts:
            first = parts[-1][0]
            known, own = len(first.ancestors), each.start - first.start
            # The further pairs of one block, which computes all of its queries with all of its keys.
            more = size * (known + own + size) + own * size
            if more <= size * (before + size) + _CALL:
                parts[-1].append(each)
                continue
        parts.append([each])
    return parts


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend in a forest; an attention function of transformers.

    Args:
        module: The layer's attention.
        query: `(1, heads, tokens, size)`.
        key: `(1, key heads, tokens, size)`.
        value: The same as `key`.
        attention_mask: Not used; the forest decides which tokens are seen.
        **kwargs: `FOREST` has the `ForestLayout`; the others are those of transformers' attention functions.

    Returns:
        The output, `(1, tokens, heads, size)`, and no weights.

    Raises:
        ConfigError: The forest did not come.
    """
    layout: ForestLayout | None = kwargs.pop(FOREST, None)
    if layout is None:
        raise ConfigError(f"prefix trees cannot be used with {NOT_HANDED_DOWN}; set custom.multiturn.prefix_tree=off")
    layout.layers.add(id(module))
    layout.refusal = layout.refusal or _beyond(module, kwargs)
    scale = kwargs.get("scaling")
    if (varlen := varlen_attention(query)) is not None:
        keys, begins, key_begins, most, most_keys = layout.packed
        queries, keys_of, values_of = (_halved(each[0].transpose(0, 1)) for each in (query, key, value))
        output = varlen(
            queries,
            keys_of[keys],
            values_of[keys],
            begins,
            key_begins,
            most,
            most_keys,
            softmax_scale=scale,
            causal=True,
        )
        return output.unsqueeze(0).to(query.dtype), None
    outputs = [_attend_block(query[0], key[0], value[0], block, scale) for block in layout.blocks]
    return torch.cat(outputs, dim=-2).flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous(), None


def _attend_block(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None) -> Tensor:
    """Return the output of one block, `(key heads, heads of each, tokens, size)`."""
    own = slice(block.start, block.end)
    heads, size = key.shape[0], key.shape[-1]
    queries = query[:, own].reshape(heads, query.shape[0] // heads, -1, size)

    def seen(each: Tensor) -> Tensor:
        chosen = each[:, own] if block.keys is None else each.index_select(1, block.keys)
        return chosen.unsqueeze(1).expand(heads, queries.shape[1], -1, size)

    return scaled_dot_product_attention(
        queries, seen(key), seen(value), block.mask(query.dtype), scale=scale, is_causal=block.keys is None
    )


def _halved(each: Tensor) -> Tensor:
    """Return a tensor in the precision in which flash-attn computes: some norms give float32 under autocast."""
    return each.to(torch.get_autocast_dtype(each.device.type)) if each.dtype == torch.float32 else each


def _beyond(module: torch.nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Return a layer's feature that attention in a forest lacks; None: there is none."""
    if kwargs.get("dropout"):
        return f"a dropout of {kwargs['dropout']} in the attention"
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        return "attention that is not causal"
    # Such as a sliding window, a cap of the logits or sinks.
    others = {name: given for name, given in kwargs.items() if name not in _UNDERSTOOD}
    asked = [name for name, given in others.items() if given is not None and given is not False]
    return f"attention with {', '.join(sorted(asked))}" if asked else None


@contextmanager
def in_forest(config: Any) -> Iterator[None]:
    """Let a model attend in forests, while the context lasts; its backward pass may compute the attention again.

    Args:
        config: The model's configuration, in which its layers look up their attention function.
    """
    own = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = own


AttentionInterface.register(ATTENTION, attend)
