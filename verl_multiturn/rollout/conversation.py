"""`Conversation`: the loop of one request. It knows neither verl, Ray nor SGLang.

    request → prompt ids → engine → parse → tools → observation ids → engine → … → Trajectory

The loop raises only for a mistake of an author (`ConfigError`, `ToolContractError`) and for cancellation. Everything
else ends in a sealed trajectory with a `StopReason`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_multiturn.chat.codec import ChatCodec, Message, assistant_message
from verl_multiturn.chat.images import ReadImages, as_they_are, images_of, tool_content
from verl_multiturn.chat.parsing.turns import AssistantTurn, CallParser, MalformedCall
from verl_multiturn.chat.rendering import UNEXPLAINED, Difference, RenderingCheck
from verl_multiturn.describe import message_of
from verl_multiturn.errors import EngineError, TrajectoryError
from verl_multiturn.rollout.clock import running
from verl_multiturn.rollout.engine import Engine
from verl_multiturn.rollout.limits import INVALID, Limits, Progress, StopReason
from verl_multiturn.rollout.trajectory import Source, Trajectory
from verl_multiturn.tasks import ended
from verl_multiturn.tools.calls.results import EXECUTED, CallResult
from verl_multiturn.tools.calls.session import ToolSession
from verl_multiturn.tools.calls.slots import Gates

logger = logging.getLogger(__name__)

# How many tokens before a turn its parser sees: the assistant's header, which may open the reasoning.
_HEADER = 16


@dataclass(frozen=True)
class Request:
    """A sample to roll out."""

    request_id: str
    messages: list[Message]
    """The first messages, in the form of a chat template."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """The tools of this request, by name."""
    tools_kwargs: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Arguments for the tools' methods, as `read_tools_kwargs` returns them."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, under the engine's own names."""


@dataclass
class Outcome:
    """The result of one request."""

    request_id: str
    trajectory: Trajectory
    messages: list[Message]
    """The conversation as the model saw it, with the request's own messages first."""
    calls: list[CallResult] = field(default_factory=list)
    """Results of all tool calls, in order."""
    assistant_turns: list[AssistantTurn] = field(default_factory=list)
    """Text and calls of every assistant turn that was read."""
    call_turns: list[int] = field(default_factory=list)
    """For each of `calls`, the assistant turn that made it, counted from 0 as in `Trajectory.turn_ids`."""
    asked: int = 0
    """How many of `messages` are the request's own."""
    images: list[Any] = field(default_factory=list)
    """Images of the request's messages and of tools, in the order of their placeholders in the trajectory."""
    calc_rewards: dict[str, float] = field(default_factory=dict)
    """The result of `calc_reward`, for each tool."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Fields that tools written for verl 0.9 left for the reward function."""
    user_turns: int = 0
    """Turns of the environment that the model got to read: the responses of tools, or of a user."""
    differences: list[Difference] = field(default_factory=list)
    """Differences between the template's rendering of `messages` and the trajectory; empty if not compared."""
    error: str = ""
    """What went wrong, after `ENGINE_ERROR` and `PROMPT_TOO_LONG`; "" otherwise."""
    generate_s: float = 0.0
    """Seconds spent waiting for the engine."""
    tools_s: float = 0.0
    """Seconds spent executing tool calls."""

    @property
    def stop_reason(self) -> StopReason:
        """Return why the conversation ended.

        Raises:
            RuntimeError: The conversation is not over.
        """
        if self.trajectory.stop_reason is None:
            raise RuntimeError("the conversation is not over")
        return self.trajectory.stop_reason

    @property
    def valid(self) -> bool:
        """Tell whether the conversation says anything about the model.

        A valid conversation has a sampled token and did not end for a reason in `INVALID`. A conversation that is not
        valid is not trained on and does not count in its group.
        """
        return self.stop_reason not in INVALID and any(self.trajectory.mask)


