"""`PrefixForest`: rows of tokens, with each common prefix once.

Example: the rows `[1, 2, 3, 4]` and `[1, 2, 5]` have seven tokens. Their forest has five, in segments:

    token       1  2  3  4  5
    position    0  1  2  3  2
    parent     -1  0  1  2  1
    segment     0  0  0  0  1        segment 1 sees tokens 0 and 1, and itself

Invariants:
- Rows share a token exactly when they agree in all ids, positions and the temperature up to it.
- The tokens come depth first: a token's parent is before it, a segment is one stretch of tokens, and each of its
  tokens but the first has the one before it as its parent.
- `edges` and `nodes` map each token of the rows to the place of its values, so that nothing depends on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_POSITION_BITS = 31


@dataclass(frozen=True)
class Segment:
    """One stretch of a forest's tokens without a branch before it.

    Args:
        start: Its first token.
        end: Behind its last token.
        ancestors: The tokens before it in its rows, `(ancestors,)`, all of other segments.
    """

    start: int
    end: int
    ancestors: Ints


@dataclass(frozen=True)
class SortedRows:
    """Rows in an order in which common prefixes are neighbours.

    Args:
        order: Indices of the rows, `(rows,)`.
        keys: For each row, in its own order, one number for each token; equal numbers are equal tokens.
        shared: How many tokens each row, in the sorted order, shares with the one before it, `(rows,)`.
    """

    order: Ints
    keys: Sequence[Ints]
    shared: Ints

    @cached_property
    def lengths(self) -> Ints:
        """Return the number of tokens of each row, in the sorted order."""
        return np.array([len(self.keys[i]) for i in self.order], dtype=np.int64)


def sort_rows(
    ids: Sequence[Ints], positions: Sequence[Ints] | None = None, temperatures: Sequence[float] | None = None
) -> SortedRows:
    """Sort rows so that those with a common prefix are neighbours.

    Args:
        ids: Token ids of each row.
        positions: Positions of each row's tokens; None: 0, 1, 2, and so on.
        temperatures: Temperature of each row; None: all the same. Rows of different temperatures share nothing.
    """
    if positions is None:
        positions = [np.arange(len(row), dtype=np.int64) for row in ids]
    keys = [
        (np.asarray(row, dtype=np.int64) << _POSITION_BITS) | place for row, place in zip(ids, positions, strict=True)
    ]
    heats = [0.0] * len(keys) if temperatures is None else list(temperatures)
    texts = [key.astype(">i8").tobytes() for key in keys]  # compared as bytes, they are in the order of the numbers
    order = sorted(range(len(keys)), key=lambda i: (heats[i], texts[i]))
    shared = np.zeros(len(order), dtype=np.int64)
    for at, (before, row) in enumerate(pairwise(order), start=1):
        if heats[before] == heats[row]:
            shared[at] = _common(keys[before], keys[row])
    return SortedRows(np.array(order, dtype=np.int64), keys, shared)


def _common(one: Ints, other: Ints) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


@dataclass(frozen=True)
class PrefixForest:
    """Rows with each common prefix once.

    Args:
        ids: Token ids, `(tokens,)`.
        positions: Positions in the rows, `(tokens,)`.
        parents: Index of the token before, `(tokens,)`; -1: a row begins.
        rows: Index of a row that each token belongs to, `(tokens,)`.
        nodes: For each token of the rows, one row behind the other, its token of the forest, `(tokens of rows,)`.
        ends: Where each row ends in `nodes`, `(rows,)`.
        segments: The stretches of tokens, in order.
    """

    ids: Ints
    positions: Ints
    parents: Ints
    rows: Ints
    nodes: Ints
    ends: Ints
    segments: tuple[Segment, ...]

    @cached_property
    def branches(self) -> Ints:
        """Return the tokens whose parent is not just before them, without those that begin a row."""
        before = np.arange(-1, len(self.ids) - 1)
        return np.flatnonzero((self.parents >= 0) & (self.parents != before))

    @cached_property
    def edges(self) -> Ints:
        """Return where the log-prob of each row's next token lies, for each token of the rows, `(tokens of rows,)`.

        An index below `tokens` is that of a token whose successor is just behind it; then follow `branches`. A
        row's last token has no next one, and the index -1.
        """
        edge = self.parents.copy()
        edge[self.branches] = len(self.ids) + np.arange(len(self.branches))
        following = np.full(len(self.nodes), -1, dtype=np.int64)
        following[:-1] = edge[self.nodes[1:]]
        following[self.ends[self.ends > 0] - 1] = -1
        return following


def grow(
    ids: Sequence[Ints], positions: Sequence[Ints] | None = None, temperatures: Sequence[float] | None = None
) -> PrefixForest:
    """Return the forest of rows; the arguments are those of `sort_rows`."""
    rows = sort_rows(ids, positions, temperatures)
    paths: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(rows.keys)
    new_keys, owners, parents = [], [], []
    segments: list[Segment] = []
    path, size = np.zeros(0, dtype=np.int64), 0
    for row, shared in zip(rows.order.tolist(), rows.shared.tolist(), strict=True):
        fresh = rows.keys[row][shared:]
        known, path = path, np.concatenate([path[:shared], np.arange(size, size + len(fresh))])
        paths[row] = path
        if not len(fresh):
            continue  # an equal row, or a prefix of it, was there before
        if shared and shared == len(known) and known[-1] == size - 1:
            segments[-1] = Segment(segments[-1].start, size + len(fresh), segments[-1].ancestors)  # it goes on
        else:
            segments.append(Segment(size, size + len(fresh), path[:shared]))
        parent = np.arange(size - 1, size + len(fresh) - 1)
        parent[0] = path[shared - 1] if shared else -1
        new_keys.append(fresh)
        owners.append(np.full(len(fresh), row))
        parents.append(parent)
        size += len(fresh)
    keys = _joined(new_keys)
    return PrefixForest(
        keys >> _POSITION_BITS,
        keys & ((1 << _POSITION_BITS) - 1),
        _joined(parents),
        _joined(owners),
        _joined(paths),
        np.cumsum([len(each) for each in paths], dtype=np.int64),
        tuple(segments),
    )


def _joined(parts: Sequence[Ints]) -> Ints:
    joined: Ints = np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
    return joined
