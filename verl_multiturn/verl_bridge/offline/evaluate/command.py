"""`evaluate`: the work of `verl-multiturn eval` on one model, from the recipe's settings to records and joins.

    settings ─▶ SGLang in a child ─▶ verl's data set ─▶ Conversations ─▶ records/, join/, evaluation.json

Invariants:
- Ray is never started;
- SGLang ends with this process, whatever ends it;
- a conversation that has ended is on disk within seconds, and is not sampled again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.utils import create_rl_dataset

from verl_multiturn.calls.loop_blocks import CallWatch
from verl_multiturn.certificate.conversations import OUTAGE
from verl_multiturn.clients.chat_endpoint import key_of
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.evaluation import plan as plans
from verl_multiturn.evaluation.endings import ended_in
from verl_multiturn.evaluation.plan import DataRow, EvaluationProgress, Plan, SampleId
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.joins import JoinedRow
from verl_multiturn.records.write import run_file
from verl_multiturn.rollout.engines.http_engine import CompletionsEngine, GenerateEngine, HttpEngine
from verl_multiturn.verl_bridge.model.loading import LoadedModel, load_model
from verl_multiturn.verl_bridge.offline.evaluate import chat_level
from verl_multiturn.verl_bridge.offline.evaluate.conversations import Conversations, ConversationScore
from verl_multiturn.verl_bridge.offline.evaluate.settings import (
    Job,
    benchmark_of,
    check_origin,
    config_of,
    data_rows,
    reward_digest,
    settings_digest,
)
from verl_multiturn.verl_bridge.servers.sglang_child import SglangChild, free_port, server_arguments
from verl_multiturn.verl_bridge.trainer.run_notes import run_file as run_file_of

MOST_AT_ONCE = 1024
"""Conversations at once."""
_REMEDY = "name a folder with tokenizer and config.json"
_KEY = "OPENAI_API_KEY"
_SAVE_S = 1.0
_SAVE_SHARE = 0.02
"""Largest share of the time that writing the join may take; with many rows it is written less often."""
_SAY_S = 2.0

Say = Callable[[str], None]


def evaluate(job: Job, say: Say, show: Say) -> bool:
    """Evaluate a model, and return whether each conversation has a score that counts.

    Args:
        job: The evaluation's settings.
        say: Prints a line that stays.
        show: Shows how far it is.

    Raises:
        ConfigError: The evaluation cannot work, or its folder holds another one.
        EngineError: The engine has died, hangs or was never ready. The conversations that had ended are kept.
        MultiTurnError: A mistake in the code or the data of a tool, an interaction, an agent or a reward.
    """
    began = time.monotonic()
    start = run_file.new_start()
    config = config_of(job, start)
    return asyncio.run(_EvaluationRun(job, config, start, say, show, began).run())


class _Joins:
    """The join of a start, which is written anew while it grows."""

    def __init__(self, records: Path, start: str) -> None:
        self._records, self._name = records, joins.name_of(True, 0, start)
        self._rows: list[JoinedRow] = []
        self._changes = self._written = 0
        self.judge: Callable[[], None] | None = None
        """Called before it is written: the knowledge of its rows may have changed."""

    def add(self, rows: list[JoinedRow]) -> None:
        self._rows += rows
        self.change()

    def change(self) -> None:
        """Note that a row has changed."""
        self._changes += 1

    async def save(self) -> None:
        """Write the changes since the last time.

        Raises:
            OSError: It cannot be written.
        """
        if self.judge is not None:
            self.judge()
        changes, table = self._changes, partial(joins.table_of, list(self._rows))
        if changes > self._written:
            await asyncio.to_thread(lambda: joins.write(self._records, self._name, table()))
            self._written = changes

    async def keep_saving(self) -> None:
        pause_s = _SAVE_S
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            with suppress(OSError):  # a full disk may have room again; if not, the last save raises
                await self.save()
            pause_s = max(_SAVE_S, (time.monotonic() - began) / _SAVE_SHARE)


class _EvaluationRun:
    """One start of an evaluation."""

    def __init__(self, job: Job, config: DictConfig, start: str, say: Say, show: Say, began: float) -> None:
        self._job, self._config, self._start = job, config, start
        self._say, self._show, self._began = say, show, began
        self._records = job.out / "records"
        self._joins = _Joins(self._records, start)
        self._met: dict[SampleId, ConversationScore] = {}
        """Conversations with a score in which a call failed."""
        self._has_failed = False
        """Whether a reward function has raised."""
        self._child: SglangChild | None = None

    async def run(self) -> bool:
        try:
            if self._job.engine == "sglang":  # it loads the model while the rest is made
                log = self._job.out / "sglang.log"
                self._child = SglangChild(self._arguments(), log)
                self._say(f"SGLang starts, in half a minute or more; it prints into {log}")
            model = load_model(self._config.actor_rollout_ref.model, _REMEDY, self._config.data)
            engine = self._engine(model)
            try:
                with CallWatch():
                    return await self._with(engine, model)
            finally:
                await engine.aclose()
        finally:
            if self._child is not None:
                self._child.close()

    def _arguments(self) -> dict[str, Any]:
        return server_arguments(self._config, str(self._job.model), self._job.weights, free_port())

    def _engine(self, model: LoadedModel) -> HttpEngine:
        if self._child is not None:
            return GenerateEngine(self._child.url, self._job.weights)
        key = key_of(_KEY if os.environ.get(_KEY) else None, "--engine")
        if (chat := self._job.chat) is not None:
            return chat_level.make_engine(chat, model, key)
        named = self._job.engine.rstrip("/")
        if not named.endswith(("/v1", "/v1/completions")):
            return GenerateEngine(named.removesuffix("/generate"), self._job.weights)
        encode = partial(model.tokenizer.encode, add_special_tokens=False)
        return CompletionsEngine(named.removesuffix("/completions"), encode, model.tokenizer.eos_token_id, key=key)

    async def _with(self, engine: HttpEngine, model: LoadedModel) -> bool:
        config = self._config
        limits = config.data.get("val_max_samples", -1)
        dataset = create_rl_dataset(
            config.data.val_files, config.data, model.tokenizer, model.processor, is_train=False, max_samples=limits
        )
        rows = plans.only_source(data_rows(config, dataset), self._job.only)
        plan = Plan(rows, int(config.actor_rollout_ref.rollout.val_kwargs.n))
        conversations = Conversations(config, model, dataset, engine, self._job.judged, self._start)
        try:
            loops = {conversations.loop_of(row) for row in rows}
            if self._job.chat is not None:
                chat_level.check_loops(loops)
            check_origin(self._job.origin, model, conversations.schemas)
            await self._begin(plan, engine, model, conversations.schemas)
            progress = EvaluationProgress(plan, ended_in(self._records))
            self._joins.judge = partial(self._judge_outages, conversations, progress)
            if left := plan.left(progress.scores.keys()):
                await self._ready(engine)
                await self._run_all(conversations, engine, left, progress)
        finally:
            await conversations.aclose()
            await self._save_last()
        is_whole = not plan.left(progress.scores.keys())
        if is_whole:
            plans.end(self._job.out, time.time())
        self._say(progress.line())
        return is_whole

    async def _save_last(self) -> None:
        try:
            await self._joins.save()
        except OSError as error:
            raise ConfigError(
                f"the scores cannot be written into {str(self._records)!r} ({error}); make room, and repeat the command"
            ) from error

    async def _ready(self, engine: HttpEngine) -> None:
        if self._child is not None:
            self._show("SGLang loads the model")
            await self._child.ready(engine)
        await engine.check()
        self._say(f"ready after {time.monotonic() - self._began:.1f} s")

    async def _begin(self, plan: Plan, engine: HttpEngine, model: LoadedModel, schemas: list[Any]) -> None:
        """Write this evaluation's description, or find that the folder holds the same one."""
        job, config = self._job, self._config
        params = config.actor_rollout_ref.rollout.val_kwargs
        told = {
            "recipe": job.plan.name,
            "variant": list(job.plan.variants),
            "overrides": list(job.plan.overrides),
            "model": {"path": job.named, "hash": job.judged},
            "samples": plan.samples,
            "temperature": float(params.temperature),
            "engine": engine.level,
            "only": job.only,
            "rows": len(plan.rows),
            "rows_files": [str(path) for path in _listed(config.data.val_files)],
            "rows_digest": plan.digest,
            "reward_digest": reward_digest(config),
            "settings_digest": settings_digest(config),
            "started": time.time(),
            "ended": None,
            **benchmark_of(job, config, len(plan.rows)),
        }
        told = plans.begin(job.out, told)
        trainer = SimpleNamespace(config=config, tokenizer=model.tokenizer)
        made = run_file_of(trainer, self._start, time.time(), None, schemas=schemas)
        made["settings"] |= {"evaluation": told}
        run_file.write_whole(run_file.path_of(self._records, self._start), line_of(made).decode())

    async def _run_all(
        self,
        conversations: Conversations,
        engine: HttpEngine,
        left: list[tuple[DataRow, int]],
        progress: EvaluationProgress,
    ) -> None:
        """Run the remaining rows, in their order; a mistake of an author ends it all."""
        waiting = iter(left)
        saving = [asyncio.ensure_future(self._joins.keep_saving()), asyncio.ensure_future(self._keep_showing(progress))]
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(MOST_AT_ONCE, len(left))):
                    group.create_task(self._work(conversations, engine, waiting, progress))
        except* Exception as errors:  # the first one; the others are cancelled
            first = errors.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        finally:
            for task in saving:
                task.cancel()
            await asyncio.gather(*saving, return_exceptions=True)
        if engine.lost:
            raise EngineError(f"{engine.lost}; {progress.line()}; repeat the command to go on")

    async def _work(
        self,
        conversations: Conversations,
        engine: HttpEngine,
        waiting: Iterator[tuple[DataRow, int]],
        progress: EvaluationProgress,
    ) -> None:
        for row, sample in waiting:
            if engine.lost:
                return
            judged = await conversations.run(row, sample)
            self._joins.add(judged.rows)
            if judged.score is not None:
                progress.scores[SampleId(row.number, sample)] = judged.score
                if judged.has_met:
                    self._met[SampleId(row.number, sample)] = judged
            elif judged.is_failed:
                progress.failed += 1
                if not self._has_failed:
                    self._has_failed = True
                    self._say(f"row {row.number}: the reward function raised {judged.raised}; further ones are counted")
            else:
                progress.invalid += 1

    def _judge_outages(self, conversations: Conversations, progress: EvaluationProgress) -> None:
        """Take the scores from the conversations that hit an outage; the judgement may come after their end."""
        for asked, judged in list(self._met.items()):
            if not conversations.is_judged(judged.rows[0].request_id or ""):
                continue
            for row in judged.rows:
                row.untrained = OUTAGE
            self._joins.change()
            progress.invalid += 1
            del progress.scores[asked], self._met[asked]

    async def _keep_showing(self, progress: EvaluationProgress) -> None:
        while True:
            self._show(progress.line())
            await asyncio.sleep(_SAY_S)


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
