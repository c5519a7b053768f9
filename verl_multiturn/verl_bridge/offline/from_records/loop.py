"""`RecordedAgentLoop`: the agent loop that samples nothing, and returns recorded conversations.

    row: `extra_info.records` ─▶ the record of this number in the group ─▶ verified ─▶ Outcome ─▶ verl's rows

verl's PPO trainer then learns from them as from conversations that it has sampled: by the recorded ids, masks and
log-probabilities, and with the receipts, so that its certificate holds. The reward is the recorded one. It is at the
last token, whatever tools, turns or completions gave; in a session of roles, each role's is at its last token.

A record is taken as it is, and not replayed: it can be learned from also when our code would render it in another way
today.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from verl_multiturn.config import PATH, ProxySettings, ScoreSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.records.read.learning import RecordLoader
from verl_multiturn.records.rows import columns
from verl_multiturn.records.verify.record import receipts_of
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import ConversationRow, Outcome
from verl_multiturn.rollout.trajectory import Source, Trajectory
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.tools.running.results import CallResult, CallStatus
from verl_multiturn.verl_bridge.loops.agent_loop import shared_runner
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput, OutputSettings, to_outputs
from verl_multiturn.verl_bridge.names import RECORDED_LOOP
from verl_multiturn.verl_bridge.rows import row_name
from verl_multiturn.verl_bridge.settings import settings_of

_NONE = ScoreSettings(mode="none")
_READ = (Source.OBSERVATION, Source.INJECTED)

_shelf = RecordLoader()


class RecordedAgentLoop(AgentLoopBase):
    """The agent loop `recorded_agent`."""

    def __init__(  # pylint: disable=super-init-not-called  # as in MultiTurnAgentLoop
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any
    ) -> None:
        self._runner = shared_runner(trainer_config.config, server_manager, tokenizer, hf_model_type, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the rows of the recorded conversation that has this number in its group.

        Args:
            sampling_params: Not used; nothing is sampled.
            row: verl's row, with `extra_info.records`, `uid`, `session_id` and `global_steps`.

        Raises:
            ConfigError: The group has fewer conversations than `rollout.n`, a record is not there any more, or it is of
                a session of other roles than the run's.
            CertificateError: The record differs from the engine's output.
        """
        number = int(row.get("session_id") or 0)
        pointer = pointer_of(row, number)
        record = _shelf.take(pointer)
        _check_roles(record, settings_of(self._runner.config.actor_rollout_ref.rollout).proxy, row_name(row))
        outputs = recorded_outputs(
            record, float(pointer["score"]), self._runner.output_settings, int(row.get("global_steps") or 0)
        )
        if self._runner.certified:
            for output, own in zip(outputs, receipts_of(record), strict=True):
                output.receipts = replace(own, uid=str(row.get("uid", "")), session_id=number).to_bytes()
        return outputs[0] if len(outputs) == 1 else list(outputs)


