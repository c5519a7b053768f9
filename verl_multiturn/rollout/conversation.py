"""`Conversation`: the loop of one request. It knows neither verl, Ray nor SGLang.

    request → prompt ids → engine → parse → tools or interaction → observation ids → engine → … → Trajectory

The loop raises only for a mistake of an author (`ConfigError`, `ToolContractError`, `InteractionContractError`) and for
cancellation. Everything else ends in a sealed trajectory with a `StopReason`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

from verl_multiturn.calls.outages.process import OutageEndError, Outages
from verl_multiturn.calls.slots import Gates
from verl_multiturn.calls.timeline import during
from verl_multiturn.chat.codec import ChatCodec, Message, assistant_message
from verl_multiturn.chat.first_prompts import RequiredPart
from verl_multiturn.chat.images import ReadImages, as_they_are, images_of, tool_content
from verl_multiturn.chat.parsing.turns import HEADER, AssistantTurn, CallParser, MalformedCall
from verl_multiturn.chat.rendering_check import UNEXPLAINED, RenderingCheck, RenderingDifference
from verl_multiturn.chat.template_form import MessageError
from verl_multiturn.config import ASSISTANT, USER
from verl_multiturn.describe import message_of
from verl_multiturn.errors import EngineError, InteractionContractError
from verl_multiturn.interactions.running.replies import CheckedReply, InteractionFailedError
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession
from verl_multiturn.rollout.context import Context, ContextWriter
from verl_multiturn.rollout.engines.protocol import Ask, Engine, Generation, common_length
from verl_multiturn.rollout.engines.sample import sample
from verl_multiturn.rollout.engines.scripted_engine import ScriptEndedError
from verl_multiturn.rollout.life import running, stood_still_s, stopped
from verl_multiturn.rollout.limits import INVALID, ConversationProgress, Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.rollout.trajectory import Source
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.rollout.user_rows import UserRows, speaking
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import EXECUTED, CallResult
from verl_multiturn.tools.running.session import ToolSession

logger = logging.getLogger(__name__)


class Conversation:
    """A loop that rolls requests out. One object serves any number of requests at once.

    Args:
        engine: Samples the turns.
        codec: Renders messages to token ids.
        parser: Reads the turns.
        limits: Limits, the same for every request.
        gates: The state of tools that all requests share. The default serves a single process, with 60 s for each call.
        check: Compares each conversation with the template's rendering of the whole; None: no comparison.
        read_images: Resizes the images that tools and interactions return, for a model that takes images.
        interactions: The state of interactions that all requests share. The default is as for `gates`.
        context: The part of a growing conversation that the model is shown.
        make_tools: Makes the tools' session of a conversation, as `ToolSession` does; a replay has another one.
        make_user: Makes the interaction's session, as `InteractionSession` does.
    """

    def __init__(
        self,
        engine: Engine,
        codec: ChatCodec,
        parser: CallParser,
        limits: Limits,
        gates: Gates[Gate] | None = None,
        check: RenderingCheck | None = None,
        read_images: ReadImages = as_they_are,
        interactions: Gates[InteractionGate] | None = None,
        context: Context | None = None,
        make_tools: Callable[..., ToolSession] = ToolSession,
        make_user: Callable[..., InteractionSession] = InteractionSession,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._parser = parser
        self._limits = limits
        outages = Outages(stopped=stopped)
        self._gates = gates or Gates(Gate, 60.0, outages=outages)
        self._interactions = interactions or Gates(InteractionGate, 60.0, outages=outages)
        self._context = context or Context()
        self._writer = ContextWriter(codec, limits, self._context)
        self._check = check
        self._read_images = read_images
        self._make_tools = make_tools
        self._make_user = make_user
        self._warned: set[RenderingDifference] = set()

    async def run(self, request: Request, outcome: Outcome | None = None) -> Outcome:
        """Roll a request out.

        Args:
            request: The request.
            outcome: The result of `Outcome.begun`; it is filled in as the conversation goes on, so that its trace can
                be written whatever ends it.

        Returns:
            The outcome, with a sealed trajectory.

        Raises:
            ConfigError: A mistake of an author, for example messages that the chat template cannot render.
            ToolContractError: A tool broke the contract of `BaseTool`.
            InteractionContractError: An interaction broke the contract of `Interaction`.
            asyncio.CancelledError: The caller cancelled. Every tool has been released, and the interaction closed.
        """
        outcome = outcome or Outcome.begun(request.request_id)
        user: InteractionSession | None = None
        user_rows: UserRows | None = None
        if request.interaction is not None and request.interaction.is_trained:
            outcome.trained = (ASSISTANT, USER)
            user_rows = UserRows(outcome, self._limits, request.sampling)
        if request.interaction is not None:
            gate = self._interactions.of(request.interaction)
            user = self._make_user(gate, request.request_id, request.interaction_kwargs, stood_still_s)
        else:
            # Before the clock starts, so that the trajectory has a prompt whatever happens to the tools.
            session, shown = await self._prompt(request, outcome)
        reason: StopReason | None = None
        deadline = asyncio.timeout(self._limits.wall_clock_s)
        try:
            async with deadline, running(deadline), speaking(user_rows), user or nullcontext():
                if user is not None:
                    outcome.doing = "interaction"
                    session, shown = await self._prompt(request, outcome, await user.open(request.messages))
                if outcome.error:
                    reason = StopReason.PROMPT_TOO_LONG
                else:
                    outcome.doing = "tools"
                    async with session:
                        reason = await self._turns(request, outcome, session, user, shown)
                        outcome.doing = "score"
                        outcome.calc_rewards = await session.calc_rewards()
                        outcome.extra_fields = session.extra_fields
                        if session.lost and reason not in INVALID:
                            raise OutageEndError(session.lost)
                        if session.unjudged and reason not in INVALID:
                            reason, outcome.error = StopReason.UNJUDGED, session.unjudged
                        if user is not None and reason not in INVALID:
                            outcome.score, outcome.scores = await user.score(), user.scores
        except InteractionFailedError as error:
            reason = self._failed(outcome, str(error))
        except OutageEndError as error:
            reason, outcome.error = StopReason.OUTAGE, str(error)
        except TimeoutError:
            if not deadline.expired():
                raise
            outcome.time_up = outcome.doing
            # A conversation that ended by itself has no reward yet where there was no time to ask for its score.
            unscored = reason is not None and reason not in INVALID and user is not None and not user.scored
            if user is not None and (owed := user.owes or ("score" if unscored else "")):
                said = f"interaction {user.name!r}: {owed} gave nothing before the request's time was up"
                reason = self._failed(outcome, said)
        if not outcome.trajectory.ids:  # the interaction failed before there was a prompt
            session, shown = await self._prompt(request, outcome, is_whole=False)
        if reason is None and session.shut_out:
            reason, outcome.error = StopReason.OUTAGE, session.shut_out
        # Without a reason, time ran out before the conversation ended. If it ran out later, during calc_reward or
        # release, the conversation had ended by itself.
        for row in outcome.rows:
            row.trajectory.seal(reason or StopReason.WALL_CLOCK)
        outcome.interaction_s = user.seconds if user is not None else 0.0
        outcome.place_s = session.place_s
        outcome.outages = [*session.outages, *(user.outages if user is not None else ())]
        self._compare(outcome, shown)
        if user_rows is not None:
            user_rows.finish()
        _finish_rows(outcome)
        return outcome

    async def _prompt(
        self, request: Request, outcome: Outcome, opening: CheckedReply | None = None, is_whole: bool = True
    ) -> tuple[ToolSession, Sequence[dict[str, Any]]]:
        """Write the prompt, with the interaction's first message as its last one.

        Args:
            request: The request.
            outcome: Gets the prompt.
            opening: The interaction's first message; None: it has none.
            is_whole: Whether the model is shown this prompt. Else the interaction failed before its first
                message, and the conversation is invalid: a prompt without it need not be one that a template takes.

        Returns:
            The tools of the conversation, not created yet, and their schemas as the model is shown them.

        Raises:
            ConfigError: The template cannot render the messages, or does not show their texts.
        """
        codec, messages = self._codec, list(request.messages)
        if opening is not None:
            outcome.opening, outcome.state = opening, opening.state
            messages.append(await self._user_message(opening))
        if not is_whole and messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": ""})
        try:
            outcome.messages = await codec.render(codec.trusted, messages)
        except MessageError as error:
            raise error.at(request.row) from None
        outcome.asked = len(outcome.messages)
        outcome.images[:] = images_of(outcome.messages)
        session = self._make_tools(
            request.request_id,
            request.tools,
            request.tools_kwargs,
            self._gates,
            self._limits.max_parallel_calls,
            self._limits.max_tool_calls,
            outcome.messages,
        )
        shown = await codec.render(codec.trusted_schemas, session.schemas)
        # An engine that reads the messages themselves does not depend on the template.
        check = (
            RequiredPart.NOTHING if not is_whole or getattr(self._engine, "reads_messages", False) else RequiredPart.ALL
        )
        try:
            outcome.trajectory.append_prompt(await codec.render(codec.initial, outcome.messages, shown, check))
        except MessageError as error:
            raise error.at(request.row, len(messages) - len(outcome.messages)) from None
        if outcome.trajectory.prompt_length > self._limits.prompt_length:
            outcome.error = (
                f"the prompt has {outcome.trajectory.prompt_length} tokens with its tools' schemas, and may have "
                f"{self._limits.prompt_length}; raise the prompt length, or drop the row (`verl-multiturn validate` "
                "lists such rows)"
            )
            logger.warning("request %s is not rolled out: %s", request.request_id, outcome.error)
        return session, shown

    def _failed(self, outcome: Outcome, error: str) -> StopReason:
        outcome.error = error
        logger.error("request %s: %s", outcome.request_id, error)
        return StopReason.ENVIRONMENT_ERROR

    def _compare(self, outcome: Outcome, schemas: Sequence[dict[str, Any]]) -> None:
        trajectory = outcome.trajectory
        said = sum(message["role"] == "assistant" for message in outcome.messages[outcome.asked :])
        if self._check is None or not outcome.valid or said < trajectory.turns or len(outcome.rows) > 1:
            # The engine or the clock cut a turn off: it was not read, so there is no message to render. Or there are
            # several rows: the template itself rendered the beginning of each.
            return
        origin = Source.SAMPLED  # looked up once: there is one for each token
        sampled = [source is origin for source in trajectory.sources]
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
        self,
        request: Request,
        outcome: Outcome,
        session: ToolSession,
        user: InteractionSession | None,
        shown: Sequence[dict[str, Any]],
    ) -> StopReason:
        """Run turn after turn, and return why the conversation ended.

        `shown` holds the tools' schemas as the model is shown them; those that the interaction shows later come to it.
        """
        limits, schemas = self._limits, session.schemas
        malformed_in_a_row = 0
        while True:
            if session.lost:
                raise OutageEndError(session.lost)
            try:
                turn, cut = await self._assistant_turn(request, outcome, schemas)
            except EngineError as error:
                return self._engine_failed(outcome, error)
            unreadable = bool(turn.calls) and all(isinstance(call, MalformedCall) for call in turn.calls)
            malformed_in_a_row = malformed_in_a_row + 1 if unreadable else 0
            progress = ConversationProgress(
                # A full row ends a conversation only where no other row can follow.
                response_tokens=outcome.trajectory.response_length if self._context.mode == "append" else 0,
                assistant_turns=_answers(outcome),
                user_turns=outcome.user_turns,
                cut=cut,
                calls=len(turn.calls),
                told_calls_are_used_up=session.calls_used_up,
                malformed_in_a_row=malformed_in_a_row,
                has_interaction=user is not None,
            )
            reason, last = limits.after_assistant_turn(progress), outcome.assistant_turns[-1]
            if cut and reason is not None:
                return reason
            if user is not None and not turn.calls:
                answer = await self._reply(request, outcome, user, session, reason)
            else:
                answer = await self._tools_answer(turn, outcome, session, reason)
            if isinstance(answer, StopReason):
                return answer
            added, source = answer
            if (said := last.reply) is not None and said.shows:
                schemas = session.schemas
                shown = await self._codec.render(self._codec.trusted_schemas, schemas)
            try:
                reason = await self._writer.write(
                    outcome, added, source, shown, partial(self._summarise, request, outcome)
                )
            except EngineError as error:
                return self._engine_failed(outcome, error)
            if reason is not None:
                return reason
            outcome.user_turns += 1

    def _engine_failed(self, outcome: Outcome, error: EngineError) -> StopReason:
        outcome.error = message_of(error)
        if not isinstance(error, ScriptEndedError):
            logger.error("request %s: the engine failed: %s", outcome.request_id, outcome.error)
        return StopReason.ENGINE_ERROR

    async def _summarise(self, request: Request, outcome: Outcome, tokens: int) -> str:
        """Sample a summary of at most `tokens` tokens, and return its text."""
        generation = await self._sample(request, outcome, tokens, (), summary=True)
        return (await self._read(generation, outcome, ())).content

    async def _reply(
        self,
        request: Request,
        outcome: Outcome,
        user: InteractionSession,
        session: ToolSession,
        reason: StopReason | None,
    ) -> StopReason | tuple[list[Message], Source]:
        """Let the interaction answer the last turn. Return its message; or why the conversation ends.

        `reason` names the limit that ends the conversation after the answer; None if none does.
        """
        outcome.doing, last = "interaction", outcome.assistant_turns[-1]
        said = await user.reply(outcome.messages)
        if unknown := [name for name in said.shows if name not in request.tools]:
            raise InteractionContractError(
                f"interaction {user.name!r}: reply shows the tool {unknown[0]!r}, which the row does not have; its "
                f"tools are {sorted(request.tools)}"
            )
        last.reply, outcome.state = said, said.state
        if said.done or said.truncated:
            return StopReason.ENVIRONMENT_TRUNCATED if said.truncated else StopReason.ENVIRONMENT_DONE
        if reason is not None:
            return reason
        new = session.show(said.shows)
        message = await self._user_message(said, await self._codec.render(self._codec.announcement, new) if new else "")
        return await self._codec.render(self._codec.trusted, [message]), Source.OBSERVATION

    async def _tools_answer(
        self, turn: AssistantTurn, outcome: Outcome, session: ToolSession, reason: StopReason | None
    ) -> StopReason | tuple[list[Message], Source]:
        """Execute the calls of the last turn. Return the tools' messages; or why the conversation ends.

        `reason` is as for `_reply`.
        """
        # A limit does not stop a call that ends the conversation: with it the model hands in its answer.
        if reason is not None and not session.ends(turn.calls):
            return reason
        outcome.doing, started, last = "tools", time.perf_counter(), outcome.assistant_turns[-1]
        try:
            results = last.calls = await session.execute(turn.calls)
        finally:
            outcome.tools_s += time.perf_counter() - started
        if session.lost:
            raise OutageEndError(session.lost)
        if session.ended:
            return StopReason.FINISHED
        if reason is not None:
            return reason
        said = [await self._tool_message(result) for result in results[:-1]]
        said.append(await self._tool_message(results[-1], self._limits.reminder(_answers(outcome))))
        added = await self._codec.render(self._codec.trusted, said)
        for result, message, trusted in zip(results, said, added, strict=True):
            result.altered |= message["content"] != trusted["content"]
        answered = any(result.status in EXECUTED for result in results)
        return added, Source.OBSERVATION if answered else Source.INJECTED

    async def _assistant_turn(
        self, request: Request, outcome: Outcome, schemas: Sequence[dict[str, Any]]
    ) -> tuple[AssistantTurn, Literal["response", "turn"] | None]:
        """Sample a turn and read it.

        Returns:
            The turn, and the budget that cut it short; None if the turn ended by itself.
        """
        left = self._limits.response_length - outcome.trajectory.response_length
        budget = self._limits.turn_budget(outcome.trajectory.response_length)
        generation = await self._sample(request, outcome, budget, schemas)
        turn = await self._read(generation, outcome, schemas)
        outcome.messages.append(assistant_message(turn))
        if generation.finish != "length":
            return turn, None
        return turn, "turn" if budget < left else "response"

    async def _sample(
        self,
        request: Request,
        outcome: Outcome,
        budget: int,
        schemas: Sequence[dict[str, Any]],
        summary: bool = False,
    ) -> Generation:
        """Sample a turn of at most `budget` tokens into the open row."""
        trajectory = outcome.trajectory
        outcome.doing, started = "generate", time.perf_counter()
        sampling, images, messages = request.sampling, outcome.images, outcome.messages
        role = ASSISTANT if outcome.trained else None
        ask = Ask(request.request_id, trajectory.ids, sampling, budget, images, messages, schemas, role)
        known, before = _known(outcome), outcome.assistant_turns
        try:
            with during("generation", turn=len(outcome.turns)) as span:
                sampled = await sample(self._engine, ask)
                number = span.turn = len(outcome.turns)  # an interaction may have spoken meanwhile
        finally:
            seconds = time.perf_counter() - started
            outcome.generate_s += seconds
        turn = Turn(
            number,
            parent=before[-1].number if before else None,
            role=role,
            place=len(outcome.rows) - 1,
            start=trajectory.response_length,
            end=trajectory.response_length,
            summary=summary,
            seconds=seconds,
            finish=sampled.generation.finish,
            cached=sampled.generation.cached,
        )
        if not summary:  # the turn after a summary acts in the state that came before it
            turn.state, outcome.state = outcome.state, None
        outcome.turns.append(turn)
        if sampled.fault:  # also of a cancelled generation, whose tokens would be kept
            raise EngineError(sampled.fault)
        made = sampled.generation
        outcome.cache.add(ask, made, known)
        trajectory.append_sampled(made.ids, made.logprobs, made.versions)
        turn.end = trajectory.response_length
        return sampled.whole()

    async def _read(self, generation: Generation, outcome: Outcome, schemas: Sequence[dict[str, Any]]) -> AssistantTurn:
        """Read the turn that was sampled last."""
        trajectory = outcome.trajectory
        start = len(trajectory) - len(generation.ids)
        before = trajectory.ids[max(0, start - HEADER) : start]
        turn = outcome.turns[-1]
        turn.said = await self._parser.parse(generation.ids, schemas, turn.number, before)
        return turn.said

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

    async def _user_message(self, reply: CheckedReply, announced: str = "") -> Message:
        """Return the message of a reply, with the schemas that it shows below its text."""
        text = self._codec.harmless(reply.text)
        if self._limits.user_turn_length is not None:
            side = self._limits.tool_response_truncate_side
            text, _ = self._codec.clip(text, self._limits.user_turn_length, side)
        text = "\n\n".join(filter(None, (text, announced)))
        read = self._read_images if self._codec.vision is not None else None
        return {"role": "user", "content": await tool_content("", text, reply.images, read)}


def _answers(outcome: Outcome) -> int:
    """Return the number of turns that were not summaries."""
    return sum(not turn.summary for turn in outcome.assistant_turns)


def _known(outcome: Outcome) -> int:
    """Return how many ids of the open row the engine was given or has sampled before; of the last turn all but one."""
    turns = outcome.assistant_turns
    if not turns:
        return 0
    last, ids = turns[-1], outcome.trajectory.ids
    if last.place == len(outcome.rows) - 1:
        return outcome.trajectory.prompt_length + last.end - 1
    return common_length(outcome.rows[-2].trajectory.ids, ids)


def _finish_rows(outcome: Outcome) -> None:
    """Take out a last row without a sampled token, unless it is the only one, and count the turns after each."""
    if len(outcome.rows) > 1 and not any(outcome.trajectory.mask):
        outcome.rows.pop()
        for turn in outcome.turns:
            if turn.place == len(outcome.rows):
                turn.place = "invalid"
    later: Counter[int | str] = Counter()
    for turn in reversed(outcome.turns):
        if turn.sampled:
            turn.after = later[turn.place]
            later[turn.place] += 1
