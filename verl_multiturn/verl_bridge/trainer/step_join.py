"""The outcome of each row in the trainer, for the records: `records/read/joins.py` has the files.

    each update       look      whose rows they are; the columns that the certificate fetched are taken later
    actor's update    note_updates
    end of a step     write     one join for the step, made in the writer's thread
    end of all of it  end_step  the step's line, with its metrics

A validation: `look_at_validation` for each batch, then `end_validation`.

Invariants:
- nothing of the batch is changed, and a fault here ends no step: it is logged once;
- neither update nor step waits for a join. Only of rows that the certificate did not fetch the trainer itself fetches
  columns, before the update, which may change them;
- a row's sampled tokens are those of its turns (stats), whatever the trainer has made of its mask since. A row of
  another agent loop, which names no turns, has those of its mask.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.config import PATH, MultiTurnSettings
from verl_multiturn.describe import describe
from verl_multiturn.observe.metrics import Stats
from verl_multiturn.records.read.joins import JoinedRow, table_of
from verl_multiturn.records.read.scores import sum_of_rows
from verl_multiturn.records.write.run_file import new_start
from verl_multiturn.records.write.step_writer import StepWriter
from verl_multiturn.rollout.groups.staleness import StalenessBound, too_old
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.certificate.columns import VERSIONS, fetch_some
from verl_multiturn.verl_bridge.certificate.parts import FetchedColumns
from verl_multiturn.verl_bridge.loops.output import Fields, joined_row
from verl_multiturn.verl_bridge.trainer.report import PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows
from verl_multiturn.verl_bridge.trainer.run_notes import run_file
from verl_multiturn.verl_bridge.workers.news import RunNews

logger = logging.getLogger(__name__)

_LISTS = {
    "advantages": "advantages",
    "old_log_probs": "old_log_probs",
    "ref_log_prob": "ref_log_probs",
    "rollout_is_weights": "importance_weights",
    "entropy": "entropy",
}
"""Columns of verl's that have a value for each response token, and their names in the join."""
NEEDED = (VERSIONS, "response_mask", "rm_scores", *_LISTS)
"""Columns that the join needs."""


