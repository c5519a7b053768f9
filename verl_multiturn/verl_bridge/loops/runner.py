"""`Runner`: everything that the requests of one process share, built from one rollout configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.calls.slots import Gates
from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine, Receipts
from verl_multiturn.chat.images import Vision, load_images
from verl_multiturn.chat.parsing.turns import CallParser
from verl_multiturn.chat.rendering_check import RenderingDifference
from verl_multiturn.chat.tir import STOP_PATTERN, TIR
from verl_multiturn.config import BOXED, USER
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.registry import load_interactions
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession
from verl_multiturn.records.write.recorder import Recorder
from verl_multiturn.replay.engine import ReplayEngine
from verl_multiturn.replay.tools import RecordedGate
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.conversation import Conversation
from verl_multiturn.rollout.engines.policy_text import PolicyText
from verl_multiturn.rollout.engines.protocol import Engine
from verl_multiturn.rollout.engines.stop_texts import PlaceholderGuard, StopTexts
from verl_multiturn.rollout.life import current, note, stopped
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.verl_bridge.loops.life import note_score
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput, OutputSettings, to_outputs
from verl_multiturn.verl_bridge.loops.recorder import recorder_of
from verl_multiturn.verl_bridge.loops.tools import load_run_tools
from verl_multiturn.verl_bridge.model.call_formats import make_parser, stop_ids
from verl_multiturn.verl_bridge.model.chat_setup import check_names, make_chat
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.model.processors import plain_dict
from verl_multiturn.verl_bridge.rows import make_request, row_name
from verl_multiturn.verl_bridge.run_keeper import RayKeeper, RaySlots
from verl_multiturn.verl_bridge.settings import settings_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runner:
    """Everything that the requests of one process share."""

    config: Any
    """verl's whole configuration."""
    model: LoadedModel
    conversation: Conversation
    engine: ReceiptingEngine
    """Engine of `conversation`, which keeps the receipts."""
    tools: dict[str, Any]
    interactions: dict[str, Interaction]
    records: Recorder | None
    """Keeps the records of conversations; None: no records are kept."""
    stop_ids: list[int]
    """Token ids at which the engine stops: ends of a turn, stop ids of the call format, placeholders of media."""
    stop_patterns: list[str]
    """Regular expressions of the texts at which the engine stops; empty unless in text mode."""
    certified: bool
    """True when the trainer verifies rows; receipts are then sent with each row."""
    limits: Limits
    outages: Outages
    parser: CallParser
    output_settings: OutputSettings

    @property
    def vision(self) -> Vision | None:
        """Return the placeholder tokens of the model; None for a model that takes no images."""
        return self.output_settings.vision

    async def request(self, row: Mapping[str, Any], sampling: Mapping[str, Any], request_id: str) -> Request:
        """Return the request of a data row, with its images loaded.

        Raises:
            ConfigError: The row does not fit the run (its tools, interaction, messages or images); see `make_request`.
        """
        request = make_request(row, self.tools, sampling, request_id, self.vision is not None, self.interactions)
        if self.vision is None:
            return request
        return replace(request, messages=await load_images(request.messages, self.model.read_images, row_name(row)))

    async def run(self, request: Request) -> tuple[Outcome, list[Receipt]]:
        """Roll a request out; return its outcome and the receipts of its generations.

        Raises:
            ConfigError, ToolContractError, InteractionContractError: The author of the data, a tool, an interaction or
                the configuration made a mistake.
        """
        outcome = Outcome.begun(request.request_id)
        note(outcome, request)  # before it runs, for the trace and the record of one that is cancelled
        try:
            await self.conversation.run(request, outcome)
        finally:
            generations = self.receipts(outcome)
        return outcome, generations

    def receipts(self, outcome: Outcome) -> list[Receipt]:
        """Return the receipts of a conversation in the order of its turns, the user's among them, and forget them."""
        own = iter(self.engine.take(outcome.request_id))
        user = [outcome.user_receipts.pop(turn.number, None) for turn in outcome.turns]
        found = [next(own, None) if receipt is None else receipt for receipt in user]
        return [*(receipt for receipt in found if receipt is not None), *own]

    async def outputs(self, request: Request, row: Mapping[str, Any], step: int) -> list[CertifiedOutput]:
        """Roll a request out, and return its rows in verl's form; one row where ids only append.

        Who calls it follows the conversation (`life.py`): `run` of an agent loop, `eval`, `generate_sequences`.

        Args:
            request: The request of `row`.
            row: verl's row; its `uid` and `session_id`, where it has them, go into the receipts and the record.
            step: Training step.

        Raises:
            ConfigError, ToolContractError, InteractionContractError: The author of the data, a tool, an interaction or
                the configuration made a mistake.
        """
        outcome, generations = await self.run(request)
        outputs = self.finish(outcome, generations, row, step, request.sampling, request)
        note_score(outputs)  # a reward that the conversation itself has given
        return outputs

    def finish(
        self,
        outcome: Outcome,
        generations: Sequence[Receipt],
        row: Mapping[str, Any],
        step: int,
        sampling: Mapping[str, Any],
        request: Request | None = None,
    ) -> list[CertifiedOutput]:
        """Return the rows of a conversation or a session that is over, in verl's form, and note the data of its record.

        Args:
            outcome: Its outcome.
            generations: The receipts of its generations, in the order of `outcome.turns`.
            row: verl's row; its `uid` and `session_id`, where it has them, go into the receipts and the record.
            step: Training step.
            sampling: The sampling parameters.
            request: The row's request; None for a session.
        """
        uid, session_id = str(row.get("uid", "")), int(row.get("session_id") or 0)
        outputs = to_outputs(outcome, self.output_settings, step)
        receipts = Receipts.of_rows(
            outcome.request_id,
            generations,
            outcome.places,
            uid,
            session_id,
            outputs[-1].void,
            not outcome.valid,
            outputs[-1].stats.get("outages", []),
        )
        if (life := current()) is not None:
            life.complete(outcome, generations, row, sampling, request, outputs[-1].void)
        if self.certified:
            for output, own in zip(outputs, receipts, strict=True):
                output.receipts = own.to_bytes()
        return outputs

    def sampling(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return verl's sampling parameters in the form that the engine takes.

        `logprobs` is left out, since the engine always returns them. Our stop ids and stop patterns are added.
        """
        asked = {key: value for key, value in params.items() if key != "logprobs"}
        stops = [*asked.pop("stop_token_ids", []), *self.stop_ids]
        if self.stop_patterns:
            asked["stop_regex"] = self.stop_patterns
        return {**asked, "stop_token_ids": stops} if stops else asked


@dataclass(frozen=True)
class ReplayParts:
    """A replay's parts in the place of those that a run loads."""

    stage: ReplayEngine
    tools: dict[str, Any]
    interactions: dict[str, Interaction]


def build_runner(config: Any, model: LoadedModel, engine: Engine, staged: ReplayParts | None = None) -> Runner:
    """Build everything that requests share.

    The engine is wrapped, so that `Conversation` sees only tokens that may be trained:

        Conversation → ReceiptingEngine → PlaceholderGuard (image models) → StopTexts → engine

    Args:
        config: verl's whole configuration; `actor_rollout_ref.rollout` and `data` are read.
        model: The model.
        engine: The engine that samples; it is wrapped here to keep receipts.
        staged: A replay's parts; nothing of the run is written or shared then, and no clock runs unless it is live.

    Raises:
        ConfigError: A setting, a tool or the call format cannot work. In text mode also: the engine cannot stop at a
            text, or the model takes images.
        ValueError: verl has no token builder for the model.
    """
    rollout = config.actor_rollout_ref.rollout
    settings, multi_turn = settings_of(rollout), rollout.multi_turn
    mode = multi_turn.get("tokenization_sanity_check_mode", "strict")
    ignored = {RenderingDifference.WHITESPACE} if mode == "ignore_strippable" else set()
    text_mode = multi_turn.format == TIR
    if text_mode and rollout.get("skip_tokenizer_init"):
        raise ConfigError(
            f"rollout.skip_tokenizer_init=True: without a tokenizer SGLang cannot stop at the output marker of "
            f"multi_turn.format={TIR}; set it to False"
        )
    tokenizer, template_kwargs = model.tokenizer, plain_dict(config.data.get("apply_chat_template_kwargs"))
    mm_kwargs = plain_dict(config.data.get("mm_processor_kwargs"))
    chat = make_chat(tokenizer, model.model_type, template_kwargs, None, ignored, model.processor, mm_kwargs, text_mode)
    vision = chat.codec.vision
    if staged is not None:
        tools, interactions = staged.tools, staged.interactions
    else:
        path = settings.derived.tool_config_path or multi_turn.tool_config_path
        tools = load_run_tools(path, multi_turn.get("function_tool_path"))
        interactions = load_interactions(settings.interaction_config_path) if settings.interaction_config_path else {}
    if not text_mode:
        check_names(chat.codec, tools.values())
    parser = make_parser(multi_turn.format, tokenizer, chat.end_ids)
    stops = sorted({*chat.end_ids, *stop_ids(multi_turn.format, tokenizer), *(vision.media_ids if vision else ())})
    alone, engine = engine, StopTexts(engine, tokenizer, boxes=text_mode and BOXED in settings.tir.stop)
    if vision is not None:
        engine = PlaceholderGuard(engine, vision)
    receipting = ReceiptingEngine(engine)
    run_sampling = {"temperature": rollout.get("temperature", 1.0)}
    for interaction in interactions.values():
        interaction.is_trained = settings.trains_user and interaction.role == USER
        interaction.policy = PolicyText(alone, chat.codec, parser, stops, receipting, run_sampling)
    limits = Limits.of(rollout, settings)
    outages = Outages(settings.outage, RayKeeper if ray.is_initialized() else None, stopped)
    # A replay shares nothing with other processes, and does not ask whether a failure is an outage: records have it.
    # Without Ray there are no other processes.
    shared = RaySlots() if staged is None and ray.is_initialized() else None
    known = outages if staged is None else None
    is_replay = staged is not None and not staged.stage.is_live
    if is_replay:
        limits = replace(limits, wall_clock_s=None)
    tool_gates = Gates(RecordedGate if is_replay else Gate, settings.tool_timeout_s, shared, known)
    user_gates = Gates(InteractionGate, settings.tool_timeout_s, shared, known)
    if known is not None:
        _warn_of_clocks([*map(tool_gates.of, tools.values()), *map(user_gates.of, interactions.values())], limits)
    conversation = Conversation(
        receipting,
        chat.codec,
        parser,
        limits,
        tool_gates,
        # In text mode the template writes only the prompt, so there is no rendering of the whole to compare with.
        check=None if mode == "disable" or text_mode else chat.check,
        read_images=model.read_images,
        interactions=user_gates,
        context=Context(**settings.context.model_dump(exclude={"weight"})),
        make_tools=ToolSession if staged is None else staged.stage.make_tools,
        make_user=InteractionSession if staged is None else staged.stage.make_user,
    )
    return Runner(
        config=config,
        model=model,
        conversation=conversation,
        engine=receipting,
        tools=tools,
        interactions=interactions,
        records=recorder_of(settings),
        stop_ids=stops,
        stop_patterns=[STOP_PATTERN] if text_mode else [],
        certified=settings.certificate_share > 0,
        limits=limits,
        outages=outages,
        parser=parser,
        output_settings=OutputSettings.of(config, settings, model, vision),
    )


def _warn_of_clocks(gates: Sequence[Any], limits: Limits) -> None:
    """Warn of a call that may last longer than a conversation: its hanging would never be an outage."""
    for gate in gates:
        if limits.wall_clock_s is not None and gate.judges_lateness and gate.timeout_s >= limits.wall_clock_s:
            logger.warning(
                "%s %r: a call may take timeout_s=%g, and a conversation ends after request_timeout_s=%g: a service "
                "that hangs ends conversations, and is never seen to be out; set limits.timeout_s below it",
                gate.owner.kind,
                gate.name,
                gate.timeout_s,
                limits.wall_clock_s,
            )
