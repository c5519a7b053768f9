"""The types of a parsed turn of the model, and the interface of a parser."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

HEADER = 16
"""How many tokens before a turn its parser sees: the assistant's header, which may open the reasoning."""


@dataclass(frozen=True)
class ToolCall:
    """One tool call that the model made."""

    name: str
    arguments: str
    """The JSON text of an object, as the model wrote it."""
    id: str
    """Id of the call, unique in a conversation: `call_<turn>_<number>`."""


@dataclass(frozen=True)
class MalformedCall:
    """A call that could not be read, with the reason."""

    text: str
    """The part of the turn's text that could not be read."""
    problem: str
    """The reason, in words for the model."""
    id: str


@dataclass(frozen=True)
class AssistantTurn:
    """The content of one assistant turn."""

    content: str
    """Text outside of calls; in text mode, all of the turn's text."""
    calls: Sequence[ToolCall | MalformedCall] = field(default_factory=list)
    """Calls in the order of the text, readable or not."""
    reasoning: str = ""
    """Text of the reasoning, where the format keeps it apart from the text (gpt-oss), and in a session of an agent;
    elsewhere `content` has it."""

    @property
    def readable(self) -> list[ToolCall]:
        """Return the calls that could be read."""
        return [call for call in self.calls if isinstance(call, ToolCall)]


class CallParser(Protocol):
    """A parser that reads one assistant turn."""

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        """Return the turn's text and calls.

        Args:
            ids: The turn's sampled ids.
            schemas: Schemas of the request's tools.
            turn: Number of the turn. It makes the ids of calls unique in a conversation.
            before: The last ids before the turn. They may open a reasoning section, in which the turn then begins.
        """
        ...


class ParserTokenizer(Protocol):
    """The part of a tokenizer that the parsers use."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...


def turn_text(tokenizer: ParserTokenizer, ids: Sequence[int], end_ids: Collection[int]) -> str:
    """Return the text of a turn without the end tokens at its end."""
    kept = list(ids)
    while kept and kept[-1] in end_ids:
        kept.pop()
    return tokenizer.decode(kept, skip_special_tokens=False)
