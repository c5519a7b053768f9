"""Reading a generation, in the words of the protocols: text, reasoning, calls, and the text at which it stopped."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_multiturn.chat.parsing.call_json import object_of
from verl_multiturn.chat.parsing.reasoning import ReasoningFinder
from verl_multiturn.chat.parsing.turns import (
    HEADER,
    AssistantTurn,
    CallParser,
    MalformedCall,
    ParserTokenizer,
    ToolCall,
    turn_text,
)
from verl_multiturn.proxy.protocols.requests import ChatRequest

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


class TurnReader:
    """A reader of generations.

    Args:
        parser: Reads the calls.
        tokenizer: Decodes the ids.
        end_ids: Token ids that end a turn.
        marks: Pairs of texts that open and close a reasoning section.
    """

    def __init__(
        self, parser: CallParser, tokenizer: ParserTokenizer, end_ids: Sequence[int], marks: Sequence[tuple[str, str]]
    ) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._reasoning = ReasoningFinder(marks)
        self._marks = [mark for pair in marks for mark in pair]
        self._token_texts: dict[int, str] = {}

    async def read(
        self, sampled: Sequence[int], before: Sequence[int], request: ChatRequest
    ) -> tuple[AssistantTurn, str | None]:
        """Read a turn.

        A call that cannot be read, or that a client cannot send back, is text. So are all calls if the request has no
        tools or wants none read.

        Args:
            sampled: The turn's ids.
            before: All ids before them.
            request: The request for the turn.

        Returns:
            The turn, whose reasoning is apart from its text, and the text at which it stopped, which is in neither.
        """
        header = list(before[-HEADER:])
        raw = turn_text(self._tokenizer, sampled, self._end_ids)
        turn = await self._parser.parse(sampled, request.tools, 0, header)
        calls = turn.readable
        unread = [call.text for call in turn.calls if isinstance(call, MalformedCall)]
        opened = None
        if calls and request.tools and request.reads_calls and all(map(_is_readable, calls)):
            text = "\n".join(part for part in [turn.content, *unread] if part)
        elif turn.calls:
            text, calls = raw, []
            opened = self._reasoning.opened_by(self._tokenizer.decode(header))
        else:
            text = turn.content
        reasoning, content = self._reasoning.split(text, opened)
        if turn.reasoning and text is not raw:
            reasoning = turn.reasoning
        stop = _first_of(request.stop, self._tokenizer.decode(list(sampled)))
        if stop is None:
            return AssistantTurn(content.strip(), calls, self._unmarked(reasoning)), None
        # White space at the end is part of a text that was cut; a client puts the stop text right after it.
        shown = stop if stop in content else stop.strip()
        content, stopped, _ = content.lstrip().partition(shown or stop)
        reasoning = reasoning if stopped else reasoning.partition(stop)[0]
        return AssistantTurn(content, calls, self._unmarked(reasoning)), stop

    def _unmarked(self, reasoning: str) -> str:
        for mark in self._marks:
            reasoning = reasoning.replace(mark, "")
        return reasoning.strip()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with that of control tokens; a gateway looks there for text that it hides."""
        return self._tokenizer.decode(list(ids))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        known = self._token_texts
        return [
            known[each] if each in known else known.setdefault(each, self._tokenizer.decode([each])) for each in ids
        ]


def _is_readable(call: ToolCall) -> bool:
    """Return whether a client can read a call and send it back: with a name, and arguments as `object_of` has them."""
    try:
        call.name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which comes back as another character
        return False
    return bool(call.name) and object_of(call.arguments) is not None


def _first_of(stops: Sequence[str], text: str) -> str | None:
    """Return the stop text that comes first in a text, the longest of several; None without one."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop and stop in text]
    return min(found)[2] if found else None


@dataclass
class CallIds:
    """A maker of ids for the calls of one session: nine letters and digits, as the templates of Mistral want them."""

    _given: set[str] = field(default_factory=set)
    _random: random.Random = field(default_factory=random.SystemRandom)

    def named(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Return the calls with ids that no other call of the session has."""
        return [replace(call, id=self._new()) for call in calls]

    def _new(self) -> str:
        while (made := "".join(self._random.choices(_ID_LETTERS, k=_ID_LENGTH))) in self._given:
            pass
        self._given.add(made)
        return made


def as_message(content: str, calls: Sequence[ToolCall], reasoning: str) -> dict[str, Any]:
    """Return a turn as a message of a request."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message
