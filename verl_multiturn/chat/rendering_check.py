"""`RenderingCheck`: compare a conversation that was built turn by turn with the template's rendering of the whole.

Sampled tokens are never rendered again, so both can differ where a template rewrites an earlier turn. Each kind
of such a difference has a name here. A difference that no such rule explains is `CONTEXT` or `ASSISTANT`; it is a fault
of a template, of a builder or of this package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.encoding import SeamEncoder
from verl_multiturn.chat.images import Vision
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS, ReasoningFinder


class RenderingDifference(StrEnum):
    """The kinds of difference between a conversation and the template's rendering of its messages."""

    TOKENS = "tokens"
    """Other tokens for the same text: the model may split a text in its own way."""
    WHITESPACE = "whitespace"
    """White space only: the model wrote it, and the template strips it."""
    REASONING = "reasoning"
    """The template leaves out earlier reasoning, or writes an empty section where there was none."""
    CALLS = "calls"
    """The template writes calls in another way than the model (spaces, order of keys)."""
    END = "end"
    """A turn ended with another end token than the template writes, or was cut short."""
    CONTEXT = "context"
    """Text of a tool, a user or the template differs. Unexplained."""
    ASSISTANT = "assistant"
    """Text of the assistant differs. Unexplained."""
    UNRENDERABLE = "unrenderable"
    """The template refuses the conversation as a whole (for example several calls in a turn), but not turn by turn."""


UNEXPLAINED = frozenset({RenderingDifference.CONTEXT, RenderingDifference.ASSISTANT})
"""Differences that point to a fault of a template, of a builder or of this package."""


class TemplateOwner(Protocol):
    """The part of a tokenizer, or of the processor of a model that takes images, that renders a chat template."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Return the template's text for a conversation."""
        ...


