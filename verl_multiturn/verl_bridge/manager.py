"""`MultiTurnManager` and its workers: verl's agent-loop manager, which tells the trainer when a group has finished.

    trainer  `manager.wait(2 s)`  ──long poll──▶  worker.finished(…)   returns when one of the worker's groups has ended
    trainer  `manager.cancel(…)`  ─────────────▶  worker.cancel(…)     returns when the groups' conversations have ended

verl's trainer looks at TransferQueue every two seconds. With `wait` it goes on as soon as there is something new, and
verl's two seconds remain the longest that it waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_multiturn.tasks import finish

logger = logging.getLogger(__name__)

# verl's worker is defined as a Ray actor, which cannot be subclassed; this is the class inside.
_VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class MultiTurnWorker(_VerlWorker):
    """verl's agent-loop worker, whose groups can be waited for and cancelled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: dict[str, asyncio.Task[Any]] = {}
        self._conversation_ends: dict[str, float] = {}
        """When the last conversation of each running group ended (`time.time`), before its row was written."""
        self._ended: list[tuple[str, float]] = []
        """Groups that have ended, with that time; those that the trainer has seen are forgotten."""
        self._forgotten = 0
        self._changed = asyncio.Event()

    async def finished(self, seen: int) -> list[tuple[str, float]]:
        """Wait until more than `seen` groups have ended since the start, and return those after the first `seen`.

        Returns:
            The uid of each group, and when its last conversation ended (`time.time`).
        """
        del self._ended[: seen - self._forgotten]
        self._forgotten = max(seen, self._forgotten)
        while not self._ended:
            await self._changed.wait()
        return list(self._ended)

    async def cancel(self, uids: Collection[str]) -> int:
        """Cancel groups, and return how many of them were running here.

        When this returns, their generations and tools have ended, and no row of theirs will be written any more.
        """
        tasks = [self._groups[uid] for uid in uids if uid in self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        uid, task = prompt["uid"], asyncio.current_task()
        assert task is not None
        self._groups[uid] = task
        try:
            await super()._run_prompt(prompt, *args, **kwargs)
        finally:
            del self._groups[uid]
            self._ended.append((uid, self._conversation_ends.pop(uid, time.time())))
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _agent_loop_postprocess(self, *args: Any, uid: str, **kwargs: Any) -> None:
        self._conversation_ends[uid] = time.time()
        # A row that is being written is written to its end, so that nothing is written after a cancellation.
        await finish(asyncio.ensure_future(super()._agent_loop_postprocess(*args, uid=uid, **kwargs)))


class MultiTurnManager(AgentLoopManagerTQ):
    """verl's manager with our workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MultiTurnWorker)
        self._seen: dict[int, int] = {}
        self._polls: dict[int, Any] = {}
        """A pending call of `finished` for each worker."""
        self._ends: dict[str, float] = {}

    def wait(self, timeout_s: float) -> None:
        """Wait until a group has ended since the last call, at most `timeout_s` seconds."""
        for index, worker in enumerate(self.agent_loop_workers):
            if index not in self._polls:
                self._polls[index] = worker.finished.remote(self._seen.get(index, 0))
        ray.wait(list(self._polls.values()), num_returns=1, timeout=timeout_s)
        ready, _ = ray.wait(list(self._polls.values()), num_returns=len(self._polls), timeout=0)
        for index in [index for index, poll in self._polls.items() if poll in ready]:
            poll = self._polls.pop(index)
            try:
                ended = ray.get(poll)
            except RayError as error:
                logger.error("agent-loop worker %d does not answer: %s", index, error)
                raise
            self._seen[index] = self._seen.get(index, 0) + len(ended)
            self._ends.update(ended)

    def ended_at(self, uids: Collection[str]) -> float | None:
        """Return when the last conversation of these groups ended, and forget them; None when that is not known."""
        known = [end for uid in uids if (end := self._ends.pop(uid, None)) is not None]
        return max(known, default=None)

    def cancel(self, uids: Collection[str]) -> int:
        """Cancel groups and return how many were running; see `MultiTurnWorker.cancel`."""
        return sum(ray.get([worker.cancel.remote(list(uids)) for worker in self.agent_loop_workers]))
