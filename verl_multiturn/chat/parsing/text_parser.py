"""The base of the parsers that read a turn as text, from mark to mark.

gpt-oss is read from token ids instead, in `chat.parsing.harmony`. The formats themselves are in `chat.parsing.formats`.

Invariants of all formats:
- a tool gets an argument exactly as the model wrote it, character by character, or the call is malformed;
- reasoning and calls are found in one pass, from left to right: a call inside a reasoning section is not executed, and
  the mark of such a section inside a call is text of its arguments;
- no call that cannot be read is dropped: it becomes a `MalformedCall`, and the model is informed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.chat.parsing.call_json import NamedCall, UnreadableCallError
from verl_multiturn.chat.parsing.reasoning import ReasoningFinder
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ParserTokenizer, ToolCall, turn_text


class NoCallError(Exception):
    """The text looked like the beginning of a call, but is text of an answer."""


@dataclass(frozen=True)
class _TurnPiece:
    """A part of a turn: reasoning, calls, a call that cannot be read, or text."""

    text: str
    thought: bool = False
    calls: Sequence[NamedCall] = ()
    problem: str = ""


class TextParser(ABC):
    """The base of parsers that search a turn's text for the marks of calls and of reasoning.

    One rule is behind the others: nothing is executed that lies in the middle of something unclear.
    - A call that cannot be read goes on to the mark that closes it. It goes on to the end of the turn where that mark
      is missing, or where another call begins before the mark.
    - If a tag after a call closes something that no call opened, nothing of the turn is executed from the first call
      on. An argument that held such a tag was cut there, and the rest of the argument may look like text, like
      reasoning, or like another call. So a later call that is closed and cannot be read counts as such a tag, in a
      format with arguments between tags. The mark that closed a call may be repeated directly after it.
    - Before the first call, a tag alone is text. Only the end of a call without its beginning is unclear
      (`}</tool_call>`, `</parameter></function>`).

    Args:
        tokenizer: Decodes the turn.
        end_ids: Token ids that end a turn. They are removed from its text.
        marks: Pairs of texts that open and close a reasoning section.
        begun: Regular expression for how a call, or a list of calls, begins.
        close: Text that ends a call; "" where the format has no such mark.
        closing: Regular expression for every tag that ends a call or a part of one, in a format that puts arguments
            between tags as they are; "" in formats whose arguments can hold any text.
    """

    def __init__(
        self,
        tokenizer: ParserTokenizer,
        end_ids: Sequence[int],
        marks: Sequence[tuple[str, str]],
        begun: str,
        close: str,
        closing: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._reasoning = ReasoningFinder(marks)
        self._begun = re.compile(begun)
        self._next = re.compile(f"{self._reasoning.openings}|(?P<call>{begun})")
        self._close = close
        self._ends_call = re.compile(re.escape(close) if close else r"(?!)")
        self._in_tags = bool(closing)
        self._closing = re.compile(closing) if closing else self._ends_call
        # The end of a call without its beginning. A tag alone does not match: a text may speak of it.
        before = rf"(?:[\]}}](?:\s*```)?|{closing or r'(?!)'})\s*"
        self._ends_part_of_one = re.compile(f"{before}(?P<tag>{self._closing.pattern})")
        self._ends_one = re.compile(f"{before}(?P<tag>{self._ends_call.pattern})")
        self._closed_twice = re.compile(rf"\s*{self._ends_call.pattern}")

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        """Read a turn, as `CallParser.parse` describes."""
        opened = self._reasoning.opened_by(self._tokenizer.decode(list(before)))
        pieces = self._pieces(turn_text(self._tokenizer, ids, self._end_ids), opened, schemas)
        pieces = self._without_strays(pieces)
        calls: list[ToolCall | MalformedCall] = []
        for piece in pieces:
            calls += [ToolCall(*call, f"call_{turn}_{index}") for index, call in enumerate(piece.calls, len(calls))]
            if piece.problem:
                calls.append(MalformedCall(piece.text, piece.problem, f"call_{turn}_{len(calls)}"))
        content = "".join(piece.text for piece in pieces if not (piece.calls or piece.problem))
        return AssistantTurn(content.strip(), calls)

    def _pieces(self, text: str, opened: str | None, schemas: Sequence[dict[str, Any]]) -> list[_TurnPiece]:
        """Split a turn into pieces, in their order."""
        pieces: list[_TurnPiece] = []
        if opened:
            end = self._reasoning.end(text, opened, 0)
            pieces.append(_TurnPiece(opened + text[:end], thought=True))
            text = text[end:]
        position, blank = 0, True
        while found := self._next.search(text, position):
            start = found.start()
            before = text[position:start]
            pieces.append(_TurnPiece(before))
            blank = blank and not before.strip()
            if found["call"] is None:
                position = self._reasoning.end(text, found[0], found.end())
                pieces.append(_TurnPiece(text[start:position], thought=True))
                if blank:  # a call after the reasoning is at the turn's beginning, where some formats expect it
                    text, position = text[position:], 0
                continue
            blank = False
            try:
                calls, position = self._call(text, found, schemas)
                # The same mark again is harmless: after a call that was cut inside an argument, the argument's own end
                # would be between the two marks.
                if again := self._closed_twice.match(text, position):
                    position = again.end()
                pieces.append(_TurnPiece(text[start:position], calls=calls))
            except NoCallError:
                position = max(found.end(), start + 1)
                pieces.append(_TurnPiece(text[start:position]))
            except UnreadableCallError as error:
                position = self._unread_to(text, found.end())
                pieces.append(_TurnPiece(text[start:position], problem=str(error)[:300]))
        pieces.append(_TurnPiece(text[position:]))
        return pieces

    def _unread_to(self, text: str, position: int) -> int:
        """Return the index where a call ends that cannot be read, from an index inside the call."""
        closed = text.find(self._close, position) if self._close else -1
        if closed < 0 or self._begun.search(text, position, closed):
            return len(text)
        return closed + len(self._close)

    def _without_strays(self, pieces: list[_TurnPiece]) -> list[_TurnPiece]:
        """Return the pieces, from the first call on as one malformed call if a tag has no opening one.

        Pieces of reasoning stay apart.
        """
        called = next((index for index, piece in enumerate(pieces) if piece.calls or piece.problem), len(pieces))
        for index, piece in enumerate(pieces):
            stray = self._stray(piece) if index > called else self._end_alone(piece, called < len(pieces))
            if stray:
                start = min(called, index)
                first = "from the first call on " if start < index or pieces[start].calls else ""
                problem = (
                    f"there is a {stray} that closes nothing, so nothing {first}was run; begin each "
                    "call with its own tag, and write no tags of a call into its arguments"
                )
                unclear = "".join(piece.text for piece in pieces[start:] if not piece.thought)
                thoughts = [piece for piece in pieces[start:] if piece.thought]
                return [*pieces[:start], *thoughts, _TurnPiece(unclear, problem=problem)]
        return pieces

    def _end_alone(self, piece: _TurnPiece, calls: bool) -> str:
        """Return the tag in a piece before the first call that ends a call without a beginning; "" without one.

        In a turn without calls, only a call's own end counts, and not the end of a part of one.
        """
        if piece.calls or piece.thought or piece.problem:
            return ""
        found = (self._ends_part_of_one if calls else self._ends_one).search(piece.text)
        return found["tag"] if found else ""

    def _stray(self, piece: _TurnPiece) -> str:
        """Return the first tag in a piece after the first call that closes nothing; "" without one.

        Reasoning is searched, too: the rest of an argument that was cut may look like it. In a JSON format, reasoning
        may quote a whole call.
        """
        if piece.calls:
            return ""
        if piece.problem:  # only if the call is closed; a call without its end is the turn's last piece
            return self._close if self._in_tags and self._close in piece.text else ""
        found = self._closing.search(piece.text)
        if found is None:
            return ""
        quoted = piece.thought and not self._in_tags and self._begun.search(piece.text, 0, found.start())
        return "" if quoted else found[0]

    @abstractmethod
    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        """Read the call, or the list of calls, that begins at `found`.

        Returns:
            The calls, and the index where the text goes on.

        Raises:
            UnreadableCallError: The call cannot be read.
            NoCallError: The text is not meant as a call.
        """