class StepJoin:
    """The joins of a trainer's steps and validations.

    Its metric of a step is `rollout/records/join_seconds`: time that the trainer itself spent on it.

    Args:
        writer: Writes the files.
        masks_void_rows: Whether rows with void turns are kept out of the loss.
        bound: The bound of the ages; None: there is none.
    """

    def __init__(self, writer: StepWriter, masks_void_rows: bool, bound: StalenessBound | None) -> None:
        self._writer, self._masks_void_rows, self._bound = writer, masks_void_rows, bound
        self._told = False
        self._validated: list[JoinedRow] = []
        self._about: Callable[..., dict[str, Any]] | None = None
        """Returns the content of the run's file, as long as the tools' schemas are not known."""
        self.began = time.time()
        """When the step began."""
        self.begin_step()

    @classmethod
    def of(cls, config: DictConfig, settings: MultiTurnSettings, bound: StalenessBound | None) -> StepJoin | None:
        """Return the joiner of a run's rows; None without records.

        Where the start-up check has not named the run's start, that is done here: the agent-loop workers get the
        configuration next.

        Args:
            config: verl's whole configuration.
            settings: Our settings in it.
            bound: The bound of the ages.
        """
        if settings.record_dir is None:
            return None
        start = settings.derived.record_start or new_start()
        with open_dict(config):
            OmegaConf.update(config, f"{PATH}.derived.record_start", start, force_add=True)
        return cls(StepWriter(settings.record_dir, start), settings.void_turn_pattern is not None, bound)

    @contextlib.contextmanager
    def run(self, trainer: Any) -> Iterator[None]:
        """Write the run's file; at the end of the context the line of the run's end.

        Args:
            trainer: Our trainer, which is set up.
        """
        began = time.time()
        # It is called later, in a thread, while the trainer's step goes on, which may change its configuration.
        still = SimpleNamespace(config=copy.deepcopy(trainer.config), tokenizer=getattr(trainer, "tokenizer", None))
        reference = None if trainer.reference is None else trainer.reference.step
        self._about = partial(run_file, still, self._writer.start, began, trainer.global_steps or None, reference)
        self._writer.run(self._about)
        error = ""
        try:
            yield
        except BaseException as raised:  # it is noted, and goes on
            error = describe(raised)
            raise
        finally:
            self._writer.other({"event": "end", "start": self._writer.start, "at": time.time(), "error": error})
            self._writer.close()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._batches: list[_BatchFacts] = []
        self._updated: dict[RowKey, int | None] = {}
        self._spared: dict[RowKey, str] = {}
        self._updates = 0
        self._seconds = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the step's metric."""
        return {f"{PREFIX}records/join_seconds": self._seconds}

    def look(self, rows: BatchRows, fetched: FetchedColumns, step: int, factors: Mapping[RowKey, float]) -> None:
        """Note a batch whose columns are final.

        Args:
            rows: Those of verl's batch.
            fetched: The columns `NEEDED`, of the rows that the certificate verified.
            step: The training step.
            factors: Factors by which Optimal Tool Calls scaled scores.
        """
        self._guarded(lambda: self._look(rows, fetched, step, factors))

    def _look(self, rows: BatchRows, fetched: FetchedColumns, step: int, factors: Mapping[RowKey, float]) -> None:
        missing = [key for key in rows.real if key not in fetched.keys]
        others: dict[RowKey, Fields] = {}
        # TransferQueue drops a column for all rows if one lacks it, so the rows of each kind are requested together.
        for ours in (True, False):
            if keys := [key for key in missing if (key in rows.stats) == ours]:
                others |= zip(keys, fetch_some(keys, rows.partition_id, NEEDED), strict=True)
        masks, bound = self._masks_void_rows, self._bound
        self._batches.append(
            _BatchFacts(
                rows.stats, rows.groups, dict(rows.left_out), fetched.get, others, dict(factors), step, masks, bound
            )
        )

    def note_updates(self, numbers: Mapping[str, int | None]) -> None:
        """Note in which update the actor was trained with each row of a batch.

        Args:
            numbers: The number of the update within the batch, by the row's name; None: the workers draw it.
        """
        known = [number for number in numbers.values() if number is not None]
        for name, number in numbers.items():
            self._updated[RowKey.parse(name)] = None if number is None else self._updates + number
        self._updates += 1 + max(known, default=0)

    def note_spared(self, names: Sequence[str], silent: Collection[str]) -> None:
        """Note why rows of a batch were skipped in the actor's update.

        Args:
            names: The names of the batch's rows.
            silent: The groups without signal.
        """
        for name in names:
            key = RowKey.parse(name)
            self._spared[key] = "no_signal" if key.uid in silent else "zero_advantage"

    def write(self, step: int) -> None:
        """Hand the step's join to the writer, which makes it."""
        # The attributes are other objects in the next step.
        make = partial(self._made, self._batches, self._updated, self._spared)
        self._writer.join(False, step, lambda: table_of(make()))

    def _made(
        self,
        batches: Sequence[_BatchFacts],
        updated: Mapping[RowKey, int | None],
        spared: Mapping[RowKey, str],
    ) -> list[JoinedRow]:
        """Return the rows of a step; called in the writer's thread."""
        joined: dict[RowKey, JoinedRow] = {}
        self._said(lambda: joined.update(each for batch in batches for each in batch.rows().items()))
        for key, row in joined.items():
            if key in updated:
                row.update = updated[key]
            elif row.trained:
                row.trained, row.untrained = 0, spared.get(key, "skipped_update")
                if row.untrained == "no_signal":  # these columns were not computed
                    row.old_log_probs = row.entropy = None
        return list(joined.values())

    def end_step(
        self, step: int, phases: Mapping[str, Any], metrics: Mapping[str, Any], groups: Mapping[str, Any]
    ) -> None:
        """Write the line of a step that is over.

        Args:
            step: The step.
            phases: verl's `timing_raw`.
            metrics: All metrics of the step.
            groups: `evicted`, `filtered`, `failed`, `discarded` and `rerolled` of `schema.StepLine`.
        """
        self._guarded(lambda: self._line("step", step, self.began, phases, metrics, groups))

    def note_news(self, news: RunNews) -> None:
        """Note the clocks of workers that started since the step before, and once the tools' schemas."""
        self._guarded(lambda: self._note_news(news))

    def _note_news(self, news: RunNews) -> None:
        for clock in news.clocks:
            self._writer.other(clock)
        if self._about is not None and news.schemas is not None:
            self._writer.run(partial(self._about, schemas=news.schemas))
            self._about = None

    def look_at_validation(self, rows: BatchRows, step: int) -> None:
        """Join the rows of a batch of a validation."""
        self._guarded(lambda: self._look_at_validation(rows, step))

    def _look_at_validation(self, rows: BatchRows, step: int) -> None:
        if not rows.real:
            return
        joined = {}
        for key, fields in zip(rows.real, fetch_some(rows.real, rows.partition_id, ["rm_scores"]), strict=True):
            stats = rows.stats.get(key)
            row = joined[key] = joined_row(key, stats, fields, step, validation=True)
            row.untrained = _no_score(rows.left_out, key, stats)
        _add_groups(rows.groups, rows.stats, joined)
        self._validated += joined.values()

    def end_validation(self, step: int, began: float, metrics: Mapping[str, Any]) -> None:
        """Write the join and the line of a validation that is over; `began` is when it began."""
        rows, self._validated = self._validated, []
        self._writer.join(True, step, lambda: table_of(rows))
        phases = {"testing": time.time() - began}
        self._guarded(lambda: self._line("validation", step, began, phases, metrics, {}))

    def _line(
        self,
        event: str,
        step: int,
        began: float,
        phases: Mapping[str, Any],
        metrics: Mapping[str, Any],
        groups: Mapping[str, Any],
    ) -> None:
        numbers = {str(name): number for name, value in metrics.items() if (number := _number(value)) is not None}
        times = {name: float(value) for name, value in phases.items()}
        line = {"event": event, "step": step, "began": began, "ended": time.time(), "phases": times}
        self._writer.line({**line, "metrics": numbers, **groups})

    def _guarded(self, do: Callable[[], None]) -> None:
        started = time.perf_counter()
        self._said(do)
        self._seconds += time.perf_counter() - started

    def _said(self, do: Callable[[], None]) -> None:
        """Log a fault once, also in the writer's thread."""
        try:
            do()
        except Exception as error:  # a step's record is not a reason to end the run
            if not self._told:
                logger.exception("rows are missing in the records of a step: %s (said once)", describe(error))
            self._told = True


