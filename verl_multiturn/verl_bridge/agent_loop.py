"""`MultiTurnAgentLoop`: takes a row from verl's worker, runs a `Conversation`, returns an `AgentLoopOutput`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import torch
from pydantic import Field
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine, Receipts
from verl_multiturn.certificate.records import RecordWriter, record_of
from verl_multiturn.chat.images import ReadImages, Vision, as_they_are, load_images
from verl_multiturn.chat.parsing.turns import MalformedCall, ToolCall
from verl_multiturn.chat.rendering import Difference
from verl_multiturn.chat.tir import STOP_PATTERN, TIR
from verl_multiturn.config import ToolRewardSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.observe.metrics import numbers_of, stats_of
from verl_multiturn.rollout.conversation import Conversation, Outcome, Request
from verl_multiturn.rollout.engine import Engine
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.marker import MarkerStop
from verl_multiturn.rollout.placeholders import PlaceholderGuard
from verl_multiturn.rollout.tool_reward import tool_scores
from verl_multiturn.rollout.trajectory import NO_VERSION
from verl_multiturn.rollout.void_turns import has_void_turn
from verl_multiturn.tools.calls.slots import Gates
from verl_multiturn.tools.calls.watch import LoopWatch
from verl_multiturn.verl_bridge.call_formats import make_parser, stop_ids
from verl_multiturn.verl_bridge.chat_setup import check_names, make_chat
from verl_multiturn.verl_bridge.processors import image_reader, plain_dict
from verl_multiturn.verl_bridge.rows import make_request, row_name
from verl_multiturn.verl_bridge.slots import RaySlots
from verl_multiturn.verl_bridge.startup.configuration import AGENT_LOOP, settings_of
from verl_multiturn.verl_bridge.tools import load_run_tools
from verl_multiturn.verl_bridge.trainer.closing import close_at_end
from verl_multiturn.verl_bridge.verl_engine import VerlEngine

STATS = "rollout"
"""Key of a conversation's stats in the batch column `metrics`, which the rows of every agent loop have."""


class CertifiedOutput(AgentLoopOutput):
    """verl's output of one row, with the fields that the certificate and the metrics need.

    `extra_fields` reach the user's `compute_score`; these fields do not. `as_dict` says what they become in the batch.
    """

    versions: list[int]
    """Weight version of each response token, `(R,)`; -1 where the token was not sampled or its version is unknown."""
    receipts: bytes = b""
    """Result of `Receipts.to_bytes`; empty when the trainer verifies no rows."""
    stats: dict[str, Any] = Field(default={}, exclude=True)
    """Values of the conversation for the metrics, as `stats_of` returns them."""
    tool_scores: list[tuple[int, float]] = Field(default=[], exclude=True)
    """Pairs of a position in the response and the number that is added to the score there."""
    void: bool = Field(default=False, exclude=True)
    """True for a conversation with a void turn; False also when void turns are not looked for."""

    def as_dict(self) -> dict[str, Any]:
        """Return verl's columns of the row, and ours.

        Ours are `rollout_versions` (int64, `(R,)`) and, unless it is empty, `rollout_receipts` (uint8, one number for
        each byte). The tools' rewards are added to `rm_scores`. The stats lie in `metrics`, under the key `STATS`.
        """
        output: dict[str, Any] = super().as_dict()
        for position, reward in self.tool_scores:
            output["rm_scores"][position] += reward
        # The score of `compute_score`. With `tool_reward.mode=replace` the stats overwrite it with None.
        reported = numbers_of(self.extra_fields.get("reward_extra_info") or {})
        output["metrics"][STATS] = {"score": self.reward_score, "reported": reported, **self.stats}
        output["rollout_versions"] = torch.tensor(output.pop("versions"), dtype=torch.int64)
        if receipts := output.pop("receipts", b""):
            # A tensor crosses TransferQueue without being pickled.
            output["rollout_receipts"] = torch.from_numpy(np.frombuffer(receipts, np.uint8).copy())
        return output