class TemplateTokenizer(TemplateOwner, Protocol):
    """The part of a Hugging Face tokenizer that the check uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...


class RenderingCheck:
    """A check that compares conversations with the template's rendering of them.

    For a model that takes images, no image is processed: the template's one placeholder for each image is compared with
    the group of placeholders in the conversation.

    Args:
        tokenizer: The model's tokenizer.
        template_kwargs: Arguments of the template, the same as for the codec.
        generation_prompt: Text that the template writes at the end of a prompt, up to where the model begins.
        end_ids: Token ids that end a turn.
        ignored: Differences that are not reported.
        processor: Processor of a model that takes images, which holds the template; None for other models.
        vision: Placeholder tokens of a model that takes images; None for other models.
        seams: The encoder of the tokenizer, if it is there already: it knows the ids of prompts.
    """

    def __init__(
        self,
        tokenizer: TemplateTokenizer,
        template_kwargs: Mapping[str, Any],
        generation_prompt: str,
        end_ids: Sequence[int],
        ignored: Collection[RenderingDifference] = (),
        processor: TemplateOwner | None = None,
        vision: Vision | None = None,
        seams: SeamEncoder | None = None,
    ) -> None:
        self._seams = seams or SeamEncoder(tokenizer)
        self._template = processor or tokenizer
        self._vision = vision
        self._ignored = frozenset(ignored)
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._prompt = generation_prompt
        self._ends = [tokenizer.decode([index]) for index in end_ids]
        # The prompt without a mark that opens the reasoning: a template may leave the mark out of earlier turns.
        self.header = generation_prompt
        for start, _ in REASONING_MARKS:
            self.header = self.header.partition(start)[0]
        self._reasoning = ReasoningFinder(REASONING_MARKS)

    def whole(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> str:
        """Return the template's text for a whole conversation. Any error that the template raises is passed on."""
        try:
            return self._apply(messages, schemas)
        except TypeError:
            # DeepSeek's templates insert the arguments unchanged, so these must be text.
            return self._apply([_with_text_arguments(message) for message in messages], schemas)

    def _apply(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> str:
        text: str = self._template.apply_chat_template(
            list(messages),
            tools=list(schemas) or None,
            add_generation_prompt=False,
            tokenize=False,
            **self._kwargs,
        )
        return text

    def differences(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]],
        ids: Sequence[int],
        sampled: Sequence[bool],
    ) -> list[RenderingDifference]:
        """Return the kinds of difference, each once, in the order of the enum.

        The text after the last sampled token is not compared.

        Args:
            messages: All messages of the conversation.
            schemas: Schemas of the tools, as the model was shown them.
            ids: Token ids of the conversation, `(tokens,)`.
            sampled: Whether the model sampled each token, `(tokens,)`.
        """
        found = self._differences(messages, schemas, ids, sampled) - self._ignored
        return [difference for difference in RenderingDifference if difference in found]

    def _differences(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]],
        ids: Sequence[int],
        sampled: Sequence[bool],
    ) -> set[RenderingDifference]:
        try:
            text = self.whole(messages, schemas)
        except Exception:  # a template is other people's code and may raise anything
            return {RenderingDifference.UNRENDERABLE}
        if self._vision is not None:
            ids, sampled = self._vision.collapse(ids, sampled)
        text = text.encode("utf-8", "replace").decode()
        whole_ids = self._seams.from_seam(text, text.find(self.header))
        end = next((i for i in range(len(ids), 0, -1) if sampled[i - 1]), len(ids))
        if whole_ids[:end] == list(ids[:end]):
            return set()
        found = self._compare(self._tokenizer.decode(whole_ids), self._segments(ids[:end], sampled), messages)
        return found or {
            RenderingDifference.TOKENS
            if self._first_is_sampled(whole_ids, ids[:end], sampled)
            else RenderingDifference.CONTEXT
        }

    @staticmethod
    def _first_is_sampled(whole_ids: Sequence[int], ids: Sequence[int], sampled: Sequence[bool]) -> bool:
        """Return whether the first token that differs was sampled, or is right before a sampled one."""
        first = next((i for i, (one, other) in enumerate(zip(whole_ids, ids, strict=False)) if one != other), len(ids))
        return any(sampled[first : first + 2])

    def _segments(self, ids: Sequence[int], sampled: Sequence[bool]) -> list[str]:
        """Return the texts of the conversation's pieces: context and sampled in turn, beginning with the prompt."""
        pieces: list[list[int]] = [[]]
        for index, token in enumerate(ids):
            if bool(sampled[index]) != (len(pieces) % 2 == 0):
                pieces.append([])
            pieces[-1].append(token)
        return [self._tokenizer.decode(piece) for piece in pieces]

    def _compare(self, whole: str, segments: Sequence[str], messages: Sequence[Message]) -> set[RenderingDifference]:
        """Return how the template's text differs from the conversation's pieces.

        Each piece of context is looked up in the template's text, in order. The text between two of them is a turn:

            segments   context 0 | said 0 | context 1 | said 1
            whole      ~~~~~~~~~ | turn 0 | ~~~~~~~~~ | turn 1

        A piece of context ends with the header of the next turn. The header is compared with the turn, since some
        templates write another one for a turn that is over.

        Args:
            whole: The template's text of the whole conversation.
            segments: The conversation's pieces, as `_segments` returns them.
            messages: All messages of the conversation.
        """
        found: set[RenderingDifference] = set()
        assistants = [message for message in messages if message["role"] == "assistant"]
        said = segments[1::2]
        assistants = assistants[len(assistants) - len(said) :]  # the prompt may hold earlier assistant messages
        position, header = 0, ""
        for turn in range(len(said)):
            context = self._without_header(segments[2 * turn])
            start = _find(whole, context, position)
            if start is None or (turn == 0 and start[0] > 0):
                return found | {RenderingDifference.CONTEXT}
            if turn:
                turn_text, more = self._split_end(whole[position : start[0]])
                # The template writes text between the turns that the conversation does not have. White space alone
                # is not a difference after a turn without an end token.
                if more.strip() or (more and self._strip_end(said[turn - 1])[1]):
                    found.add(RenderingDifference.CONTEXT)
                found |= self._compare_turn(turn_text, header + said[turn - 1], assistants[turn - 1])
            found |= start[2]
            position, header = start[1], segments[2 * turn][len(context) :]
        if said:
            found |= self._compare_turn(whole[position:], header + said[-1], assistants[-1])
        return found

    def _without_header(self, context: str) -> str:
        """Return a piece of context without the header of the assistant's turn at its end."""
        for prompt in (self._prompt, self.header):
            if prompt and context.endswith(prompt):
                return context[: len(context) - len(prompt)]
        return context

    def _compare_turn(self, written: str, expected: str, message: Message) -> set[RenderingDifference]:
        """Return how two texts of one turn differ, both with the assistant's header.

        Args:
            written: The template's text.
            expected: The header and the model's sampled text.
            message: The turn as a message.
        """
        if written == expected or written.rstrip() == expected.rstrip() == expected:
            return set()
        ended, ends = self._strip_end(expected)
        wrote, _ = self._strip_end(written)
        found = set() if ends else {RenderingDifference.END}
        if wrote == ended:
            return found or {RenderingDifference.END}
        if _bare(wrote) == _bare(ended):
            return found | {RenderingDifference.WHITESPACE}
        without = [_bare(self._reasoning.split(text)[1]) for text in (wrote, ended)]
        if without[0] == without[1]:
            return found | {RenderingDifference.REASONING}
        if message.get("tool_calls"):
            return found | {RenderingDifference.CALLS} | self._reasoning_lost(wrote, ended)
        # A turn that was cut inside its reasoning holds nothing else to compare.
        return found | ({RenderingDifference.ASSISTANT} if ends else set())

    def _reasoning_lost(self, wrote: str, ended: str) -> set[RenderingDifference]:
        inside = [_bare(self._reasoning.split(text)[0]) for text in (wrote, ended)]
        return set() if inside[0] == inside[1] else {RenderingDifference.REASONING}

    def _split_end(self, text: str) -> tuple[str, str]:
        """Split a text after the last end token in it. Without one, the first part is the whole text."""
        ends = [place + len(end) for end in self._ends if (place := text.rfind(end)) >= 0]
        return (text[: max(ends)], text[max(ends) :]) if ends else (text, "")

    def _strip_end(self, text: str) -> tuple[str, bool]:
        """Return the text without an end token at its end and the white space after it, and whether there was one."""
        for end in self._ends:
            head, mark, tail = text.rpartition(end)
            if mark and not tail.strip():
                return head, True
        return text, False


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _find(whole: str, piece: str, position: int) -> tuple[int, int, set[RenderingDifference]] | None:
    """Return where a piece of context is in the template's text; None when it is not there.

    Returns:
        Its beginning, its end, and `{WHITESPACE}` if only white space differs.
    """
    at = whole.find(piece, position)
    if at >= 0:
        return at, at + len(piece), set()
    places = [index for index in range(position, len(whole)) if not whole[index].isspace()]
    bare = _bare(piece)
    at = "".join(whole[index] for index in places).find(bare)
    if at < 0 or not bare:
        return None
    return places[at], places[at + len(bare) - 1] + 1, {RenderingDifference.WHITESPACE}