@dataclass(frozen=True)
class _BatchFacts:
    """Holds the join's data of a batch before its update; nothing of it is changed any more."""

    stats: Mapping[RowKey, Stats]
    groups: Mapping[str, Mapping[str, Sequence[RowKey]]]
    left_out: Mapping[str, str]
    fetched: Callable[[], Mapping[RowKey, Fields]]
    """Returns the columns of the rows that the certificate verified."""
    others: Mapping[RowKey, Fields]
    """The columns of the other rows."""
    factors: Mapping[RowKey, float]
    step: int
    masks_void_rows: bool
    bound: StalenessBound | None

    def rows(self) -> dict[RowKey, JoinedRow]:
        """Return the join's entry of each row before its update."""
        columns = {**self.fetched(), **self.others}
        keys = [key for conversations in self.groups.values() for own in conversations.values() for key in own]
        joined = {key: self._row(key, columns[key]) for key in keys}
        _add_groups(self.groups, self.stats, joined)
        for key, factor in self.factors.items():
            if key in joined:
                joined[key].otc_factor = factor
        return joined

    def _row(self, key: RowKey, fields: Fields) -> JoinedRow:
        stats = self.stats.get(key)
        mask = np.asarray(fields["response_mask"]) != 0
        sampled = _sampled(stats, mask)
        places = np.flatnonzero(sampled)
        row = joined_row(key, stats, fields, self.step, validation=False)
        for name, ours in _LISTS.items():
            if (column := fields.get(name)) is not None and len(column) == len(mask):
                setattr(row, ours, np.asarray(column)[places].astype(np.float32))
        trained = mask[places]
        row.trained = int(trained.sum())
        if row.trained == len(places):
            row.untrained = None if len(places) else _no_score(self.left_out, key, stats) or "unsampled"
            return row
        row.untrained = self._cause(key, stats, fields, places[~trained])
        if row.trained:
            row.untrained_tokens = np.flatnonzero(~trained).astype(np.int32)
        return row

    def _cause(self, key: RowKey, stats: Stats | None, fields: Fields, places: NDArray[np.intp]) -> str:
        """Return why the sampled tokens at these places of a row are not in the loss."""
        if (cause := _no_score(self.left_out, key, stats)) is not None:
            return cause
        if stats is not None and stats.get("void") and self.masks_void_rows:
            return "void"
        versions, bound = fields.get(VERSIONS), self.bound
        if bound is None or versions is None:
            return "rejected"
        return "too_old" if too_old(np.asarray(versions)[places], self.step, bound).any() else "rejected"


def _no_score(left_out: Mapping[str, str], key: RowKey, stats: Stats | None) -> str | None:
    """Return why the score of a row has no meaning (`records.read.scores.NO_SCORE`); None: it counts.

    Args:
        left_out: The causes of conversations that the trainer leaves out, by their names.
        key: The row's name.
        stats: Its stats; None for a row of another agent loop.
    """
    if (cause := left_out.get(key.conversation)) is not None:
        return cause
    if stats is None or stats["valid"]:
        return None
    return "outage" if stats.get("stop") == StopReason.OUTAGE else "invalid"


def _sampled(stats: Stats | None, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which response tokens of a row were sampled, `(R,)`; `mask`: which are in the loss."""
    sampled = mask.copy()
    for turn in (stats or {}).get("turns") or ():
        sampled[turn["start"] : turn["end"]] = True
    return sampled


def _add_groups(
    groups: Mapping[str, Mapping[str, Sequence[RowKey]]],
    stats: Mapping[RowKey, Stats],
    joined: Mapping[RowKey, JoinedRow],
) -> None:
    """Enter mean and standard deviation of each group's valid conversations.

    A conversation has one score, or one for each role, which is compared with the same role's alone.
    """
    for group in groups.values():
        roles: dict[str | None, list[list[RowKey]]] = defaultdict(list)
        for keys in group.values():
            own: dict[str | None, list[RowKey]] = defaultdict(list)
            for key in keys:
                own[joined[key].role].append(key)
            for role, some in own.items():
                roles[role].append(some)
        for members in roles.values():
            scores = []
            for keys in members:
                score = sum_of_rows(joined[key].score for key in keys)
                if score is not None and all(stats.get(key, {"valid": True})["valid"] for key in keys):
                    scores.append(score)
            mean = math.fsum(scores) / len(scores) if scores else None
            std = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
            for key in (key for keys in members for key in keys):
                joined[key].group_mean, joined[key].group_std = mean, std


def _number(value: Any) -> float | None:
    """Return a metric as a number; None for one that is none, such as a table."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
