"""`Replay`: recorded conversations, made again with today's code, and where they differ from their records.

    record ─→ request ─→ Conversation or AgentSession, with a `ReplayEngine` for engine, tools and users ─→ record
       └──────────────────────────── differences ────────────────────────────────────────────────────┘

Codec, parser, limits, context, tools' sessions, forest and trajectories are those of a run: `build_runner` and
`build_run` make them from the run's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.describe import describe
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.proxy.endpoint import session_end
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.records.read.records import read_back
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.replay.calls import DivergedError, ReplayDifference
from verl_multiturn.replay.comparison import differences
from verl_multiturn.replay.engine import RecordedTurns, ReplayEngine, with_images
from verl_multiturn.replay.sessions import RecordedSession
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput, to_outputs
from verl_multiturn.verl_bridge.loops.proxy_loop import build_run
from verl_multiturn.verl_bridge.loops.runner import ReplayParts, build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.settings import settings_of

_WHOLE_TEXT = 1_000_000
"""Characters of an answer beyond which a record does not hold it."""


@dataclass(frozen=True)
class ReplayResult:
    """The findings of a conversation's replay."""

    request_id: str
    differences: Sequence[ReplayDifference] = ()
    """Where it differs from its record, in the order of its turns."""
    skipped: str = ""
    """Why it could not be replayed; "" if it was."""
    outputs: Sequence[CertifiedOutput] = ()
    """Its rows in verl's form, from which it is scored; empty where it did not come to its end."""


@dataclass
class Replay:
    """A replay of the conversations of one run.

    Args:
        config: verl's whole configuration.
        model: The model.
        tools: The run's tools, by name.
        interactions: The run's interactions, by name.
        is_live: Whether tools and interactions run again. The engine's generations are recorded ones all the same.
        is_changed: Whether the configuration is another than the run's. A conversation then ends at the first turn in
            which the model would have seen, or written, something else.
    """

    config: Any
    model: LoadedModel
    tools: Mapping[str, Any] = field(default_factory=dict)
    interactions: Mapping[str, Interaction] = field(default_factory=dict)
    is_live: bool = False
    is_changed: bool = False

    def __post_init__(self) -> None:
        OmegaConf.update(self.config, "actor_rollout_ref.rollout.custom.multiturn.record_dir", None, force_add=True)
        self.stage = ReplayEngine(self.is_live)
        staged = ReplayParts(self.stage, dict(self.tools), dict(self.interactions))
        self.runner = build_runner(self.config, self.model, self.stage, staged)
        self._run: ProxyRun | None = None

    async def play(self, record: Mapping[str, Any]) -> ReplayResult:
        """Replay one conversation or session."""
        request_id = str(record["request_id"])
        try:
            if why := self._unplayable(record):
                return ReplayResult(request_id, skipped=why)
            return await (self._conversation(record) if record.get("session") is None else self._session(record))
        except MultiTurnError as error:
            now = describe(error)
            return ReplayResult(request_id, [ReplayDifference(None, "error", None, record["error"], now)])
        finally:
            self.stage.end(request_id)
            self.runner.engine.take(request_id)

    def _unplayable(self, record: Mapping[str, Any]) -> str:
        """Return why a record is not enough for a replay; "" if it is."""
        sample = record["sample"]
        missing = [name for name in sample["tools"] if name not in self.runner.tools]
        missing += [name for name in [sample["interaction"]] if name and name not in self.runner.interactions]
        if missing:
            return f"the run's files name no {missing[0]!r}"
        if any(len(call["text"]) >= _WHOLE_TEXT for call in record["calls"]):
            return f"an answer has more than {_WHOLE_TEXT:,} characters, of which its record holds no more"
        return ""

    async def _conversation(self, record: Mapping[str, Any]) -> ReplayResult:
        request_id, sample = str(record["request_id"]), record["sample"]
        request = Request(
            request_id,
            with_images(sample["messages"]),
            {name: self.runner.tools[name] for name in sample["tools"]},
            sample["tools_kwargs"],
            record["sampling"],
            self.runner.interactions[sample["interaction"]] if sample["interaction"] else None,
            sample["interaction_kwargs"],
        )
        outcome, script = Outcome.begun(request_id), RecordedTurns(record, self.is_changed)
        self.stage.begin(record, outcome, script)
        diverged = None
        try:
            await self.runner.conversation.run(request, outcome)
        except DivergedError as error:
            diverged = error.difference
            for row in outcome.rows:
                row.trajectory.seal(StopReason(record["stop_reason"]))
        if diverged is None and script.left:
            number = script.asked
            recorded = f"{len(record['generations'])} turns"
            diverged = ReplayDifference(number, "stop_reason", None, recorded, f"{outcome.stop_reason} after {number}")
        return self._found(record, outcome, diverged, request)

    async def _session(self, record: Mapping[str, Any]) -> ReplayResult:
        if self._run is None:
            self._run = build_run(self.runner)
        session = RecordedSession(record, self._run, self.is_changed)
        self.stage.begin(record, Outcome.begun(session.session.id), session)
        diverged = None
        try:
            await session.play()
        except DivergedError as error:
            diverged = error.difference
        await session.close()
        receipts = session.session.receipts()
        error_reward = settings_of(self.config.actor_rollout_ref.rollout).proxy.error_reward
        outcome = await session_end(session.session, session.end(), self._run, error_reward)
        return self._found(record, outcome, diverged, None, receipts)

    def _found(
        self,
        record: Mapping[str, Any],
        outcome: Outcome,
        diverged: ReplayDifference | None,
        request: Request | None,
        generations: Sequence[Receipt] | None = None,
    ) -> ReplayResult:
        """Compare a conversation's outcome with its record."""
        receipts = self.runner.receipts(outcome) if generations is None else generations
        step = int(record["step"])
        outputs = to_outputs(outcome, self.runner.output_settings, step) if diverged is None else []
        turns = outcome.turns[: len(receipts)]
        made = replace(outcome, turns=turns) if len(turns) < len(outcome.turns) else outcome
        void = bool(outputs) and outputs[-1].void
        life = Life(made.request_id, step=step, outcome=made, generations=receipts[: len(turns)])
        life.request, life.void = request, void
        now = read_back(record_of(life))
        found = differences(record, now, None if diverged is None else diverged.turn)
        if diverged is not None:
            found.append(diverged)
        if self.is_changed:  # an effect of the change is not a difference of the code
            found = [diverged] if diverged is not None else [each for each in found if each.field == "stop_reason"]
        return ReplayResult(str(record["request_id"]), found, outputs=outputs)
