"""Outages, on the trainer's side: affected conversations are never trained.

The absence of a tool, a user, an agent or a judge is not evidence about the model. The keeper of the run
(`calls/outages/store.py`) knows which conversations hit a confirmed outage. Those that were still running then have
ended with the stop reason `outage`, and are invalid. Those that had ended are excluded here:

    the keeper reports that a call of it hit an outage       cause `outage`
    its reward is unknown for a cause of ours                cause `reward_outage`

Invariants:
- before advantages are computed, all rows of these conversations have the mask 0 throughout, and the conversations are
  invalid, so that they do not count in their groups. No other row changes. The certificate compares the causes with
  the receipts;
- where the keeper has lost its state, every conversation that hit a failure is excluded: of a keeper that has died,
  and of conversations that came with a checkpoint, whose keeper is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from verl_multiturn.calls.outages.messages import OutageState, StoreLostError
from verl_multiturn.certificate.conversations import OUTAGE, REWARD_OUTAGE
from verl_multiturn.describe import describe
from verl_multiturn.errors import OutageError
from verl_multiturn.observe.metrics import Stats
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, VALIDATION, list_prompts, put_zeros
from verl_multiturn.verl_bridge.run_keeper import KEEPER
from verl_multiturn.verl_bridge.trainer.report import PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

logger = logging.getLogger(__name__)

T = TypeVar("T")

OUTAGE_PREFIX = f"{PREFIX}outage/"
# Limits of the alarms. Each is logged once in a run.
_INVALID_SHARE = 0.2
_OPEN_S = 60.0
_VALID_GROUPS = 0.5
# Seconds in which the keeper has to answer; the trainer has to go on.
_ANSWER_S = 10.0


class OutageLasts(OutageError):
    """An outage has lasted for so long that the run ends."""


class OutageStoreClient:
    """Asks the keeper of the run's outages, for the trainer. Where no worker has needed one yet, there was no outage.

    Each method raises `StoreLostError` where the keeper has lost the answer.
    """

    def __init__(self) -> None:
        self._actor: Any = None

    def touched(self, ids: list[str]) -> set[str]:
        """Return which of these request ids are of conversations that hit a confirmed outage."""
        return self._ask("touched", set(), ids)

    def outages(self) -> Mapping[str, OutageState]:
        """Return the state of each name, such as `tool search`."""
        return self._ask("outages", {})

    def _ask(self, method: str, nothing: T, *arguments: Any) -> T:
        if self._actor is None:
            if not ray.is_initialized():
                return nothing
            try:
                self._actor = ray.get_actor(KEEPER)
            except ValueError:  # there is none
                return nothing
        try:
            answer: T = ray.get(getattr(self._actor, method).remote(*arguments), timeout=_ANSWER_S)
        except (RayError, GetTimeoutError) as error:
            self._actor = None  # a worker that needs it starts another
            raise StoreLostError(f"the keeper of slots and outages does not answer: {describe(error)}") from None
        return answer


class StepOutages:
    """The outages that a trainer meets.

    Metrics of a step, under `rollout/outage/`; none before the keeper knows a name:
    - `open_s`: seconds for which a breaker was open, of the name whose breaker was open longest;
    - `trips`, `calls`: how often breakers opened, and calls that hit an outage;
    - `bugs`: calls that failed by a bug;
    - `waiting`: the most calls and new conversations that were seen waiting;
    - `rows_left_out`: rows of conversations that had ended well and are excluded;
    - `NAME/open`, `NAME/trips`: whether the breaker of a name was seen open, and how often it opened.

    Args:
        keeper: Reports the run's outages.
        stop_s: Seconds for which an outage may last.
    """

    def __init__(self, keeper: OutageStoreClient, stop_s: float) -> None:
        self._keeper = keeper
        self._stop_s = stop_s
        self._doubtful: set[str] = set()
        """Groups of whose conversations the keeper does not know everything."""
        self._told: set[str] = set()
        """Alarms that were logged."""
        self._before: dict[str, tuple[float, int, int, int]] = {}
        """Seconds, trips, calls and bugs of each name up to the last step."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._rows = 0
        self._waiting = 0
        self._were_open: set[str] = set()

    def doubt(self, uids: Collection[str]) -> None:
        """Exclude every conversation of these groups that hit a failure, whatever the keeper reports."""
        self._doubtful.update(uids)

    def look(self) -> None:
        """Look at the run's breakers, while the trainer waits and when a step begins.

        Raises:
            OutageLasts: One has been open for too long. Time without a call for it does not count.
        """
        for name, state in self._states().items():
            if not state.is_open:
                continue
            if state.lasting_s >= _OPEN_S:
                self._tell(
                    "open",
                    f"{name} has not been there for {state.lasting_s:.0f} s, and {state.waiting} calls wait for it "
                    f"({state.error}); the run ends after {self._stop_s:g} s (custom.multiturn.outage.stop_s), with a "
                    "checkpoint where no step is half trained",
                )
            if state.lasting_s > self._stop_s:
                raise OutageLasts(
                    f"{name} has not been there for {state.lasting_s:.0f} s, longer than "
                    f"custom.multiturn.outage.stop_s={self._stop_s:g}; its last error: {state.error}"
                )

    def leave_out(self, rows: BatchRows) -> None:
        """Exclude the rows that outages affected: the masks of these rows become 0, their conversations invalid.

        Args:
            rows: Those of verl's batch, before anything is computed of it.
        """
        were_valid = {key for key, stats in rows.stats.items() if stats["valid"]}
        keys = rows.leave_out(self.causes(rows))
        if keys:
            put_zeros(keys, rows.partition_id, ["response_mask", "loss_mask"])
        self._rows += len(were_valid & set(keys))

    def causes(self, rows: BatchRows) -> dict[str, str]:
        """Return the cause of each conversation that is to be excluded, by its name."""
        stats_of = rows.stats.items()
        met = {key.conversation: own["request_id"] for key, own in stats_of if own["valid"] and own.get("outages")}
        causes = dict.fromkeys(self._touched(met), OUTAGE)
        unrewarded = [key.conversation for key, own in stats_of if own.get("unrewarded")]
        return causes | dict.fromkeys(unrewarded, REWARD_OUTAGE)

    def _touched(self, met: Mapping[str, str]) -> list[str]:
        """Return which of the conversations that hit a failure are excluded; `met` has their request ids by name."""
        if not met:
            return []
        try:
            touched = self._keeper.touched(sorted(met.values()))
        except StoreLostError as error:
            self._keeper_lost(error)
            # The next call asks a new keeper, which does not know them; verl may no longer list their prompts then.
            self.doubt({name.rpartition("_")[0] for name in met})
            touched = set(met.values())
        return [
            name
            for name, request_id in met.items()
            if request_id in touched or name.rpartition("_")[0] in self._doubtful
        ]

    def _states(self) -> Mapping[str, OutageState]:
        try:
            states = self._keeper.outages()
        except StoreLostError as error:
            self._keeper_lost(error)
            return {}
        self._waiting = max([self._waiting, *(state.waiting for state in states.values())])
        self._were_open.update(name for name, state in states.items() if state.is_open)
        return states

    def _keeper_lost(self, error: StoreLostError) -> None:
        logger.error("%s; conversations that have begun and met a failure are left out", error)
        self._before.clear()
        for partition in (TRAIN, VALIDATION):
            self.doubt(list_prompts(partition))

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        states = self._states()
        if not states and not self._rows:
            return {}
        found = {"waiting": float(self._waiting), "rows_left_out": float(self._rows)}
        found |= {"open_s": 0.0, "trips": 0.0, "calls": 0.0, "bugs": 0.0}
        for name, state in states.items():
            counts = state.open_total_s, state.trips, state.outages, state.bugs
            before = self._before.get(name, (0.0, 0, 0, 0))
            self._before[name] = counts
            # A new keeper counts from 0.
            open_s, trips, calls, bugs = (max(0.0, now - then) for now, then in zip(counts, before, strict=True))
            found["open_s"] = max(found["open_s"], open_s)
            found["trips"] += trips
            found["calls"] += calls
            found["bugs"] += bugs
            place = name.replace(" ", "_")
            found[f"{place}/open"] = float(name in self._were_open or open_s > 0)
            found[f"{place}/trips"] = trips
        return {OUTAGE_PREFIX + name: value for name, value in found.items()}

    def watch(self, stats: Sequence[Stats], group_size: int) -> None:
        """Sound the alarms of a step's conversations, each once in a run.

        Args:
            stats: Those of the step's conversations.
            group_size: `rollout.n`.
        """
        if not stats:
            return
        valid: dict[str, int] = {}
        for each in stats:
            valid[each["group"]] = valid.get(each["group"], 0) + each["valid"]
        share = sum(not each["valid"] for each in stats) / len(stats)
        if share > _INVALID_SHARE:
            reasons = sorted({str(each.get("left_out", each["stop"])) for each in stats if not each["valid"]})
            self._tell("invalid", f"{share:.0%} of a step's conversations are invalid: {', '.join(reasons)}")
        least = min(2, group_size)
        whole = sum(count >= least for count in valid.values())
        if whole < _VALID_GROUPS * len(valid):
            self._tell("groups", f"{whole} of a step's {len(valid)} groups have {least} valid conversations or more")

    def _tell(self, alarm: str, text: str) -> None:
        if alarm not in self._told:
            self._told.add(alarm)
            logger.warning("%s (said once)", text)


