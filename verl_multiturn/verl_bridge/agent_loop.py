"""`MultiTurnAgentLoop`: verl's worker hands it a row, it runs a `Conversation` and hands back an `AgentLoopOutput`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from verl_multiturn.chat.rendering import Difference
from verl_multiturn.observe.records import RecordWriter, record_of
from verl_multiturn.rollout.conversation import Conversation, Outcome, Request
from verl_multiturn.rollout.engine import Engine
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.receipts import Receipt, ReceiptingEngine, Receipts
from verl_multiturn.rollout.trajectory import NO_VERSION, Source
from verl_multiturn.tools.registry import load_tools
from verl_multiturn.verl_bridge.codec import make_chat
from verl_multiturn.verl_bridge.engine import VerlEngine
from verl_multiturn.verl_bridge.parsers import make_parser, stop_ids
from verl_multiturn.verl_bridge.preflight import AGENT_LOOP, settings_of
from verl_multiturn.verl_bridge.rows import make_request


class CertifiedOutput(AgentLoopOutput):
    """verl's output with what the certificate needs, as batch columns of their own: `extra_fields` reach the user's
    `compute_score`, these do not."""

    versions: list[int]
    """Weight version of each response token, -1 where nobody sampled it."""
    receipts: bytes = b""
    """`Receipts.to_bytes`; empty when no row is verified."""

    def as_dict(self) -> dict[str, Any]:
        """verl's fields, `rollout_versions` int64 `[R]` and, unless empty, `rollout_receipts` uint8."""
        output: dict[str, Any] = super().as_dict()
        output["rollout_versions"] = torch.tensor(output.pop("versions"), dtype=torch.int64)
        if receipts := output.pop("receipts", b""):
            # As a tensor it crosses TransferQueue without being pickled.
            output["rollout_receipts"] = torch.from_numpy(np.frombuffer(receipts, np.uint8).copy())
        return output


