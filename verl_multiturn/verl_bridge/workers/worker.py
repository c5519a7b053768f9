"""`MultiTurnWorker`: verl's agent-loop worker, whose groups can be waited for and cancelled.

verl's worker rolls out the groups of a part of a batch, all of them at once, and writes their rows to TransferQueue.
Ours also reports each group that has ended (`finished`), ends groups that are no longer wanted (`cancel`), and begins
more samples of a training prompt than `rollout.n` with `rollout.over_sample_rate`; those that are too many are cut
(`rollout/groups/oversampling.py`). Siblings whose reward is their rank wait for one another (`sibling_ranks.py`).
`manager.py` calls it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import ray
import torch
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.calls.timeline import during
from verl_multiturn.errors import RewardContractError
from verl_multiturn.records.write.recorder import Recorder
from verl_multiturn.rewards.contract import raised_text
from verl_multiturn.rollout.groups.oversampling import FirstValid, samples_to_start
from verl_multiturn.rollout.groups.siblings import Siblings
from verl_multiturn.rollout.life import current
from verl_multiturn.verl_bridge.closing import close_at_end
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, VALIDATION
from verl_multiturn.verl_bridge.loops.agent_loop import tool_schemas
from verl_multiturn.verl_bridge.loops.life import follow, note_score
from verl_multiturn.verl_bridge.loops.output import is_valid
from verl_multiturn.verl_bridge.loops.recorder import recorder_of
from verl_multiturn.verl_bridge.loops.rewards import NearRewards, Rewards
from verl_multiturn.verl_bridge.loops.teacher import TeacherRows, teacher_rows
from verl_multiturn.verl_bridge.names import REROLLED_FROM, SAMPLING_LOOPS
from verl_multiturn.verl_bridge.run_keeper import RayKeeper
from verl_multiturn.verl_bridge.settings import has_rubric, settings_of
from verl_multiturn.verl_bridge.traces.tracer import Tracer, hold_verls_tracing
from verl_multiturn.verl_bridge.workers.group_end import GroupEnd
from verl_multiturn.verl_bridge.workers.news import News
from verl_multiturn.verl_bridge.workers.queue_rows import finished_rows, kept_columns
from verl_multiturn.verl_bridge.workers.shared_puts import SharedPuts
from verl_multiturn.verl_bridge.workers.sibling_ranks import Ended, SiblingRanks

logger = logging.getLogger(__name__)

# verl's worker is defined as a Ray actor, which cannot be subclassed; this is the class inside.
_VerlWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class MultiTurnWorker(_VerlWorker):
    """verl's agent-loop worker, whose groups can be waited for and cancelled, and whose prompts are over-sampled."""

    # Attributes of verl's worker.
    reward_loop_worker_handles: Any
    distillation_enabled: bool
    teacher_server_manager: Any
    model_config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        hold_verls_tracing(config)
        super().__init__(config, *args, **kwargs)
        handles = self.reward_loop_worker_handles
        self.reward_loop_worker_handles = NearRewards.handles(self.config, self.tokenizer, handles)
        self._groups: dict[str, asyncio.Task[Any]] = {}
        self._conversation_ends: dict[str, float] = {}
        """Time (`time.time`) at which the last conversation of each running group ended, before its row was written."""
        self._row_ends: dict[str, float] = {}
        """Time at which the last row of each running group was written."""
        self._raised: dict[str, int] = {}
        """Number of conversations of each running group that raised."""
        self._errors: dict[str, str] = {}
        """What the first of these raised."""
        self._ended: list[tuple[str, GroupEnd]] = []
        """Groups that have ended; those that the trainer has seen are forgotten."""
        self._forgotten = 0
        self._changed = asyncio.Event()
        self._oversampled: dict[str, FirstValid] = {}
        self._siblings: dict[str, Siblings[Ended]] = {}
        """Running groups whose conversations are compared."""
        self._cut = (0, 0.0)
        self._puts = SharedPuts()
        self._rerolled_from: dict[str, str] = {}
        """uid of the group in whose place a running group was begun."""

    @cached_property
    def _tracer(self) -> Tracer | None:
        return Tracer.of(self)

    @cached_property
    def _recorder(self) -> Recorder | None:
        recorder = recorder_of(settings_of(self.config.actor_rollout_ref.rollout))
        if recorder is not None:
            close_at_end([recorder])
        return recorder

    async def finished(self, seen: int) -> list[tuple[str, GroupEnd]]:
        """Wait until more than `seen` groups have ended since the start, and return those after the first `seen`."""
        del self._ended[: max(0, seen - self._forgotten)]
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

    async def news(self) -> News:
        """Return the figures of this worker that the trainer reads once a step."""
        recorder = self._recorder
        dropped, stem = (0, "") if recorder is None else (recorder.take_dropped(), recorder.writer.stem)
        (cut, cut_s), self._cut = self._cut, (0, 0.0)
        return News(cut, cut_s, dropped, stem, time.time(), tool_schemas())

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        uid, task = prompt["uid"], asyncio.current_task()
        assert task is not None
        self._groups[uid] = task
        if not trajectory["validate"]:
            self._begin_group(uid, prompt)
        if (earlier := prompt.pop(REROLLED_FROM, {}).get(uid)) is not None:
            self._rerolled_from[uid] = earlier
        if self._tracer is not None:
            self._tracer.choose(prompt, trajectory["validate"])
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            if (samples := self._oversampled.pop(uid, None)) is not None:
                self._cut = (self._cut[0] + samples.cut_samples, self._cut[1] + samples.cut_s)
            if self._tracer is not None:
                self._tracer.forget(uid)
            self._siblings.pop(uid, None)
            del self._groups[uid]
            self._rerolled_from.pop(uid, None)
            rows = self._row_ends.pop(uid, time.time())
            end = GroupEnd(
                self._conversation_ends.pop(uid, rows), rows, self._raised.pop(uid, 0), self._errors.pop(uid, "")
            )
            self._tell_end(uid, end)

    def _begin_group(self, uid: str, prompt: dict[str, Any]) -> None:
        """Decide how many samples of a training prompt begin, and whether they are compared."""
        rollout = self.config.actor_rollout_ref.rollout
        wanted = started = int(prompt.get("__rollout_n__", rollout.n))
        if rate := rollout.get("over_sample_rate"):
            prompt["__rollout_n__"] = started = samples_to_start(wanted, rate)
            self._oversampled[uid] = FirstValid(wanted, started)
        if self._ranks.compares(prompt.get("data_source"), wanted):
            self._siblings[uid] = Siblings(started, partial(self._ranks.compare, self._rewards))

    def _tell_end(self, uid: str, end: GroupEnd) -> None:
        """Report to the waiting calls that a group has ended."""
        self._ended.append((uid, end))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> None:
        run = partial(super()._run_agent_loop, *args, **kwargs)
        samples = self._oversampled.get(kwargs["uid"])
        uid, number = kwargs["uid"], kwargs["session_id"]
        takes_part = siblings.running(number) if (siblings := self._siblings.get(uid)) is not None else nullcontext()
        recorder = self._recorder if kwargs.get("agent_name") in SAMPLING_LOOPS else None
        tracer = self._tracer if self._tracer is not None and self._tracer.wants(uid) else None
        validation, earlier = bool(kwargs["trajectory"]["validate"]), self._rerolled_from.get(uid)
        with takes_part, follow(kwargs, recorder, tracer, validation=validation, rerolled_from=earlier) as life:
            try:
                await (run() if samples is None else samples.run(number, run))
            except Exception as error:  # verl logs it, and marks the group as failed
                self._raised[uid] = self._raised.get(uid, 0) + 1
                self._errors.setdefault(uid, raised_text(error))
                if isinstance(error, RewardContractError):
                    self._tell_end(uid, GroupEnd(0.0, 0.0, mistake=str(error)))  # the siblings are not awaited
                raise
            finally:
                if samples is not None and samples.was_cut(number):
                    life.status = "cut"

    async def _agent_loop_postprocess(self, output: Any, validate: bool, *, uid: str, **kwargs: Any) -> None:
        """Reward a finished conversation and write its rows, in the place of verl's method (`queue_rows.py`)."""
        if (life := current()) is not None:
            life.leave()  # siblings or a reward may be waited for, and siblings may wait for room
        samples = self._oversampled.get(uid)
        if samples is not None and not await samples.stays(kwargs["session_id"], is_valid(output)):
            return
        self._conversation_ends[uid] = time.time()
        outputs = output if isinstance(output, list) else [output]
        if outputs:
            if (siblings := self._siblings.get(uid)) is not None:
                await siblings.join(kwargs["session_id"], (outputs, {"uid": uid, **kwargs}))
                with during("reward"):
                    await siblings.compared()
            await self._store(outputs, validate, {"uid": uid, **kwargs})
        else:
            logger.warning("conversation %s_%s has no rows", uid, kwargs["session_id"])
        self._row_ends[uid] = time.time()
        note_score(output)

    async def _store(self, outputs: list[Any], validate: bool, columns: dict[str, Any]) -> None:
        """Reward a conversation, ask the teacher about its rows, and write them.

        A cancellation ends both at once, whose time nothing bounds. Rows that are being written are written to
        their end, so that nothing is written after a cancellation.
        """
        await self._compute_score(outputs, columns)
        if self.distillation_enabled:
            await self._teacher.ask(outputs, partial(self._ask_teacher, columns=columns), validate)
        with during("store"):
            rows = finished_rows(outputs, columns, self._model_inputs, self._kept_columns)
            await self._puts.put(rows, VALIDATION if validate else TRAIN)

    def _model_inputs(self, output: Any, input_ids: Any) -> tuple[Any, dict[str, Any]]:
        """Return the position ids of a row, and its multi-modal inputs."""
        inputs = self._compute_multi_modal_inputs(output, input_ids)
        whole = input_ids.unsqueeze(0)
        return self._compute_position_ids(whole, torch.ones_like(whole), inputs).squeeze(0), inputs

    @cached_property
    def _kept_columns(self) -> Collection[str] | None:
        return kept_columns(self.config)

    @cached_property
    def _ranks(self) -> SiblingRanks:
        return SiblingRanks(self.config, self.tokenizer)

    @cached_property
    def _outages(self) -> Outages:
        settings = settings_of(self.config.actor_rollout_ref.rollout)
        return Outages(settings.outage, RayKeeper if ray.is_initialized() else None)

    @cached_property
    def _rewards(self) -> Rewards:
        return Rewards(self._outages, has_rubric(self.config))

    @cached_property
    def _teacher(self) -> TeacherRows:
        words = int(self.model_config.hf_config.get_text_config().vocab_size)
        return teacher_rows(self.teacher_server_manager, self.config, self._outages, words)

    async def _ask_teacher(self, output: Any, columns: dict[str, Any]) -> None:
        """Ask verl's teacher about one row, as verl asks about the last one."""
        await self._compute_teacher_logprobs(output, output.prompt_ids, output.response_ids, False, columns)

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        with during("reward"):
            await self._rewards.score(outputs, partial(super()._compute_score, outputs, kwargs=kwargs))