def pointer_of(row: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return where the record lies that has a number in a row's group.

    Raises:
        ConfigError: The row names no records, or too few.
    """
    listed = (row.get("extra_info") or {}).get("records")
    if listed is None:
        raise ConfigError(
            f"{row_name(row)} has the agent loop {RECORDED_LOOP!r} and no extra_info.records; make such rows with "
            "recipes/from_records/prepare_data.py --group N"
        )
    if number >= len(listed):
        raise ConfigError(
            f"{row_name(row)} has {len(listed)} recorded conversations, and number {number} was asked for; set "
            f"rollout.n to {len(listed)}, and leave over_sample_rate out"
        )
    found: Mapping[str, Any] = listed[number]
    return found


def recorded_outputs(
    record: Mapping[str, Any], score: float, settings: OutputSettings, step: int
) -> list[CertifiedOutput]:
    """Return the rows of a recorded conversation in verl's form.

    Args:
        record: The record, verified.
        score: Its reward.
        settings: The settings that the rows depend on.
        step: Training step.
    """
    # The reward has those of tools and interaction in it.
    plain = replace(settings, tool_reward=_NONE, interaction_reward=_NONE, final_answer=None)
    outputs = to_outputs(outcome_of(record), plain, step)
    for output in outputs:
        output.void = record["void"]
        output.extra_fields["void"] = record["void"]
        if settings.final_answer is not None:
            output.stats["void"] = record["void"]
        # With a score verl calls no reward function.
        output.reward_score = score
        output.extra_fields["reward_extra_info"] = {}
        if record["session"] is not None and record["session"].get("roles"):
            output.outcomes = _outcomes(record, score, [*output.outcomes])
    return outputs


def _outcomes(record: Mapping[str, Any], score: float, roles: Sequence[str | None]) -> dict[str | None, float | None]:
    """Return the whole reward of each role that has a row, those of its completions included."""
    session = record["session"]
    own = dict.fromkeys(roles, 0.0)
    for generation in record["generations"]:
        if generation["role"] in own and generation["reward"] is not None:
            own[generation["role"]] += float(generation["reward"])
    # A reward function's score is that of each role.
    whole = (score - sum(own.values())) / len(own) if session["reward"] is None else float(session["reward"])
    rewards = session["rewards"]
    return {role: reward + (float(rewards.get(role, 0.0)) if rewards else whole) for role, reward in own.items()}


def _check_roles(record: Mapping[str, Any], proxy: ProxySettings, row: str) -> None:
    """Refuse a session of other roles than those of the run, whose estimator and certificate know these.

    Raises:
        ConfigError: They differ.
    """
    if record.get("trained"):
        raise ConfigError(
            f"{row}: its recorded conversation trains the roles {list(record['trained'])}, and its record has one "
            "reward for both; learn from it by SFT, or from others"
        )
    session, known = record["session"] or {}, Roles.of(proxy)
    recorded = list(session.get("trained", ())) if session.get("roles") else None
    trained = None if known is None else list(known.trained)
    if recorded is not None and recorded != trained:
        raise ConfigError(
            f"{row}: its recorded session trains the roles {recorded}, and the run {trained}; set "
            f"{PATH}.proxy.roles={session['roles']} and {PATH}.proxy.train={recorded}, as in the run that recorded it"
        )


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a recorded conversation: its tokens, turns, and calls without their rewards.

    Args:
        record: The record (`schema.Record`), verified.
    """
    rows = [_row(row, StopReason(record["stop_reason"])) for row in record["rows"]]
    outcome = Outcome(record["request_id"], rows, list(record["messages"]), asked=record["asked"])
    outcome.turns = [_turn(number, each, rows) for number, each in enumerate(record["generations"])]
    for call in record["calls"]:
        outcome.turns[call["turn"]].calls.append(_call(call))
    outcome.user_turns = len(
        {(index, turn) for index, row in enumerate(record["rows"]) for _, _, _, turn, source in row["runs"]
         if source in _READ}
    )  # fmt: skip
    outcome.outages = list(record["outages"])
    outcome.error, outcome.time_up = record["error"], record["time_up"]
    outcome.generate_s, outcome.tools_s = record["generate_s"], record["tools_s"]
    outcome.interaction_s = record["interaction_s"]
    return outcome


def _row(row: Mapping[str, Any], reason: StopReason) -> ConversationRow:
    """Return a recorded row, written by the trajectory itself."""
    held, made, end = columns(row), Trajectory(), 0
    for (source, _), tokens in itertools.groupby(zip(held["sources"], held["turn_ids"], strict=True)):
        start, end = end, end + sum(1 for _ in tokens)
        ids = held["ids"][start:end]
        if source == Source.PROMPT:
            made.append_prompt(ids)
        elif source == Source.SAMPLED:
            made.append_sampled(ids, held["logprobs"][start:end], held["versions"][start:end])
        else:
            made.append_context(ids, Source(source))
    made.seal(reason)
    return ConversationRow(made, [])


def _turn(number: int, generation: Mapping[str, Any], rows: Sequence[ConversationRow]) -> Turn:
    turn = Turn(
        number,
        state=generation["state"],
        parent=generation["parent"],
        place=generation["cause"] if generation["row"] is None else generation["row"],
        summary=generation["summary"],
        lane=generation["lane"],
        at=generation["at"],
        seconds=max(0.0, generation["at"] - generation["asked_at"]),
        finish=generation["finish"],
        cached=generation["cached_tokens"],
        role=generation.get("role"),
    )
    if generation["row"] is not None:
        turn.start = generation["start"] - rows[generation["row"]].trajectory.prompt_length
        turn.end = turn.start + generation["tokens"]
    return turn


def _call(call: Mapping[str, Any]) -> CallResult:
    return CallResult(
        call["id"],
        call["tool"],
        CallStatus(call["status"]),
        call["text"],
        metrics=dict(call["metrics"]),
        seconds=call["seconds"],
        queue_s=call["queue_s"],
        attempts=call["attempts"],
        cached=call["cached"],
        truncated=call["truncated"],
        altered=call["altered"],
        at=call["at"],
    )


def register_recorded_loop() -> None:
    """Register the agent loop with verl in this process, under the name `recorded_agent`."""
    register(RECORDED_LOOP)(RecordedAgentLoop)