class Conversation:
    """A loop that rolls requests out. One object serves any number of requests at once.

    Args:
        engine: Samples the turns.
        codec: Renders messages to token ids.
        parser: Reads the turns.
        limits: Limits, the same for every request.
        gates: What all requests share about their tools. The default serves a single process, with 60 s for each call.
        check: Compares each conversation with the template's rendering of the whole; None: no comparison.
        read_images: Resizes the images that tools return, for a model that takes images.
    """

    def __init__(
        self,
        engine: Engine,
        codec: ChatCodec,
        parser: CallParser,
        limits: Limits,
        gates: Gates | None = None,
        check: RenderingCheck | None = None,
        read_images: ReadImages = as_they_are,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._parser = parser
        self._limits = limits
        self._gates = gates or Gates(timeout_s=60.0)
        self._check = check
        self._read_images = read_images
        self._warned: set[Difference] = set()

    async def run(self, request: Request) -> Outcome:
        """Roll a request out.

        Args:
            request: The request.

        Returns:
            The outcome, with a sealed trajectory.

        Raises:
            ConfigError: A mistake of an author, for example messages that the chat template cannot render.
            ToolContractError: A tool broke the contract of `BaseTool`.
            asyncio.CancelledError: The caller cancelled. Every tool has been released.
        """
        codec = self._codec
        outcome = Outcome(request.request_id, Trajectory(), await codec.render(codec.trusted, request.messages))
        outcome.asked = len(outcome.messages)
        outcome.images = images_of(outcome.messages)
        session = ToolSession(
            request.request_id,
            request.tools,
            request.tools_kwargs,
            self._gates,
            self._limits.max_parallel_calls,
            self._limits.max_tool_calls,
            outcome.messages,
        )
        # The prompt comes first, so that the trajectory has one whatever happens to the tools.
        shown = await codec.render(codec.trusted_schemas, session.schemas)
        outcome.trajectory.append_prompt(await codec.render(codec.initial, outcome.messages, shown))
        if outcome.trajectory.prompt_length > self._limits.prompt_length:
            outcome.error = (
                f"the prompt has {outcome.trajectory.prompt_length} tokens with its tools' schemas, and may have "
                f"{self._limits.prompt_length}; raise the prompt length, or drop the row (`verl-multiturn validate` "
                "lists such rows)"
            )
            logger.warning("request %s is not rolled out: %s", request.request_id, outcome.error)
            outcome.trajectory.seal(StopReason.PROMPT_TOO_LONG)
            return outcome
        reason: StopReason | None = None
        deadline = asyncio.timeout(self._limits.wall_clock_s)
        try:
            async with deadline, running(deadline), session:
                reason = await self._turns(request, outcome, session, shown)
                outcome.calc_rewards = await session.calc_rewards()
                outcome.extra_fields = session.extra_fields
        except TimeoutError:
            if not deadline.expired():
                raise
        # Without a reason, time ran out before the conversation ended. If it ran out later, during calc_reward or
        # release, the conversation had ended by itself.
        outcome.trajectory.seal(reason or StopReason.WALL_CLOCK)
        self._compare(outcome, shown)
        return outcome

    def _compare(self, outcome: Outcome, schemas: Sequence[dict[str, Any]]) -> None:
        trajectory = outcome.trajectory
        said = sum(message["role"] == "assistant" for message in outcome.messages[outcome.asked :])
        if self._check is None or not outcome.valid or said < trajectory.turns:
            return  # the engine or the clock cut a turn off: it was not read, so there is no message to render
        sampled = [source is Source.SAMPLED for source in trajectory.sources]
        outcome.differences = self._check.differences(outcome.messages, schemas, trajectory.ids, sampled)
        for difference in UNEXPLAINED.intersection(outcome.differences) - self._warned:
            self._warned.add(difference)
            logger.warning(
                "request %s: the chat template writes this conversation differently (%s) from what the model saw and "
                "is trained on; `verl-multiturn doctor --model` examines the template (said once for each kind)",
                outcome.request_id,
                difference,
            )

    async def _turns(
        self, request: Request, outcome: Outcome, session: ToolSession, shown: Sequence[dict[str, Any]]
    ) -> StopReason:
        """Run turn after turn, and return why the conversation ended.

        `shown` holds the tools' schemas as the model is shown them.
        """
        trajectory, messages, limits = outcome.trajectory, outcome.messages, self._limits
        schemas = session.schemas
        malformed_in_a_row = 0
        while True:
            try:
                turn, cut = await self._assistant_turn(request, outcome, schemas)
            except EngineError as error:
                outcome.error = message_of(error)
                logger.error("request %s: the engine failed: %s", request.request_id, outcome.error)
                return StopReason.ENGINE_ERROR
            unreadable = bool(turn.calls) and all(isinstance(call, MalformedCall) for call in turn.calls)
            malformed_in_a_row = malformed_in_a_row + 1 if unreadable else 0
            progress = Progress(
                response_tokens=trajectory.response_length,
                assistant_turns=trajectory.turns,
                user_turns=outcome.user_turns,
                cut=cut,
                calls=len(turn.calls),
                told_calls_are_used_up=session.calls_used_up,
                malformed_in_a_row=malformed_in_a_row,
            )
            reason = limits.after_assistant_turn(progress)
            # A limit does not stop a call that ends the conversation: with it the model hands in its answer.
            if reason is not None and (cut or not session.ends(turn.calls)):
                return reason
            results = await self._execute(turn, outcome, session)
            if session.ended:
                return StopReason.FINISHED
            if reason is not None:
                return reason
            said = [await self._tool_message(result) for result in results[:-1]]
            said.append(await self._tool_message(results[-1], limits.reminder(trajectory.turns)))
            added = await self._codec.render(self._codec.trusted, said)
            for result, message, trusted in zip(results, said, added, strict=True):
                result.altered |= message["content"] != trusted["content"]
            increment = await self._codec.render(self._codec.observation, messages, added, trajectory.ids, shown)
            if not limits.fits_observation(trajectory.response_length, len(increment)):
                return StopReason.RESPONSE_LENGTH
            messages.extend(added)
            outcome.images += images_of(added)
            trajectory.append_context(increment.separator, Source.TEMPLATE)
            answered = any(result.status in EXECUTED for result in results)
            trajectory.append_context(increment.observation, Source.OBSERVATION if answered else Source.INJECTED)
            outcome.user_turns += 1

    async def _assistant_turn(
        self, request: Request, outcome: Outcome, schemas: Sequence[dict[str, Any]]
    ) -> tuple[AssistantTurn, Literal["response", "turn"] | None]:
        """Sample a turn and read it.

        Returns:
            The turn, and the budget that cut it short; None if the turn ended by itself.
        """
        trajectory = outcome.trajectory
        left = self._limits.response_length - trajectory.response_length
        budget = self._limits.turn_budget(trajectory.response_length)
        started = time.perf_counter()
        try:
            images = {"images": outcome.images} if outcome.images else {}
            generating = asyncio.ensure_future(
                self._engine.generate(request.request_id, trajectory.ids, request.sampling, budget, **images)
            )
            # The tokens that a cancelled generation still returns are kept.
            cancelled = await ended(generating, pass_on=True)
            failed = generating.cancelled() or generating.exception() is not None
            if cancelled is not None and failed:
                raise cancelled
            if generating.cancelled():
                raise EngineError("the engine cancelled the generation")
            generation = generating.result()
        finally:
            outcome.generate_s += time.perf_counter() - started
        if not generation.ids or len(generation.ids) > budget:
            raise EngineError(f"the engine returned {len(generation.ids)} tokens, where 1 to {budget} were asked for")
        try:
            trajectory.append_sampled(generation.ids, generation.logprobs, generation.versions)
        except TrajectoryError as error:
            raise EngineError(f"the engine returned what is not a generation: {error}") from error
        if cancelled is not None:
            raise cancelled
        if generation.finish == "abort":
            raise EngineError("cut off by the engine")
        start = len(trajectory) - len(generation.ids)
        before = trajectory.ids[max(0, start - _HEADER) : start]
        turn = await self._parser.parse(generation.ids, schemas, trajectory.turns - 1, before)
        outcome.assistant_turns.append(turn)
        outcome.messages.append(assistant_message(turn))
        if generation.finish != "length":
            return turn, None
        return turn, "turn" if budget < left else "response"

    async def _execute(self, turn: AssistantTurn, outcome: Outcome, session: ToolSession) -> list[CallResult]:
        """Execute a turn's calls and return their results, in order."""
        started = time.perf_counter()
        try:
            results = await session.execute(turn.calls)
        finally:
            outcome.tools_s += time.perf_counter() - started
        outcome.calls.extend(results)
        outcome.call_turns.extend([outcome.trajectory.turns - 1] * len(results))
        return results

    async def _tool_message(self, result: CallResult, ending: str = "") -> Message:
        limits, text = self._limits, result.text
        if limits.observation_length is None:
            text = limits.truncate(text)
            cut = text != result.text
        else:
            text = self._codec.harmless(text)
            result.altered = text != result.text
            text, cut = self._codec.clip(text, limits.observation_length, limits.tool_response_truncate_side)
        result.truncated |= cut
        read = self._read_images if self._codec.vision is not None else None
        content = await tool_content(result.tool, text + ending, result.images, read)
        return {"role": "tool", "content": content, "tool_call_id": result.call_id, "name": result.tool or "error"}
