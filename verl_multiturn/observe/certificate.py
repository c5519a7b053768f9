"""The certificate: a batch row compared, token by token, with the receipts of what the engine returned.

Shares no code with what builds a row, so that a fault there cannot hide itself: it knows receipts and arrays.

What holds for a row without violations:
- every generation lies in it verbatim, in order, right after exactly the ids that the engine was given for it (by
  length and digest);
- the mask is 1 at those tokens and nowhere else; their logprobs (to the bit, as float32) and weight versions are those
  that the engine returned with them, and every other token has 0.0 and -1;
- the mask of a row that the trainer has filtered is 0 throughout, and nothing else of it differs;
- ids, positions, columns and version tags fit each other, and the row's name is that of the receipts. Where positions
  have four dimensions (order, and time, height and width for images), the first is the row's order; in the other three
  a sampled turn stands as text does, one after another beyond all that precedes it. Which positions the tokens of an
  image have, and which pixels they stand for, is not proven;
- whatever else the loss takes is one finite number for each token, masked or not: verl multiplies by the mask, and NaN
  times 0 is NaN. Logprobs that the trainer computed are logprobs, and importance weights are not negative;
- a row in which nothing was sampled is marked as invalid: receipts that were lost do not pass for those of such a row.

Tokens after the last generation were given to nobody: they are untrained, and no trained token can see them.

A row of the trainer's own filling has no receipts: it must be what verl fills up with, and no row under that name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_multiturn.rollout.receipts import Receipt, Receipts, prompt_hash

Column = NDArray[Any]

_ROTARY = 4

# A logprob of the trainer's may lie a rounding above 0 (bfloat16 keeps 8 bits). The least likely token of a model has
# a logprob of some hundreds below 0, thousands where a low temperature multiplies it.
_LOGPROB = (-1e5, 0.05)
_BOUNDS = {"old_log_probs": _LOGPROB, "ref_log_prob": _LOGPROB, "rollout_is_weights": (0.0, np.inf)}
"""What else the loss takes, by verl's names, with the least and the largest number that it can be."""

# verl names its filling after no prompt: `pad` and a hexadecimal UUID.
_PADDING_UID = re.compile("pad[0-9a-f]{32}")

PROMPT, SAMPLED, CONTEXT = 0, 1, 2
"""Values of a record's `sources`; those above 2 are context too, of other kinds."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch, or one record. What its source does not have is None and is not checked.

    `P` tokens of prompt, `R` of response. `mask`, `loss_mask`, `logprobs`, `versions` and `loss_inputs` cover the
    response, or with `whole` prompt and response.
    """

    prompt_ids: Column
    response_ids: Column
    mask: Column
    logprobs: Column | None
    versions: Column | None
    whole: bool = False
    loss_mask: Column | None = None
    loss_inputs: Mapping[str, Column] = field(default_factory=dict)
    """What else the loss takes, by verl's names: `advantages`, `old_log_probs` …"""
    input_ids: Column | None = None
    """`[P + R]`"""
    position_ids: Column | None = None
    """`[P + R]`, or `[4, P + R]` of a model with rotary positions for images"""
    turn_ids: Column | None = None
    """`[P + R]`"""
    sources: Column | None = None
    """`[P + R]`"""
    min_version: int | None = None
    max_version: int | None = None
    """Tags: the oldest and the newest weights that sampled a token of the row."""
    request_id: str | None = None
    uid: str | None = None
    key: str | None = None
    """The row's name in the batch, `<uid>_<session id>_<index>`; a conversation has one row, of index 0."""
    padding: bool = False
    """The trainer's own filling; nothing of it is trained."""


@dataclass(frozen=True)
class Violation:
    """Where a row is not what the engine returned."""

    request: str
    turn: int | None
    """Assistant turn from 0 that the token belongs to or leads up to; None: the whole row."""
    token: int | None
    """Position in the row, prompt included; None: the whole turn or row."""
    what: str

    def __str__(self) -> str:
        place = "" if self.turn is None else f", turn {self.turn}"
        place += "" if self.token is None else f", token {self.token}"
        return f"request {self.request}{place}: {self.what}"


