"""`MultiTurnManager` and its workers: verl's agent-loop manager, which tells the trainer when a group has finished.

    trainer  `manager.wait(2 s)`  ──long poll──▶  worker.finished(…)   returns when one of the worker's groups has ended
    trainer  `manager.cancel(…)`  ─────────────▶  worker.cancel(…)     returns when the groups' conversations have ended

verl's trainer looks at TransferQueue every two seconds. With `wait` it goes on as soon as there is something new, and
verl's two seconds remain the longest that it waits.

With `rollout.over_sample_rate` a worker begins more samples of a training prompt than `rollout.n`, and cuts those that
are too many (`rollout/oversampling.py`). A group is over when its cut samples have ended too: a server must not be put
to sleep while it still samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_multiturn.rollout.oversampling import FirstValid, samples_to_start
from verl_multiturn.tasks import finish
from verl_multiturn.verl_bridge.certified_output import is_valid

logger = logging.getLogger(__name__)

# verl's worker is defined as a Ray actor, which cannot be subclassed; this is the class inside.
_VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class MultiTurnWorker(_VerlWorker):
    """verl's agent-loop worker, whose groups can be waited for and cancelled, and whose prompts are over-sampled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: dict[str, asyncio.Task[Any]] = {}
        self._ended = 0
        self._changed = asyncio.Event()
        self._oversampled: dict[str, FirstValid] = {}
        self._cut = (0, 0.0)

    async def finished(self, seen: int) -> int:
        """Wait until more than `seen` groups have ended since the start; return how many have."""
        while self._ended <= seen:
            await self._changed.wait()
        return self._ended

    async def cancel(self, uids: Collection[str]) -> int:
        """Cancel groups, and return how many of them were running here.

        When this returns, their generations and tools have ended, and no row of theirs will be written any more.
        """
        tasks = [self._groups[uid] for uid in uids if uid in self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    async def take_cut(self) -> tuple[int, float]:
        """Return how many samples were cut since the last call, and the seconds that they took."""
        cut, self._cut = self._cut, (0, 0.0)
        return cut

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        uid, task = prompt["uid"], asyncio.current_task()
        assert task is not None
        self._groups[uid] = task
        rollout = self.config.actor_rollout_ref.rollout
        if (rate := rollout.get("over_sample_rate")) and not trajectory["validate"]:
            wanted = int(prompt.get("__rollout_n__", rollout.n))
            prompt["__rollout_n__"] = started = samples_to_start(wanted, rate)
            self._oversampled[uid] = FirstValid(wanted, started)
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            if (samples := self._oversampled.pop(uid, None)) is not None:
                self._cut = (self._cut[0] + samples.cut_samples, self._cut[1] + samples.cut_s)
            del self._groups[uid]
            self._ended += 1
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._run_agent_loop, *args, **kwargs)
        samples = self._oversampled.get(kwargs["uid"])
        await (run() if samples is None else samples.run(kwargs["session_id"], run))

    async def _agent_loop_postprocess(self, *args: Any, uid: str, **kwargs: Any) -> None:
        samples = self._oversampled.get(uid)
        if samples is not None and not await samples.stays(kwargs["session_id"], is_valid(args[0])):
            return
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
                self._seen[index] = ray.get(poll)
            except RayError as error:
                logger.error("agent-loop worker %d does not answer: %s", index, error)
                raise

    def cancel(self, uids: Collection[str]) -> int:
        """Cancel groups and return how many were running; see `MultiTurnWorker.cancel`."""
        return sum(ray.get([worker.cancel.remote(list(uids)) for worker in self.agent_loop_workers]))

    def take_cut(self) -> tuple[int, float]:
        """Return how many samples were cut since the last call, and the seconds that they took."""
        asked = [worker.take_cut.remote() for worker in self.agent_loop_workers]
        samples, seconds = 0, 0.0
        for answer in asked:
            with contextlib.suppress(ActorDiedError):  # what a dead worker has cut is not known
                cut, cut_s = ray.get(answer)
                samples, seconds = samples + cut, seconds + cut_s
        return samples, seconds
