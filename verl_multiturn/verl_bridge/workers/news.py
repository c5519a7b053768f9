"""`NewsRounds`: asks the agent-loop workers of a run, once a step, for the trainer's figures.

    trainer  `manager.news()`  ──▶  `worker.news()` of each worker, all at once  ──▶  `RunNews`

The figures of a busy worker come with a later step, unless all have to answer. Those of a dead one are lost, and so are
those that a worker could not report: metrics end no step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from verl_multiturn.describe import describe
from verl_multiturn.records.write.step_writer import clock_of

logger = logging.getLogger(__name__)

HUNG_S = 300.0
"""Seconds after which a worker that does not answer is ended; to cancel groups, it waits for their tools."""
_NEWS_S = 2.0
"""Seconds in which a worker should answer."""
_TIMES = 5
"""Number of questions to workers in a step in which a clock becomes known: the quickest answer says how far it is."""


class News(NamedTuple):
    """Hold the figures of an agent-loop worker since the trainer's last question."""

    cut: int
    """Samples that over-sampling has cut."""
    cut_s: float
    """Seconds that they took."""
    dropped: int
    """Records of conversations that could not be kept."""
    stem: str
    """Beginning of the names of its files of records; "" without any."""
    at: float
    """Its time (`time.time`)."""
    schemas: list[Any] | None
    """Schemas of all tools of the run, as the template gets them; None before its first conversation."""


@dataclass
class RunNews:
    """Hold the answers of all workers in a step."""

    cut: int = 0
    """Samples that over-sampling has cut."""
    cut_s: float = 0.0
    """Seconds that they took."""
    dropped: int = 0
    """Records of conversations that could not be kept."""
    clocks: list[dict[str, Any]] = field(default_factory=list)
    """How far the clocks are that were not known before (`schema.Clock`)."""
    schemas: list[Any] | None = None
    """Schemas of all tools of the run; None as long as no worker knows them."""


class NewsRounds:
    """The rounds of questions to the workers of a run for their news."""

    def __init__(self) -> None:
        self._asked: dict[Any, tuple[Any, float]] = {}
        """A pending question to each worker, and its time."""
        self._clocked: set[Any] = set()
        """Workers whose clock is known."""
        self._has_failed = False

    def take(self, workers: Sequence[Any], of_all: bool) -> RunNews:
        """Return the workers' news since the last call.

        Args:
            workers: The run's workers, as they are now.
            of_all: Whether all have to answer. The call then waits for them, and ends a worker that hangs.
        """
        found, clocks = RunNews(), dict[Any, dict[str, Any]]()
        until = time.monotonic() + (HUNG_S if of_all else _NEWS_S)
        for _ in range(_TIMES):
            for worker, said, asked, answered in self._answers(workers, until):
                found.cut, found.cut_s = found.cut + said.cut, found.cut_s + said.cut_s
                found.dropped += said.dropped
                found.schemas = said.schemas if found.schemas is None else found.schemas
                if said.stem and worker not in self._clocked and answered - asked < _NEWS_S:
                    clock = clock_of(said.stem, asked, said.at, answered)
                    clocks[worker] = min(clock, clocks.get(worker, clock), key=lambda each: each["error_s"])
            if self._asked or not clocks:  # one is late, or no clock was unknown
                break
        if of_all:
            for worker in self._asked:
                end_hung(worker, "news")
        self._clocked |= clocks.keys()
        found.clocks = list(clocks.values())
        return found

    def _answers(self, workers: Sequence[Any], until: float) -> Iterator[tuple[Any, News, float, float]]:
        """Ask each worker, unless a question is pending; yield worker, answer, and the times of question and answer."""
        for worker in workers:
            if worker not in self._asked:
                self._asked[worker] = worker.news.remote(), time.time()
        pending = {answer: worker for worker, (answer, _) in self._asked.items()}
        while pending:
            come, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            answered = time.time()
            if not come:
                return
            worker = pending.pop(come[0])
            answer, asked = self._asked.pop(worker)
            try:
                said = ray.get(answer)
            except RayActorError:  # the manager's poll replaces it
                continue
            except RayError as error:  # of the worker itself: its disk, or a tool's schema
                self._note_failure(error)
                continue
            yield worker, said, asked, answered

    def _note_failure(self, error: RayError) -> None:
        """Log once that a worker could not answer."""
        if not self._has_failed:
            why = describe(getattr(error, "cause", error))
            logger.warning("metrics lack what an agent-loop worker could not report: %s (said once)", why)
        self._has_failed = True


def end_hung(worker: Any, method: str) -> None:
    """End a worker that does not answer a call; the manager's poll finds it, and replaces it."""
    logger.error("an agent-loop worker has not answered %r for %g s and is ended", method, HUNG_S)
    ray.kill(worker)
