"""The certificate: it compares a batch row, token by token, with the receipts of the engine's tokens.

It knows only receipts and arrays. It shares no code with the modules that build a row, so that a fault there cannot
hide itself.

A row without violations has these properties:
- every generation lies in the row verbatim and in order. Right before it lie exactly the ids that the engine was given
  for it (checked by length and digest);
- the mask is 1 at the tokens of generations and nowhere else. Their logprobs (to the bit, as float32) and weight
  versions are those that the engine returned with them. Every other token has the logprob 0.0 and the version -1;
- if the trainer has filtered the row, its mask is 0 throughout, and nothing else of it differs;
- if the trainer bounds the age of tokens, the mask is 0 at exactly the sampled tokens that are older, or whose version
  is not known. Nothing else of them differs;
- ids, positions, columns and version tags fit each other, and the row's name is that of the receipts. Positions may
  have four dimensions: order, and time, height and width for images. Then the first is the row's order. In the other
  three the tokens of a sampled turn count up one by one, as text does, from beyond all positions before the turn. The
  positions of an image's own tokens, and the pixels behind them, are not proven;
- every further input of the loss is one finite number for each token, masked or not, because verl multiplies by the
  mask, and NaN times 0 is NaN. Logprobs that the trainer computed are possible logprobs. Importance weights are not
  negative;
- a teacher's columns (distillation) are the answer that its receipts have a digest of, and that was given about exactly
  the row's tokens. Every number in them is a possible log-prob;
- a row in which nothing was sampled is marked as invalid. So a row whose receipts were lost does not pass for one.

Tokens after the last generation were given to no engine: they are untrained, and no trained token can see them.

`certificate.conversations` checks how the rows of a conversation, and those of a batch, belong together.

A padding row has no receipts. It must be exactly verl's padding, and no real row may bear its tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_multiturn.certificate.receipts import Receipt, Receipts, prompt_hash, teacher_digest

Column = NDArray[Any]

_ROTARY = 4

# Least and largest logprob that the trainer may have computed. Rounding may put it slightly above 0 (bfloat16 keeps 8
# bits). A model's least likely token has a logprob some hundreds below 0; with a low temperature, some thousands.
LOGPROB = (-1e5, 0.05)
_BOUNDS = {"old_log_probs": LOGPROB, "ref_log_prob": LOGPROB, "rollout_is_weights": (0.0, np.inf)}
"""Least and largest number allowed in a column that the loss takes, by verl's name of the column."""

# verl gives a padding row a uid of no prompt: `pad` and a hexadecimal UUID.
_PADDING_UID = re.compile("pad[0-9a-f]{32}")

PROMPT, SAMPLED, CONTEXT = 0, 1, 2
"""Values of a record's `sources`. Values above 2 are other kinds of context."""


@dataclass(frozen=True, eq=False)
class CertificateRow:
    """One row of a batch, or one record; a column that its source lacks is None and is not checked.

    P is the number of prompt tokens, R that of response tokens. `prompt_ids` is `(P,)` and `response_ids` `(R,)`.
    `mask`, `loss_mask`, `logprobs`, `versions` and each of `loss_inputs` are `(R,)`, or `(P + R,)` with `whole`.
    """

    prompt_ids: Column
    response_ids: Column
    mask: Column
    logprobs: Column | None
    versions: Column | None
    whole: bool = False
    loss_mask: Column | None = None
    loss_inputs: Mapping[str, Column] = field(default_factory=dict)
    """Further inputs of the loss by verl's names, such as `advantages` and `old_log_probs`."""
    input_ids: Column | None = None
    """Ids of prompt and response, `(P + R,)`."""
    position_ids: Column | None = None
    """Positions, `(P + R,)`, or `(4, P + R)` for a model with rotary positions for images."""
    turn_ids: Column | None = None
    """Assistant turn of each token, `(P + R,)`."""
    sources: Column | None = None
    """Source of each token, `(P + R,)`."""
    teacher: tuple[Column, Column] | None = None
    """Ids and log-probs of a teacher, `(P + R, K)` each; None: the loss takes none."""
    min_version: int | None = None
    max_version: int | None = None
    """Tags of the row: versions of the oldest and of the newest weights that sampled one of its tokens."""
    request_id: str | None = None
    uid: str | None = None
    key: str | None = None
    """Name of the row in the batch, `<uid>_<session id>_<index>`; a conversation's rows are counted from 0."""
    padding: bool = False
    """True for a row with which the trainer pads the batch; nothing of it is trained."""


@dataclass(frozen=True)
class Violation:
    """A difference between a row and the engine's tokens."""

    request: str
    """Request id of the row's receipts; `of row KEY` where the row has no receipts."""
    turn: int | None
    """Assistant turn, from 0, that the token belongs to or leads up to; None for the whole row."""
    token: int | None
    """Position in the row, prompt included; None for the whole turn or row."""
    what: str

    def __str__(self) -> str:
        place = "" if self.turn is None else f", turn {self.turn}"
        place += "" if self.token is None else f", token {self.token}"
        return f"request {self.request}{place}: {self.what}"