class ValidationScores:
    """The conversations of a validation that are scored: an outage is counted, and not scored.

    verl scores one sample for each conversation, in the order of their last rows in each batch.

    Args:
        causes: Returns the conversations of a batch to exclude, as `StepOutages.causes`.
    """

    def __init__(self, causes: Callable[[BatchRows], dict[str, str]]) -> None:
        self._causes = causes
        self._scored: list[bool] = []

    def look(self, rows: BatchRows) -> None:
        """Note which conversations of the validation's next batch are scored, and make the others invalid."""
        rows.leave_out(self._causes(rows))
        last: dict[str, RowKey] = {}
        for key in rows.real:
            known = last.get(key.conversation)
            last[key.conversation] = key if known is None or key.number > known.number else known
        for key in sorted(last.values(), key=rows.keys.index):
            stats = rows.stats.get(key, {})
            self._scored.append("left_out" not in stats and stats.get("stop") != OUTAGE)

    def samples(
        self,
        sources: Sequence[Any],
        uids: Sequence[str],
        infos: Mapping[str, Sequence[Any]],
        turns: Sequence[Any],
        expected: Mapping[tuple[str, str], int] | None,
    ) -> tuple[list[Any], list[str], dict[str, list[Any]], list[Any], dict[tuple[str, str], int] | None]:
        """Return the arguments of verl's `_val_metrics_update`, without the conversations that are not scored.

        Args:
            sources: The data source of each sample.
            uids: The uid of each sample.
            infos: The reported values of each sample, by name.
            turns: The number of turns of each sample.
            expected: How many samples each uid of a data source should have; verl counts one that lacks as wrong.
        """
        kept = [i for i in range(len(uids)) if i >= len(self._scored) or self._scored[i]]
        left = None if expected is None else dict(expected)
        for i in sorted(set(range(len(uids))) - set(kept)):
            name = str(sources[i]), str(uids[i])
            if left is not None and name in left:
                left[name] -= 1
                if not left[name]:
                    del left[name]
        return (
            [sources[i] for i in kept],
            [uids[i] for i in kept],
            {name: [values[i] for i in kept] for name, values in infos.items()},
            [turns[i] for i in kept],
            left,
        )
