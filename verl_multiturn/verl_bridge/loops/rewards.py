"""The reward of a finished conversation, asked of verl's reward workers; while they cannot judge, rows wait.

    answer ──▶ reward worker ──▶ a verdict                        the row is written
                             └─▶ `outage` of the reward function  told to the run's keeper under the name `reward`
                                   ├─ of this row alone           the row is written, and left out by the trainer
                                   └─ the breaker is open         the row waits for its end, and is judged again

A reward worker knows no keeper of the run, so the agent-loop worker watches over it.

Invariants:
- what is waited for is a reward alone: the conversation has ended, and its tools are released;
- a row that was judged again has the last verdict; one that waited for too long keeps the one that it had. Without any
  it scores 0, and has the keys of other rows with the mark of an outage: the trainer leaves it out.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.guarded_call import GuardedCall
from verl_multiturn.calls.outages.process import OutageEndError, Outages
from verl_multiturn.describe import describe, message_of
from verl_multiturn.errors import ConfigError, OutageError, RewardContractError, UnjudgedError
from verl_multiturn.rewards.score import RewardOptions, Score, Solution, compose
from verl_multiturn.verl_bridge.loops.certified_output import OUTAGE, UNJUDGEABLE

logger = logging.getLogger(__name__)

NAME = "reward"
"""Name of the reward workers' outages."""
_LEASE_S = 600.0
"""Seconds after which a reward that was tried while the breaker is open counts as failed."""
_TRIES = 3
"""How often a row that has waited is judged once more, where there is no outage any more."""
_OURS = compose(Score(answered=1.0, failed=1.0, outage=1.0), Solution("", ()), RewardOptions())
"""What the rewards in the box report of an outage."""


class Rewards:
    """The rewards of one agent-loop worker.

    Args:
        outages: What this process knows of outages.
    """

    def __init__(self, outages: Outages) -> None:
        self._watch = outages.of(NAME, OutageLimits(), _LEASE_S) if outages.settings.mode == "pause" else None
        self._without_verdict: dict[str, Any] = _OURS
        """What a row reports that was never judged: as the rewards in the box, until another row's keys are known."""

    async def score(self, outputs: Sequence[Any], compute: Callable[[], Awaitable[None]]) -> None:
        """Compute the reward of a conversation, again after an outage.

        A function that raises `OutageError` or `UnjudgedError` gives no verdict: the trainer leaves the row out.

        Args:
            outputs: The conversation's rows; the last one gets the reward, unless it has one.
            compute: Computes it, as verl does.

        Raises:
            RewardContractError: The reward function made a mistake, which ends the run.
        """
        if not outputs or outputs[-1].reward_score is not None:
            await compute()
            return
        last = outputs[-1]
        if self._watch is None:
            await self._compute(last, compute)
            return
        watched = GuardedCall(self._watch, str(getattr(last, "stats", {}).get("request_id", id(last))), "repeatable")
        tries, again_s = 0, 0.0
        while True:
            try:
                if await watched.wait():
                    tries = _TRIES
            except OutageEndError:
                if last.reward_score is None:
                    last.reward_score = 0.0
                    last.extra_fields["reward_extra_info"] = dict(self._without_verdict)
                return
            last.reward_score = None  # verl computes none where there is one
            try:
                await self._compute(last, compute)
            except BaseException:  # a cancellation, too: it goes on
                watched.dropped()
                raise
            if not _is_outage(last):
                watched.answered()
                return
            await watched.failed(OutageError("the reward function could not judge a conversation"))
            if not (watched.again or watched.must_wait):
                tries -= 1
                if tries < 0:
                    return
                again_s = 2 * again_s or 1.0  # who judges is there, and may have much to do
                await asyncio.sleep(again_s)

    async def _compute(self, last: Any, compute: Callable[[], Awaitable[None]]) -> None:
        """Compute the reward of a conversation once; one without a verdict scores 0, and says why."""
        try:
            await compute()
        except ConfigError as error:
            # Ray's error of a reward worker has a traceback for its text, and the error that was raised as its cause.
            raise RewardContractError(message_of(getattr(error, "cause", error))) from error
        except (OutageError, UnjudgedError) as error:
            mark = OUTAGE if isinstance(error, OutageError) else UNJUDGEABLE
            last.reward_score = 0.0
            last.extra_fields["reward_extra_info"] = {**self._without_verdict, OUTAGE: 0.0, mark: 1.0}
            _tell_once(mark, describe(getattr(error, "cause", error)))
            return
        self._note_keys(last)

    def _note_keys(self, output: Any) -> None:
        """Note what the reward function reports; verl and the metrics ask the same keys of every row."""
        if reported := output.extra_fields.get("reward_extra_info"):
            nothing = {key: "" if isinstance(value, str) else 0.0 for key, value in reported.items()}
            self._without_verdict = {**{key: _OURS.get(key, value) for key, value in nothing.items()}, OUTAGE: 1.0}


@functools.cache
def _tell_once(mark: str, why: str) -> None:
    """Say once why rows have no verdict."""
    logger.warning("the reward function could not judge a conversation, which counts as %s: %s (said once)", mark, why)


def _is_outage(output: Any) -> bool:
    found = (output.extra_fields.get("reward_extra_info") or {}).get(OUTAGE, 0)
    return isinstance(found, int | float) and found > 0