def verify(
    row: Row, receipts: Receipts, mask_may_shrink: bool = False, bypass: bool = False, filtered: bool = False
) -> list[Violation]:
    """All violations of a row; at most one for each column and generation.

    Args:
        mask_may_shrink: the trainer may take sampled tokens out of the mask (rejection sampling); never add one, and
            never in `loss_mask`.
        bypass: the trainer takes the engine's logprobs for `old_log_probs`.
        filtered: the row has to be out of the loss altogether.
    """
    return _Check(row, receipts, filtered).run(mask_may_shrink, bypass)


def repeated(keys: Iterable[str]) -> list[Violation]:
    """A violation for each name that several rows of a batch have."""
    return [
        Violation(f"of row {key}", None, None, f"it is {count} times in the batch")
        for key, count in Counter(keys).items()
        if count > 1
    ]


def shared(request_ids: Mapping[str, str]) -> list[Violation]:
    """A violation for each conversation that stands under several names in a batch.

    Args:
        request_ids: that of a row's receipts, by the row's name.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for key, request_id in request_ids.items():
        names[request_id].append(key)
    return [
        Violation(request_id, None, None, f"it is in the batch as {' and as '.join(map(repr, keys))}")
        for request_id, keys in names.items()
        if len(keys) > 1
    ]


@dataclass
class _Check:
    row: Row
    receipts: Receipts
    filtered: bool = False
    found: list[Violation] = field(default_factory=list)

    def __post_init__(self) -> None:
        row = self.row
        self.ids = np.concatenate([row.prompt_ids, row.response_ids])
        self.stored = self.ids.astype("<i4")
        self.first = 0 if row.whole else len(row.prompt_ids)
        self.generations: list[Receipt] = [g for g in self.receipts.generations if g.is_generation]
        self.ends = [g.prompt_tokens + len(g.ids) for g in self.generations]
        self.name = self.receipts.request_id + (f" (row {row.key})" if row.key else "")

    def run(self, mask_may_shrink: bool, bypass: bool) -> list[Violation]:
        self._range()
        self._whole_rows()
        if self.row.padding:
            self._padding(bypass)
        else:
            self._names()
            self._generations()
            self._columns(mask_may_shrink, bypass)
            self._tags()
        self._loss_inputs(bypass)
        return self.found

    @property
    def _covered(self) -> int:
        """How many tokens the columns cover."""
        return len(self.ids) - self.first

    def _add(self, turn: int | None, token: int | None, what: str) -> None:
        self.found.append(Violation(self.name, turn, token, what))

    def _turn_of(self, token: int) -> int:
        return int(np.searchsorted(self.ends, token, side="right"))

    def _names(self) -> None:
        row, receipts = self.row, self.receipts
        if row.request_id is not None and row.request_id != receipts.request_id:
            self._add(None, None, f"the row is of request {row.request_id!r}, the receipts of {receipts.request_id!r}")
        if row.uid is not None and row.uid != receipts.uid:
            self._add(None, None, f"the row has uid {row.uid!r}, the receipts {receipts.uid!r}")
        name = f"{receipts.uid}_{receipts.session_id}_0"
        if row.key is not None and row.key != name:
            self._add(None, None, f"the row is called {row.key!r}, the receipts are of {name!r}")
        # A record of an older version does not say that it is invalid; a row of a batch has to.
        if row.key is not None and not self.generations and not receipts.invalid:
            self._add(None, None, "its receipts hold no generation, and do not say that it is invalid")

    def _padding(self, bypass: bool) -> None:
        """verl's filling: a name of its own, one id throughout, one token of response, and nothing of it trained."""
        row, tagged = self.row, "it is tagged as the trainer's filling"
        if not _PADDING_UID.fullmatch(row.uid or "") or not re.fullmatch(rf"{row.uid}_\d+_0", row.key or ""):
            self._add(None, None, f"{tagged}, whose name is not {row.key!r}, of uid {row.uid!r}")
        if len(row.response_ids) != 1 or (self.ids != self.ids[0]).any():
            of = f"{len(row.response_ids)} tokens of response, {len(np.unique(self.ids))} different ones in all"
            self._add(None, None, f"{tagged}, which has one token of response and one id throughout, not {of}")
        nothing = np.zeros(self._covered, int)
        self._column("mask", row.mask, nothing, of="its tag")
        self._column("loss_mask", row.loss_mask, nothing, of="its tag")
        self._column("logprob", row.logprobs, nothing, of="its tag")
        if bypass:
            self._column("old_log_probs", row.loss_inputs.get("old_log_probs"), nothing, of="its tag")

    def _range(self) -> None:
        """Whether the ids are ids, and the digests of them as int32 are theirs."""
        wrong = np.flatnonzero((self.stored != self.ids) | (self.stored < 0))
        if wrong.size:
            at = int(wrong[0])
            self._add(self._turn_of(at), at, f"id is {self.ids[at]}, expected an integer from 0 to 2**31 - 1")

    def _loss_inputs(self, bypass: bool) -> None:
        for name, column in self.row.loss_inputs.items():
            if bypass and name == "old_log_probs":
                continue  # was compared, number by number
            if not self._length(name, column, self._covered, self.first):
                continue
            least, largest = _BOUNDS.get(name, (-np.inf, np.inf))
            wrong = np.flatnonzero(~(np.isfinite(column) & (column >= least) & (column <= largest)))
            if wrong.size:
                at = self.first + int(wrong[0])
                between = f" from {least:g} to {largest:g}" if name in _BOUNDS else ""
                self._add(self._turn_of(at), at, f"{name} is {column[wrong[0]]}, expected a finite number{between}")

    def _whole_rows(self) -> None:
        self._column("input_ids", self.row.input_ids, self.ids, first=0, of="prompt and response")
        positions = self.row.position_ids
        if positions is not None and positions.ndim == 2:
            self._image_positions(positions)
            positions = positions[0] if len(positions) else None
        self._column("position_ids", positions, np.arange(len(self.ids)), first=0, of="the row's order")

    def _image_positions(self, positions: Column) -> None:
        """The dimensions of time, height and width, where the model sampled."""
        if positions.shape != (_ROTARY, len(self.ids)):
            shape, expected = list(positions.shape), [_ROTARY, len(self.ids)]
            self._add(None, None, f"the position_ids column has shape {shape}, expected {expected}")
            return
        reached, before = -1, 0
        for turn, receipt in enumerate(self.generations):
            start, end = receipt.prompt_tokens, min(self.ends[turn], len(self.ids))
            reached = max(reached, int(positions[1:, before:start].max(initial=reached)))
            here, before = positions[1:, start:end], end
            if not here.size:
                continue
            first = int(here[0, 0])
            wrong = np.flatnonzero((here != first + np.arange(end - start)).any(axis=0))
            if wrong.size or first <= reached:
                at = int(wrong[0]) if wrong.size else 0
                found = here[:, at].tolist()
                what = f"position_ids for images are {found}, expected {first + at} three times, beyond {reached}"
                self._add(turn, start + at, what)
            reached = max(reached, int(here.max()))

    def _generations(self) -> None:
        """Each generation's place, its ids, and the ids before it."""
        digest, hashed = prompt_hash(), 0
        prefix_is_right = True
        before = len(self.row.prompt_ids)
        for turn, receipt in enumerate(self.generations):
            start, end = receipt.prompt_tokens, self.ends[turn]
            if start < before:
                self._add(turn, start, f"begins at {start}, before the end of what precedes it at {before}")
            if end > len(self.ids):
                self._add(turn, max(start, len(self.ids)), f"reaches to {end}, the row ends at {len(self.ids)}")
            here = self.ids[start:end]
            wrong = np.flatnonzero(here != receipt.ids[: len(here)])
            if wrong.size:
                at = int(wrong[0])
                rest = f" ({wrong.size} tokens differ)" if wrong.size > 1 else ""
                self._add(turn, start + at, f"id is {here[at]}, the engine returned {receipt.ids[at]}{rest}")
            if prefix_is_right and start >= hashed:
                digest.update(self.stored[hashed:start].tobytes())
                prefix_is_right = digest.hexdigest() == receipt.prompt_digest
                # A wrong id of an earlier generation is named there, and all digests after it are others.
                if not prefix_is_right and not any(v.turn is not None and v.turn < turn for v in self.found):
                    self._add(turn, min(hashed, start), f"tokens {hashed} to {start - 1} are not those the engine saw")
                hashed = start
            before = end

    def _columns(self, mask_may_shrink: bool, bypass: bool) -> None:
        row, total = self.row, len(self.ids)
        sampled = np.zeros(total, int)
        logprobs = np.zeros(total, np.float32)
        versions = np.full(total, -1)
        turns = np.full(total, len(self.generations))
        before = 0
        for turn, receipt in enumerate(self.generations):
            start, end = min(receipt.prompt_tokens, total), min(self.ends[turn], total)
            sampled[start:end] = 1
            logprobs[start:end] = receipt.logprobs[: end - start]
            versions[start:end] = receipt.versions[: end - start]
            turns[before:end] = turn
            before = end
        mask = np.zeros(total, int) if self.filtered else sampled
        self._column("mask", row.mask, mask[self.first :], may_shrink=mask_may_shrink)
        self._column("loss_mask", row.loss_mask, mask[self.first :])
        if row.logprobs is not None:
            self._column("logprob", row.logprobs.astype(np.float32), logprobs[self.first :])
        if bypass:
            self._column("old_log_probs", row.loss_inputs.get("old_log_probs"), logprobs[self.first :])
        self._column("version", row.versions, versions[self.first :])
        self._column("turn_id", row.turn_ids, turns, first=0)
        if row.sources is not None:
            place = np.where(np.arange(total) < len(row.prompt_ids), PROMPT, CONTEXT)
            self._column("source", np.minimum(row.sources, CONTEXT), np.where(sampled == 1, SAMPLED, place), first=0)

    def _column(
        self,
        name: str,
        column: Column | None,
        expected: Column,
        first: int | None = None,
        of: str = "the receipts",
        may_shrink: bool = False,
    ) -> None:
        """Compare one column; `first` is the position of its first token in the row."""
        first = self.first if first is None else first
        if column is None or not self._length(name, column, len(expected), first):
            return
        same = column == expected
        if may_shrink:
            same |= column == 0
        wrong = np.flatnonzero(~same)
        if wrong.size:
            at = int(wrong[0])
            rest = f" ({wrong.size} tokens differ)" if wrong.size > 1 else ""
            token = first + at
            self._add(self._turn_of(token), token, f"{name} is {column[at]}, by {of} {expected[at]}{rest}")

    def _length(self, name: str, column: Column, expected: int, first: int) -> bool:
        """Whether a column is one number for each token."""
        if column.shape == (expected,):
            return True
        token = first + min(len(column), expected)
        shape = list(column.shape)
        self._add(self._turn_of(token), token, f"the {name} column has shape {shape}, expected [{expected}]")
        return False

    def _tags(self) -> None:
        versions = [g.versions[g.versions >= 0] for g in self.generations]
        known = np.concatenate(versions) if versions else np.empty(0, int)
        if not known.size:
            return
        for name, tag, expected in (
            ("oldest", self.row.min_version, known.min()),
            ("newest", self.row.max_version, known.max()),
        ):
            # A record has no tags; a row of a batch has to.
            if tag != expected and (tag is not None or self.row.key is not None):
                self._add(None, None, f"the tag of the {name} weights is {tag}, by the receipts {expected}")