@dataclass(frozen=True)
class Runner:
    """Everything that the requests of one process share."""

    conversation: Conversation
    engine: ReceiptingEngine
    """Engine of `conversation`, which keeps the receipts."""
    tools: dict[str, Any]
    records: RecordWriter | None
    prompt_length: int
    stop_ids: list[int]
    """Token ids at which the engine stops: ends of a turn, stop ids of the call format, placeholders of media."""
    stop_patterns: list[str]
    """Regular expressions of the texts at which the engine stops; empty unless in text mode."""
    fill_id: int
    """Token id that fills the response of a conversation without one; never trained."""

    certified: bool
    """True when the trainer verifies rows; receipts are then sent with each row."""
    tool_reward: ToolRewardSettings
    final_answer: re.Pattern[str] | None
    """Pattern of a final answer, for finding void turns; None when void turns are not looked for."""
    vision: Vision | None
    """Placeholder tokens of the model; None for a model that takes no images."""
    read_images: ReadImages
    mm_processor_kwargs: dict[str, Any]

    async def request(self, row: Mapping[str, Any], sampling: Mapping[str, Any], request_id: str) -> Request:
        """Return the request of a data row, with its images loaded.

        Raises:
            ConfigError: the row does not fit the run (its tools, messages or images); see `make_request`.
        """
        request = make_request(row, self.tools, sampling, request_id, self.vision is not None)
        if self.vision is None:
            return request
        return replace(request, messages=await load_images(request.messages, self.read_images, row_name(row)))

    async def run(self, request: Request) -> tuple[Outcome, list[Receipt]]:
        """Roll a request out; return its outcome and the receipts of its generations.

        Raises:
            ConfigError, ToolContractError: the author of the data, a tool or the configuration made a mistake.
        """
        try:
            outcome = await self.conversation.run(request)
        finally:
            generations = self.engine.take(request.request_id)
        return outcome, generations

    async def output(self, request: Request, row: Mapping[str, Any], step: int) -> CertifiedOutput:
        """Roll a request out, write its record, and return it in verl's form.

        Args:
            request: the request of `row`.
            row: verl's row; its `uid` and `session_id`, where it has them, go into the receipts and the record.
            step: training step.

        Raises:
            ConfigError, ToolContractError: the author of the data, a tool or the configuration made a mistake.
        """
        outcome, generations = await self.run(request)
        uid, session_id = str(row.get("uid", "")), int(row.get("session_id") or 0)
        output = to_output(outcome, self, step)
        receipts = Receipts(request.request_id, generations, uid, session_id, output.void, not outcome.valid)
        if self.records is not None:
            temperature = request.sampling.get("temperature")
            self.records.write(record_of(outcome, receipts, step=step, uid=uid, temperature=temperature))
        if self.certified:
            output.receipts = receipts.to_bytes()
        return output

    def sampling(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return verl's sampling parameters in the form that the engine takes.

        `logprobs` is left out, since the engine always returns them. Our stop ids and stop patterns are added.
        """
        asked = {key: value for key, value in params.items() if key != "logprobs"}
        stops = [*asked.pop("stop_token_ids", []), *self.stop_ids]
        if self.stop_patterns:
            asked["stop_regex"] = self.stop_patterns
        return {**asked, "stop_token_ids": stops} if stops else asked


def build_runner(
    rollout_config: Any,
    tokenizer: Any,
    engine: Engine,
    hf_model_type: str | None,
    chat_template_kwargs: dict[str, Any],
    processor: Any = None,
    read_images: ReadImages = as_they_are,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> Runner:
    """Build everything that requests share, from one rollout configuration.

    Args:
        rollout_config: `actor_rollout_ref.rollout`.
        tokenizer: the model's tokenizer.
        engine: the engine that samples; it is wrapped here to keep receipts.
        hf_model_type: `model_type` of the model's config.json.
        chat_template_kwargs: `data.apply_chat_template_kwargs`.
        processor: the processor of a model that takes images; None for a text model.
        read_images: loads and resizes the images of rows and tools.
        mm_processor_kwargs: `data.mm_processor_kwargs`.

    Raises:
        ConfigError: a setting, a tool or the call format cannot work. In text mode also: the engine cannot stop at a
            text, or the model takes images.
        ValueError: verl has no token builder for the model.
    """
    settings = settings_of(rollout_config)
    multi_turn = rollout_config.multi_turn
    path = settings.tool_config_path or multi_turn.tool_config_path
    mode = multi_turn.get("tokenization_sanity_check_mode", "strict")
    ignored = {Difference.WHITESPACE} if mode == "ignore_strippable" else set()
    mm_kwargs = dict(mm_processor_kwargs or {})
    text_mode = multi_turn.format == TIR
    if text_mode and rollout_config.get("skip_tokenizer_init"):
        raise ConfigError(
            f"rollout.skip_tokenizer_init=True: without a tokenizer SGLang cannot stop at the output marker of "
            f"multi_turn.format={TIR}; set it to False"
        )
    chat = make_chat(tokenizer, hf_model_type, chat_template_kwargs, None, ignored, processor, mm_kwargs, text_mode)
    vision = chat.codec.vision
    tools = load_run_tools(path, multi_turn.get("function_tool_path"))
    if not text_mode:
        check_names(chat.codec, tools.values())
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
        turns_reminder=settings.turns_reminder,
        wall_clock_s=settings.request_timeout_s,
    )
    parser = make_parser(multi_turn.format, tokenizer, chat.end_ids)
    if text_mode:
        engine = MarkerStop(engine, tokenizer)
    if vision is not None:
        engine = PlaceholderGuard(engine, vision)
    receipting = ReceiptingEngine(engine)
    return Runner(
        engine=receipting,
        conversation=Conversation(
            receipting,
            chat.codec,
            parser,
            limits,
            Gates(settings.tool_timeout_s, RaySlots()),
            # In text mode the template writes only the prompt, so there is no rendering of the whole to compare with.
            check=None if mode == "disable" or text_mode else chat.check,
            read_images=read_images,
        ),
        tools=tools,
        records=RecordWriter(settings.record_dir) if settings.record_dir else None,
        prompt_length=rollout_config.prompt_length,
        stop_ids=sorted(
            {*chat.end_ids, *stop_ids(multi_turn.format, tokenizer), *(vision.media_ids if vision is not None else ())}
        ),
        stop_patterns=[STOP_PATTERN] if text_mode else [],
        fill_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        certified=settings.certificate_share > 0,
        tool_reward=settings.tool_reward,
        final_answer=re.compile(settings.void_turn_pattern) if settings.void_turn_pattern is not None else None,
        vision=vision,
        read_images=read_images,
        mm_processor_kwargs=mm_kwargs,
    )


class MultiTurnAgentLoop(AgentLoopBase):
    """The agent loop `multiturn_agent`, which rolls out one row as one conversation.

    verl builds a new object for every request. What requests can share is built once, in a `Runner`.
    """

    # One runner for each client of the generation servers. A worker process has one client.
    _runners: ClassVar[dict[Any, Runner]] = {}

    def __init__(  # pylint: disable=super-init-not-called  # verl's __init__ makes a token builder for every request
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any
    ) -> None:
        runner = self._runners.get(server_manager)
        if runner is None:
            config = trainer_config.config
            processor = kwargs.get("processor")
            runner = build_runner(
                config.actor_rollout_ref.rollout,
                tokenizer,
                VerlEngine(server_manager.generate),
                hf_model_type,
                plain_dict(config.data.get("apply_chat_template_kwargs")),
                processor,
                image_reader(processor, config.data, kwargs["dataset_cls"]) if processor is not None else as_they_are,
                plain_dict(config.data.get("mm_processor_kwargs")),
            )
            self._runners[server_manager] = runner
            LoopWatch().start()  # as long as the worker lives
            close_at_end(runner.tools)
        self._runner = runner

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Roll one row out.

        Args:
            sampling_params: verl's sampling parameters.
            row: verl's fields of the row, such as `raw_prompt`, `extra_info`, `uid` and `global_steps`.

        Raises:
            ConfigError, ToolContractError: the author of the data, a tool or the configuration made a mistake. No other
                error is raised.
        """
        runner = self._runner
        sampling = runner.sampling(sampling_params)
        request = await runner.request(row, sampling, uuid4().hex)
        return await runner.output(request, row, int(row.get("global_steps") or 0))


def to_output(outcome: Outcome, runner: Runner, step: int) -> CertifiedOutput:
    """Return a finished conversation in verl's form.

    A conversation without a response gets a single untrained token. An invalid conversation has the mask 0 throughout,
    so that nothing of it is trained.

    Args:
        outcome: the finished conversation.
        runner: the runner that ran it.
        step: training step, reported as the weight version where the engine knows none.
    """
    trajectory = outcome.trajectory
    prompt, images = trajectory.ids[: trajectory.prompt_length], outcome.images
    if runner.vision is not None and len(prompt) > runner.prompt_length:
        # The prompt is cut. An image cannot be cut, so all images and their placeholders are dropped.
        prompt, images = runner.vision.without_media(prompt), []
    prompt = prompt[-runner.prompt_length :]
    has_response = trajectory.response_length > 0
    start = trajectory.prompt_length
    void = runner.final_answer is not None and has_void_turn(outcome, runner.final_answer)
    versions = [version for version in trajectory.versions if version >= 0] or [step]
    mask = trajectory.mask[start:] if outcome.valid else [0] * trajectory.response_length
    output = CertifiedOutput(
        prompt_ids=prompt,
        response_ids=trajectory.ids[start:] if has_response else [runner.fill_id],
        response_mask=mask if has_response else [0],
        response_logprobs=trajectory.logprobs[start:] if has_response else [0.0],
        versions=trajectory.versions[start:] if has_response else [NO_VERSION],
        num_turns=1 + trajectory.turns + outcome.user_turns,
        metrics=AgentLoopMetrics(generate_sequences=outcome.generate_s, tool_calls=outcome.tools_s),
        extra_fields={
            **outcome.extra_fields,
            "turn_scores": [],
            "tool_rewards": [call.reward for call in outcome.calls],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "stop_reason": str(outcome.stop_reason),
            "assistant_texts": [m["content"] for m in outcome.messages[outcome.asked :] if m["role"] == "assistant"],
            "assistant_calls": [[_call(call) for call in turn.calls] for turn in outcome.assistant_turns],
            "void": void,
            "calc_rewards": dict(outcome.tool_rewards),
            "rendering_differences": [str(difference) for difference in outcome.differences],
            "call_tools": [call.tool for call in outcome.calls],
            "call_statuses": [str(call.status) for call in outcome.calls],
            "tool_metrics": [call.metrics for call in outcome.calls],
        },
        stats=stats_of(outcome),
        void=void,
    )
    if runner.final_answer is not None:
        output.stats["void"] = void
    if runner.vision is not None:
        output.multi_modal_data = {"images": images} if images else {}
        output.mm_processor_kwargs = runner.mm_processor_kwargs
    if runner.tool_reward.mode != "none":
        output.tool_scores = tool_scores(outcome, runner.tool_reward.weight)
        output.stats["tool_score"] = sum(score for _, score in output.tool_scores)
    if runner.tool_reward.mode == "replace":
        output.reward_score = 0.0  # verl would call compute_score if there were no score yet
        output.stats["score"] = None
    return output


def _call(call: ToolCall | MalformedCall) -> dict[str, str]:
    """Return a call in plain types, for reward functions; a malformed call has no name and its text as arguments."""
    if isinstance(call, MalformedCall):
        return {"name": "", "arguments": call.text}
    return {"name": call.name, "arguments": call.arguments}


def register_agent_loop() -> None:
    """Register the agent loop with verl in this process, under the name `multiturn_agent`."""
    register(AGENT_LOOP)(MultiTurnAgentLoop)