def verify(
    row: CertificateRow,
    receipts: Receipts,
    mask_may_shrink: bool = False,
    bypass: bool = False,
    filtered: bool = False,
    oldest: int | None = None,
) -> list[Violation]:
    """Return all violations of a row; at most one for each column and generation.

    Args:
        row: The row to verify.
        receipts: The receipts of the row's request.
        mask_may_shrink: Whether the trainer may take sampled tokens out of `mask` (rejection sampling). It may never
            add a token, and never change `loss_mask`.
        bypass: Whether the trainer uses the engine's logprobs as `old_log_probs`.
        filtered: Whether the mask of the row has to be 0 throughout.
        oldest: Version of the oldest weights whose tokens are trained; None: all tokens are.
    """
    return _RowExamination(row, receipts, filtered, oldest).run(mask_may_shrink, bypass)


@dataclass
class _RowExamination:
    row: CertificateRow
    receipts: Receipts
    filtered: bool = False
    oldest: int | None = None
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
        if self.row.teacher is not None:
            self._teacher(*self.row.teacher)
        return self.found

    @property
    def _covered(self) -> int:
        """Number of tokens that the columns cover."""
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
        name = f"{receipts.uid}_{receipts.session_id}_{receipts.row}"
        if row.key is not None and row.key != name:
            self._add(None, None, f"the row is called {row.key!r}, the receipts are of {name!r}")
        # Records of an older version have no mark that they are invalid. A row of a batch needs it.
        if row.key is not None and not self.generations and not receipts.invalid:
            self._add(None, None, "its receipts hold no generation, and do not say that it is invalid")

    def _padding(self, bypass: bool) -> None:
        """Check a padding row: verl's name for padding, one id throughout, one response token, nothing trained."""
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
        """Check that all ids are non-negative int32 numbers; digests are computed from int32."""
        wrong = np.flatnonzero((self.stored != self.ids) | (self.stored < 0))
        if wrong.size:
            at = int(wrong[0])
            self._add(self._turn_of(at), at, f"id is {self.ids[at]}, expected an integer from 0 to 2**31 - 1")

    def _loss_inputs(self, bypass: bool) -> None:
        for name, column in self.row.loss_inputs.items():
            if bypass and name == "old_log_probs":
                continue  # `_columns` or `_padding` has compared it number by number
            if not self._length(name, column, self._covered, self.first):
                continue
            least, largest = _BOUNDS.get(name, (-np.inf, np.inf))
            wrong = np.flatnonzero(~(np.isfinite(column) & (column >= least) & (column <= largest)))
            if wrong.size:
                at = self.first + int(wrong[0])
                between = f" from {least:g} to {largest:g}" if name in _BOUNDS else ""
                self._add(self._turn_of(at), at, f"{name} is {column[wrong[0]]}, expected a finite number{between}")

    def _teacher(self, ids: Column, logprobs: Column) -> None:
        """Check the columns of a teacher; in a padding row verl writes zeros, and the row's one id."""
        for name, column in (("teacher_ids", ids), ("teacher_logprobs", logprobs)):
            if column.ndim != 2 or column.shape != (len(self.ids), ids.shape[-1]):
                self._add(
                    None, None, f"the {name} column has shape {list(column.shape)}, expected {len(self.ids)} rows"
                )
                return
        least, largest = LOGPROB
        wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs >= least) & (logprobs <= largest)).all(axis=1))
        if wrong.size:
            at = int(wrong[0])
            found = logprobs[at].tolist()
            self._add(
                self._turn_of(at), at, f"teacher_logprobs is {found}, expected numbers from {least:g} to {largest:g}"
            )
        elif self.row.padding:
            if (logprobs != 0).any() or (ids != self.ids[0]).any():
                self._add(None, None, "it is tagged as the trainer's filling, and has a teacher's answer")
        elif not self.receipts.teacher:
            self._add(None, None, "its receipts know of no teacher's answer")
        elif teacher_digest(self.ids, ids, logprobs) != self.receipts.teacher:
            self._add(None, None, "the teacher's columns are not the answer that was given about the row's tokens")

    def _whole_rows(self) -> None:
        self._column("input_ids", self.row.input_ids, self.ids, first=0, of="prompt and response")
        positions = self.row.position_ids
        if positions is not None and positions.ndim == 2:
            self._image_positions(positions)
            positions = positions[0] if len(positions) else None
        self._column("position_ids", positions, np.arange(len(self.ids)), first=0, of="the row's order")

    def _image_positions(self, positions: Column) -> None:
        """Check the dimensions time, height and width of sampled turns."""
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
        """Check the place of each generation, its ids, and the ids before it.

        Example of a row with two generations. The digest of a receipt is of all ids that the engine was given:

            ids        | prompt | generation 0 | observation | generation 1 | after
            digest 0   |<------>|
            digest 1   |<----------------------------------->|
        """
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
                # A wrong id in an earlier turn was reported there already, and changes all later digests.
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
        if self.oldest is not None:  # an unknown version, -1, is older than all
            mask = mask * (versions >= max(self.oldest, 0))
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
        """Compare one column; `first` is the position in the row of the column's first token."""
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
        """Return whether a column has one number for each token; if not, add a violation."""
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
            # A record has no tags. A row of a batch must have them.
            if tag != expected and (tag is not None or self.row.key is not None):
                self._add(None, None, f"the tag of the {name} weights is {tag}, by the receipts {expected}")
