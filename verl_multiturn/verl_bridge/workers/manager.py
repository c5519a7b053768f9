"""`MultiTurnManager`: verl's agent-loop manager, whose groups can be waited for. `worker.py` has its workers.

verl's trainer makes the manager (`names.py` names it). It hands each worker its part of a batch; a worker rolls out the
groups in it, all of them at once, and writes their rows to TransferQueue. Our manager and worker add:

- `wait`: the trainer goes on as soon as a group has ended. verl's own looks at TransferQueue every two seconds;
- `cancel`: groups that are no longer wanted end, with their generations and tools;
- a worker that dies is replaced, and its unfinished groups are begun again, at most three times each;
- with `rollout.over_sample_rate`, more samples of a training prompt than `rollout.n` begin, and those that are too many
  are cut (`rollout/groups/oversampling.py`).

    trainer  `manager.wait(2 s)`  ──long poll──▶  worker.finished(…)   returns when one of the worker's groups has ended
    trainer  `manager.cancel(…)`  ─────────────▶  worker.cancel(…)     returns when the groups' conversations have ended

A group has ended when its last row is written and its cut samples have stopped, too: only then may the trainer put a
server to sleep.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayActorError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from verl_multiturn.describe import describe
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, clear_groups, list_prompts, put_tags
from verl_multiturn.verl_bridge.workers.group_end import GroupEnd
from verl_multiturn.verl_bridge.workers.news import HUNG_S, NewsRounds, RunNews, end_hung
from verl_multiturn.verl_bridge.workers.worker import MultiTurnWorker

logger = logging.getLogger(__name__)

# How often a group is begun again after its worker died: one that kills its workers must not go on doing so.
_RESTARTS = 3
# Seconds after which Ray reports to a poll that its worker has died, at the latest.
_TOLD_S = 60.0
# Seconds that workers have to report groups that have ended.
_ASKED_S = 0.1
# How many workers in a row may die in one place before they have started. A group that kills every worker that runs it
# is begun four times (once, and `_RESTARTS` times again), so this many deaths have another cause.
_STARTS = 6
# Seconds in which a worker must start.
_START_S = 1800.0
# How many groups' ends are remembered.
_ENDS = 10_000


@dataclass
class _OpenGroup:
    """A group that was given to a worker and has not ended, as far as the manager knows."""

    worker: int
    chunk: Any
    """Batch that was submitted."""
    place: int
    """Row of the group in it."""
    restarts: int = 0
    begins: Any = None
    """Ray's reference of the call that begins the group again."""

    @property
    def prompt(self) -> Any:
        """Return the group's part of the batch."""
        # A prompt that was loaded with a checkpoint has a nested column, which PyTorch chunks and does not slice.
        return self.chunk.chunk(len(self.chunk))[self.place]

    @property
    def partition(self) -> str:
        """Return the group's partition of TransferQueue."""
        # `get` returns an object of TensorDict, which has no truth value.
        return "val" if "validate" in self.chunk and self.chunk["validate"] else TRAIN  # noqa: RUF019


