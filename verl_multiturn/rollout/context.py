"""`ContextWriter`: writes messages of tools and users into the row that is open or at the beginning of a new one.

A row is a stretch of a conversation in which ids were only appended; it is one row of the training batch. By mode:

    append      prompt turn obs turn obs turn                    one row
    window      prompt turn | prompt' turn | prompt'' turn       a row for each turn; its prompt holds the last steps
    overflow    prompt turn obs turn | prompt' turn obs turn     a new row when an observation does not fit any more

A step is an assistant's turn with the answers to it. The prompt of a later row holds the request's messages and the
last steps, rendered anew. In `overflow` the model may be prompted for a summary, which then is behind the request's
last message. Where there is none, or one without words, the summary before stays.

Invariants:
- each sampled token is in exactly one row;
- a new row begins only where the model reads something new, never within a turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.chat.images import images_of
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import ConversationRow, Outcome
from verl_multiturn.rollout.trajectory import Source, Trajectory

Schemas = Sequence[dict[str, Any]]
SUMMARY = "Summary of the conversation so far:\n"
"""Text before a summary, in the prompt of the row that begins with it."""


@dataclass(frozen=True)
class Context:
    """Settings for which part of a growing conversation the model is shown."""

    mode: Literal["append", "window", "overflow"] = "append"
    turns: int = 1
    """The most steps in the prompt of a later row."""
    summary_prompt: str | None = None
    """Text that asks the model for a summary before a row that overflows ends; None: the window alone."""
    summary_length: int = 256
    """The most tokens of a summary."""


class ContextWriter:
    """A writer of observations, the same for every request.

    Args:
        codec: Renders messages to token ids.
        limits: Limits of a row.
        context: The form of the context that the model is shown.
    """

    def __init__(self, codec: ChatCodec, limits: Limits, context: Context) -> None:
        self._codec = codec
        self._limits = limits
        self._context = context
        self._reserve: int | None = None

    async def write(
        self,
        outcome: Outcome,
        added: list[Message],
        source: Source,
        shown: Schemas,
        summarise: Callable[[int], Awaitable[str]],
    ) -> StopReason | None:
        """Show the model the answers to its last turn. Return why the conversation ends; None if it goes on.

        Args:
            outcome: The conversation.
            added: Messages of tools or a user, as `trusted` returns them.
            source: Source of their tokens.
            shown: The tools' schemas as the model is shown them.
            summarise: Samples a summary of at most the given number of tokens, and returns its text.
        """
        mode, messages = self._context.mode, outcome.messages
        if mode == "window":
            messages.extend(added)
            return await self._begin(outcome, shown)
        reserve = await self._reserved(shown) if mode == "overflow" else 0
        if await self._append(outcome, added, source, shown, reserve):
            messages.extend(added)
            return None
        if mode == "append":
            return StopReason.RESPONSE_LENGTH
        if reserve and (summary := await self._summary(outcome, added, source, shown, summarise)).strip():
            outcome.summary = summary
        messages.extend(added)
        return await self._begin(outcome, shown)

    async def _append(
        self, outcome: Outcome, added: list[Message], source: Source, shown: Schemas, reserve: int
    ) -> bool:
        """Append messages to the open row; return False if they do not fit with `reserve` further tokens."""
        trajectory, codec = outcome.trajectory, self._codec
        increment = await codec.render(codec.observation, outcome.messages, added, trajectory.ids, shown)
        if not self._limits.fits_observation(trajectory.response_length, len(increment) + reserve):
            return False
        outcome.images.extend(images_of(added))
        trajectory.append_context(increment.separator, Source.TEMPLATE)
        trajectory.append_context(increment.observation, source)
        return True

    async def _reserved(self, shown: Schemas) -> int:
        """Return how many tokens a summary and the question for it take; 0 without summaries."""
        context, codec = self._context, self._codec
        if context.summary_prompt is None:
            return 0
        if self._reserve is None:
            asked = await codec.render(codec.trusted, [{"role": "user", "content": context.summary_prompt}])
            before: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
            question = await codec.render(codec.observation, before, asked, [0], shown)
            self._reserve = len(question) + context.summary_length
        return self._reserve

    async def _summary(
        self,
        outcome: Outcome,
        added: list[Message],
        source: Source,
        shown: Schemas,
        summarise: Callable[[int], Awaitable[str]],
    ) -> str:
        """Show the model the new messages with the question for a summary, and return it; "" if they do not fit."""
        asked = str(self._context.summary_prompt)
        *before, last = added
        if last["role"] == "user" and isinstance(last["content"], str):
            # Templates take no two user messages in a row.
            question = [*before, {**last, "content": f"{last['content']}\n\n{asked}"}]
        else:
            question = [*added, {"role": "user", "content": asked}]
        question = await self._codec.render(self._codec.trusted, question)
        if not await self._append(outcome, question, source, shown, 0):
            return ""
        left = self._limits.response_length - outcome.trajectory.response_length
        return await summarise(min(self._context.summary_length, left))

    async def _begin(self, outcome: Outcome, shown: Schemas) -> StopReason | None:
        """Begin a row with as many of the last steps as are allowed and fit into a prompt, at least one."""
        codec, trajectory = self._codec, Trajectory()
        for turns in range(self._context.turns, 0, -1):
            chosen = window(outcome.messages, outcome.asked, turns)
            messages = await codec.render(codec.trusted, with_summary(chosen, outcome.asked, outcome.summary))
            try:
                ids = await codec.render(codec.rendered, messages, shown)
            except ConfigError:
                # The template can render the others' messages, so it refuses the model's words.
                await codec.render(codec.rendered, [_harmless(message) for message in messages], shown)
                return StopReason.MALFORMED_CALLS
            if len(ids) <= self._limits.prompt_length:
                trajectory.append_prompt(ids)
                outcome.rows.append(ConversationRow(trajectory, images_of(messages)))
                return None
        return StopReason.RESPONSE_LENGTH


def window(messages: Sequence[Message], asked: int, turns: int) -> list[Message]:
    """Return the first `asked` messages, and those of the last steps.

    Args:
        messages: A conversation.
        asked: How many of the messages are the request's own.
        turns: How many steps are kept, at most.
    """
    begins = [index for index in range(asked, len(messages)) if messages[index]["role"] == "assistant"]
    start = begins[-turns] if len(begins) >= turns else asked
    return [*messages[:asked], *messages[start:]]


def with_summary(messages: Sequence[Message], asked: int, summary: str | None) -> list[Message]:
    """Return messages with a summary at the end of the request's last one; unchanged without a summary."""
    if summary is None:
        return list(messages)
    text, last = SUMMARY + summary, messages[asked - 1]
    content = last["content"]
    joined = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[: asked - 1], {**last, "content": joined}, *messages[asked:]]


def _harmless(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    calls = [{**call, "function": {**call["function"], "arguments": {}}} for call in message.get("tool_calls", [])]
    return {"role": "assistant", "content": "x", **({"tool_calls": calls} if calls else {})}