@dataclass(frozen=True)
class Runner:
    """What all requests of a process share."""

    conversation: Conversation
    engine: ReceiptingEngine
    """The conversation's."""
    tools: dict[str, Any]
    records: RecordWriter | None
    prompt_length: int
    stop_ids: list[int]
    """Ids at which the engine stops for the call format, beside the model's own."""
    fill_id: int
    """Stands in the response of a conversation that has none; never trained."""

    certified: bool
    """Whether the trainer verifies rows, so that receipts are sent with them."""

    async def run(self, request: Request) -> tuple[Outcome, list[Receipt]]:
        """Roll a request out; with what the engine returned for it.

        Raises:
            ConfigError, ToolContractError: a mistake of an author.
        """
        try:
            outcome = await self.conversation.run(request)
        finally:
            generations = self.engine.take(request.request_id)
        return outcome, generations

    def sampling(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """verl's sampling parameters as the engine takes them; it gives logprobs unasked."""
        asked = {key: value for key, value in params.items() if key != "logprobs"}
        stops = [*asked.pop("stop_token_ids", []), *self.stop_ids]
        return {**asked, "stop_token_ids": stops} if stops else asked


def build_runner(
    rollout_config: Any, tokenizer: Any, engine: Engine, hf_model_type: str | None, chat_template_kwargs: dict[str, Any]
) -> Runner:
    """The shared parts for one rollout configuration.

    Args:
        rollout_config: `actor_rollout_ref.rollout`.
        chat_template_kwargs: `data.apply_chat_template_kwargs`.
    """
    settings = settings_of(rollout_config)
    multi_turn = rollout_config.multi_turn
    path = settings.tool_config_path or multi_turn.tool_config_path
    mode = multi_turn.get("tokenization_sanity_check_mode", "strict")
    ignored = {Difference.WHITESPACE} if mode == "ignore_strippable" else set()
    chat = make_chat(tokenizer, hf_model_type, chat_template_kwargs, ignored=ignored)
    limits = Limits(
        prompt_length=rollout_config.prompt_length,
        response_length=rollout_config.response_length,
        max_assistant_turns=multi_turn.max_assistant_turns,
        max_user_turns=multi_turn.max_user_turns,
        turn_length=settings.turn_length,
        max_parallel_calls=multi_turn.max_parallel_calls,
        max_tool_calls=settings.max_tool_calls,
        max_malformed_turns=settings.max_malformed_turns,
        observation_length=settings.observation_length,
        max_tool_response_length=multi_turn.max_tool_response_length,
        tool_response_truncate_side=multi_turn.tool_response_truncate_side,
        wall_clock_s=settings.request_timeout_s,
    )
    parser = make_parser(multi_turn.format, tokenizer, chat.end_ids)
    receipting = ReceiptingEngine(engine)
    return Runner(
        engine=receipting,
        conversation=Conversation(
            receipting,
            chat.codec,
            parser,
            limits,
            settings.tool_timeout_s,
            check=None if mode == "disable" else chat.check,
        ),
        tools=load_tools(path) if path else {},
        records=RecordWriter(settings.record_dir) if settings.record_dir else None,
        prompt_length=rollout_config.prompt_length,
        stop_ids=stop_ids(multi_turn.format, tokenizer),
        fill_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        certified=settings.certificate_share > 0,
    )


class MultiTurnAgentLoop(AgentLoopBase):
    """verl builds one of these for every request, so nothing is made here that the worker's requests can share."""

    # By the worker's client; a worker process has one.
    _runners: ClassVar[dict[Any, Runner]] = {}

    def __init__(  # pylint: disable=super-init-not-called  # verl's makes a token builder for every request
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any
    ) -> None:
        runner = self._runners.get(server_manager)
        if runner is None:
            config = trainer_config.config
            runner = build_runner(
                config.actor_rollout_ref.rollout,
                tokenizer,
                VerlEngine(server_manager.generate),
                hf_model_type,
                dict(config.data.get("apply_chat_template_kwargs") or {}),
            )
            self._runners[server_manager] = runner
        self._runner = runner

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Roll one row out.

        Raises:
            ConfigError, ToolContractError: a mistake of an author; nothing else.
        """
        runner = self._runner
        sampling = runner.sampling(sampling_params)
        request = make_request(row, runner.tools, sampling, uuid4().hex)
        outcome, generations = await runner.run(request)
        step = int(row.get("global_steps") or 0)
        uid, session_id = str(row.get("uid", "")), int(row.get("session_id") or 0)
        receipts = Receipts(request.request_id, generations, uid, session_id)
        if runner.records is not None:
            runner.records.write(
                record_of(outcome, receipts, step=step, uid=uid, temperature=sampling.get("temperature"))
            )
        output = to_output(outcome, runner, step)
        if runner.certified:
            output.receipts = receipts.to_bytes()
        return output


def to_output(outcome: Outcome, runner: Runner, step: int) -> CertifiedOutput:
    """A finished conversation in verl's form; one without a response gets a single untrained token."""
    trajectory = outcome.trajectory
    prompt = trajectory.ids[: trajectory.prompt_length][-runner.prompt_length :]
    has_response = trajectory.response_length > 0
    start = trajectory.prompt_length
    sampled = [v for v, source in zip(trajectory.versions, trajectory.sources, strict=True) if source is Source.SAMPLED]
    versions = [version for version in sampled if version >= 0] or [step]
    return CertifiedOutput(
        prompt_ids=prompt,
        response_ids=trajectory.ids[start:] if has_response else [runner.fill_id],
        response_mask=trajectory.mask[start:] if has_response else [0],
        response_logprobs=trajectory.logprobs[start:] if has_response else [0.0],
        versions=trajectory.versions[start:] if has_response else [NO_VERSION],
        num_turns=1 + trajectory.turns + outcome.user_turns,
        metrics=AgentLoopMetrics(generate_sequences=outcome.generate_s, tool_calls=outcome.tools_s),
        extra_fields={
            "turn_scores": [],
            "tool_rewards": [call.reward for call in outcome.calls],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "stop_reason": str(outcome.stop_reason),
            "assistant_texts": [m["content"] for m in outcome.messages if m["role"] == "assistant"],
            "calc_rewards": dict(outcome.tool_rewards),
            "rendering_differences": [str(difference) for difference in outcome.differences],
            "call_statuses": [str(call.status) for call in outcome.calls],
        },
    )


def register_agent_loop() -> None:
    """Make the loop known to this process's worker as `multiturn_agent`."""
    register(AGENT_LOOP)(MultiTurnAgentLoop)