class MultiTurnManager(AgentLoopManagerTQ):
    """verl's manager with our workers.

    A worker that dies, for example because the system ran out of memory, is replaced. Its unfinished groups are begun
    again, at most three times each; after that a group counts as failed. A worker that Ray does not reach any more is
    ended first; when its whole node is lost, Ray takes up to a minute to call it dead.
    """

    mistake: str = ""
    """Mistake of the reward function, for which the run has to end; "": none is known."""
    _error: str = ""
    """What the first conversation raised since the last call of `take_raised`; "": none has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MultiTurnWorker)
        self._groups: dict[str, _OpenGroup] = {}
        self._seen: dict[int, int] = {}
        """Number of ended groups of each worker that are known."""
        self._polls: dict[int, Any] = {}
        """A pending call of `finished` for each worker."""
        self._ends: dict[str, GroupEnd] = {}
        self._raised = 0
        """Number of conversations that have raised since the last call of `take_raised`."""
        self._starts: dict[int, tuple[float, Any]] = {}
        """Time at which each replacement was begun, and Ray's reference that is ready when it has started."""
        self._failed_starts: dict[int, int] = {}
        self._news = NewsRounds()

    def generate_sequences(self, prompts: Any) -> None:
        """Give each worker its part of a batch of prompts, as verl does."""
        self._collect()
        self._poll()  # `wait` may never be called, as with a replay buffer of the user's
        for index, chunk in enumerate(prompts.chunk(len(self.agent_loop_workers))):
            self._groups |= {uid: _OpenGroup(index, chunk, place) for place, uid in enumerate(chunk["uid"])}
        try:
            super().generate_sequences(prompts)
        except RayActorError:  # found again by the poll, which replaces the worker
            self.wait(_TOLD_S)

    def wait(self, timeout_s: float) -> None:
        """Wait until a group has ended since the last call, at most `timeout_s` seconds."""
        self._poll()
        ray.wait(list(self._polls.values()), num_returns=1, timeout=timeout_s)
        self._collect()

    def end_of(self, uids: Collection[str]) -> GroupEnd | None:
        """Return when the last of these groups ended, and forget them; None when one of them is not known."""
        until = time.monotonic() + _ASKED_S
        while not self._ends.keys() >= set(uids) and (left := until - time.monotonic()) > 0:
            self.wait(left)
        known = [end for uid in uids if (end := self._ends.pop(uid, None)) is not None]
        if len(known) < len(set(uids)):
            return None
        return GroupEnd(max(end.conversation for end in known), max(end.rows for end in known))

    def cancel(self, uids: Collection[str]) -> int:
        """Cancel groups and return how many were running; see `MultiTurnWorker.cancel`."""
        # Ray may run a later call of a new worker first, which would find nothing to cancel.
        begins = [self._groups[uid].begins for uid in uids if uid in self._groups and self._groups[uid].begins]
        if begins:
            ray.wait(begins, num_returns=len(begins), timeout=_TOLD_S)
        cancelled: int = sum(self._ask("cancel", list(uids)))
        for uid in uids:
            self._groups.pop(uid, None)
        return cancelled

    def take_raised(self) -> int:
        """Return how many conversations have raised since the last call."""
        raised, self._raised = self._raised, 0
        self._error = ""
        return raised

    def blame_raised(self) -> None:
        """Let the run end by the first error of its conversations: no group of a batch is left, and some raised."""
        if self._error:
            self.mistake = self.mistake or (
                f"no group of a batch is left; the first of its conversations that raised: {self._error}; "
                "correct the code, and start the same command again"
            )

    def news(self, of_all: bool = False) -> RunNews:
        """Return the workers' news since the last call; see `NewsRounds.take`."""
        return self._news.take(self.agent_loop_workers, of_all)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Return the answers of all workers to a call; a dead worker has none, and one that hangs is ended."""
        asked = {getattr(worker, method).remote(*args): worker for worker in self.agent_loop_workers}
        come, late = ray.wait(list(asked), num_returns=len(asked), timeout=HUNG_S)
        for answer in late:
            end_hung(asked[answer], method)
        answers = []
        for answer in come:
            with contextlib.suppress(RayActorError):
                answers.append(ray.get(answer))
        return answers

    def _poll(self) -> None:
        """Ask each worker for the groups that end, unless a question is pending."""
        for index, worker in enumerate(self.agent_loop_workers):
            if index not in self._polls:
                self._polls[index] = worker.finished.remote(self._seen.get(index, 0))

    def _collect(self) -> None:
        """Take the answers that polls have; replace workers that have died.

        Raises:
            RuntimeError: A worker cannot be replaced.
        """
        self._look_at_starts()
        polls = list(self._polls.values())
        ready = ray.wait(polls, num_returns=len(polls), timeout=0)[0] if polls else []
        for index in [index for index, poll in self._polls.items() if poll in ready]:
            try:
                ended = ray.get(self._polls.pop(index))
            except RayActorError as error:
                self._replace(index, error)
                continue
            self._seen[index] = self._seen.get(index, 0) + len(ended)
            self._ends.update(ended)
            self._raised += sum(end.raised for _, end in ended)
            self._error = self._error or next((end.error for _, end in ended if end.error), "")
            self.mistake = self.mistake or next((end.mistake for _, end in ended if end.mistake), "")
            for uid in list(self._ends)[:-_ENDS]:  # of groups without a reader: they were thrown away
                del self._ends[uid]
            for uid, _ in ended:
                self._groups.pop(uid, None)

    def _look_at_starts(self) -> None:
        """Forget the replacements that have started."""
        for index, (since, started) in list(self._starts.items()):
            if ray.wait([started], timeout=0)[0]:
                with contextlib.suppress(RayActorError):  # found by the poll
                    ray.get(started)
                    del self._starts[index]
                    self._failed_starts.pop(index, None)
            elif time.monotonic() > since + _START_S:
                raise _cannot_start(index, f"no process has started for {_START_S:g} s; look at what Ray waits for")

    def _replace(self, index: int, error: RayActorError) -> None:
        """Start a worker in the place of one that has died, and begin its unfinished groups again."""
        lost = {uid: group for uid, group in self._groups.items() if group.worker == index}
        if index in self._starts:
            self._failed_starts[index] = self._failed_starts.get(index, 0) + 1
            if self._failed_starts[index] == _STARTS:
                raise _cannot_start(index, f"{_STARTS} processes in a row died at their start: {describe(error)}")
        logger.error("agent-loop worker %d has died and is replaced: %s", index, describe(error))
        ray.kill(self.agent_loop_workers[index])  # one that cannot be reached may be alive, and write
        # The place of a worker is Ray's choice here: the node of the old one may be gone, too.
        worker = self.agent_loop_workers_class.options(name=f"agent_loop_worker_{index}_{uuid4().hex[:8]}").remote(
            self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        )
        self.agent_loop_workers[index] = worker
        self._starts[index] = time.monotonic(), worker.__ray_ready__.remote()
        self._seen[index] = 0
        for partition in sorted({group.partition for group in lost.values()}):
            tags = list_prompts(partition)
            here = {uid: group for uid, group in lost.items() if group.partition == partition}
            again = [uid for uid in here if tags.get(uid, {}).get("status") in ("pending", "running")]
            clear_groups(again, partition, prompts=False)
            given_up = [uid for uid in again if here[uid].restarts == _RESTARTS]
            statuses = ["failure" if uid in given_up else "pending" for uid in again]
            put_tags(again, partition, [{"status": status} for status in statuses])
            for uid in here:
                if uid not in again or uid in given_up:
                    del self._groups[uid]
                else:
                    here[uid].restarts += 1
                    here[uid].begins = worker.generate_sequences.remote(here[uid].prompt)
            logger.error("%d groups of %r are begun again, %d have failed", len(again), partition, len(given_up))


def _cannot_start(index: int, why: str) -> RuntimeError:
    return RuntimeError(
        f"agent-loop worker {index} has died and cannot be replaced: {why}; once it can be, start the same command "
        "again with trainer.resume_mode=auto, which goes on from the last checkpoint"
    )
