"""From sampled ids to text and tool calls.

Here is what all formats share, and the best known of them: JSON between tags (Hermes, and with it Qwen and many more).
gpt-oss is in `chat.harmony`, the others in `chat.call_formats`. For all of them:
- what the model wrote as an argument is what the tool gets, character by character, or the call is malformed;
- reasoning and calls are found in one pass, from left to right: a call inside a reasoning section is not executed, and
  the mark of such a section inside a call is text of its arguments;
- no call that cannot be read vanishes: it is a `MalformedCall`, which the model is told about.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_multiturn.chat.call_json import NamedCall, UnreadableCallError, as_json, named_calls, read_json

# What opens and closes a reasoning section, by family. The first is also written as plain text by models that were
# only prompted to reason.
THINK = ("<think>", "</think>")
REASONING_MARKS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis", "<|end|><|start|>assistant"),
)


@dataclass(frozen=True)
class ToolCall:
    """One call the model made. `arguments` is the JSON text of an object, as the model wrote it."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class MalformedCall:
    """Text in the place of a call that is none, and why."""

    text: str
    problem: str
    id: str


@dataclass(frozen=True)
class AssistantTurn:
    """What one assistant turn says: text outside of calls, and the calls in their order."""

    content: str
    calls: list[ToolCall | MalformedCall] = field(default_factory=list)


class CallParser(Protocol):
    """Reads one assistant turn."""

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        """The turn's text and calls.

        Args:
            turn: its number, so that call ids are unique in a conversation.
            before: the last ids before the turn; they may open a reasoning section, in which it then begins.
        """
        ...


class Tokenizer(Protocol):
    """The little of a tokenizer that is used here."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str: ...


class Reasoning:
    """Where the reasoning of a turn lies.

    Args:
        marks: what opens and closes a section.
    """

    def __init__(self, marks: Sequence[tuple[str, str]] = (THINK,)) -> None:
        self._closes = dict(marks)
        self.openings = "|".join(re.escape(mark) for mark in sorted(self._closes, key=len, reverse=True))
        """Regular expression of what opens a section."""
        self._openings = re.compile(self.openings)

    def opened_by(self, before: str) -> str | None:
        """The mark of a section that the text before a turn ends with.

        One further back is the text of somebody else: of a prompt, or of a tool.
        """
        end = before.rstrip()
        return next((start for start in self._closes if end.endswith(start)), None)

    def end(self, text: str, mark: str, position: int) -> int:
        """Where the section that `mark` opened before `position` ends: after its closing mark, or with the text."""
        close = self._closes[mark]
        at = text.find(close, position)
        return len(text) if at < 0 else at + len(close)

    def after(self, text: str, opened: str | None = None) -> str:
        """A text after the reasoning that it begins with."""
        position = self.end(text, opened, 0) if opened else 0
        while (found := self._openings.search(text, position)) and not text[position : found.start()].strip():
            position = self.end(text, found[0], found.end())
        return text[position:]

    def split(self, text: str, opened: str | None = None) -> tuple[str, str]:
        """`(reasoning, rest)` of a text without calls, each in its order, the marks included, also the one that was
        `opened` before the turn."""
        end = self.end(text, opened, 0) if opened else 0
        inside, outside = [opened or "", text[:end]], []
        position = end
        while found := self._openings.search(text, position):
            end = self.end(text, found[0], found.end())
            outside.append(text[position : found.start()])
            inside.append(text[found.start() : end])
            position = end
        return "".join(inside), "".join([*outside, text[position:]])


class NoCallError(Exception):
    """What looked like the beginning of a call is text of an answer."""


@dataclass(frozen=True)
class _Piece:
    """A stretch of a turn: reasoning, calls, a call that cannot be read, or text."""

    text: str
    thought: bool = False
    calls: Sequence[NamedCall] = ()
    problem: str = ""


class TextParser(ABC):
    """Reads a turn's text from mark to mark.

    What cannot be read reaches to the mark that closes a call, and to the turn's end without one, or where another call
    begins before that mark: nothing is executed that lies in the middle of something unclear. For the same reason
    nothing of a turn is executed in which a tag after a call closes what no call opened: an argument that held such a
    tag was cut there, and what is left of it may look like text, like a thought, or like another call. The mark that
    closed the call, once more and at once, is none of these. Before the first call only the end of one is unclear
    (`}</tool_call>`, `</parameter></function>`); a tag alone is text.

    Args:
        tokenizer: decodes the turn.
        end_ids: ids that end a turn; they and what follows them are no text.
        marks: what opens and closes a reasoning section.
        begun: regular expression of how a call begins, or a list of calls.
        close: what ends a call; "" where a format has no such mark.
        closing: regular expression of every tag that ends a call or a part of one, where arguments stand between tags
            as they are; otherwise an argument can hold anything.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_ids: Sequence[int],
        marks: Sequence[tuple[str, str]],
        begun: str,
        close: str,
        closing: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._reasoning = Reasoning(marks)
        self._begun = re.compile(begun)
        self._next = re.compile(f"{self._reasoning.openings}|(?P<call>{begun})")
        self._close = close
        self._ends_call = re.compile(re.escape(close) if close else r"(?!)")
        self._in_tags = bool(closing)
        self._closing = re.compile(closing) if closing else self._ends_call
        # What a call ends with whose beginning is not there: a tag alone is text of whoever speaks of it.
        before = rf"(?:[\]}}](?:\s*```)?|{closing or r'(?!)'})\s*"
        self._ends_part_of_one = re.compile(f"{before}(?P<tag>{self._closing.pattern})")
        self._ends_one = re.compile(f"{before}(?P<tag>{self._ends_call.pattern})")
        self._closed_twice = re.compile(rf"\s*{self._ends_call.pattern}")

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
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

    def _pieces(self, text: str, opened: str | None, schemas: Sequence[dict[str, Any]]) -> list[_Piece]:
        """The turn in pieces, in their order."""
        pieces: list[_Piece] = []
        if opened:
            end = self._reasoning.end(text, opened, 0)
            pieces.append(_Piece(opened + text[:end], thought=True))
            text = text[end:]
        position, blank = 0, True
        while found := self._next.search(text, position):
            start = found.start()
            before = text[position:start]
            pieces.append(_Piece(before))
            blank = blank and not before.strip()
            if found["call"] is None:
                position = self._reasoning.end(text, found[0], found.end())
                pieces.append(_Piece(text[start:position], thought=True))
                if blank:  # a call after the reasoning is at the turn's beginning, where some formats expect it
                    text, position = text[position:], 0
                continue
            blank = False
            try:
                calls, position = self._call(text, found, schemas)
                # The end of an argument's call that was cut has the argument's own end before it.
                if again := self._closed_twice.match(text, position):
                    position = again.end()
                pieces.append(_Piece(text[start:position], calls=calls))
            except NoCallError:
                position = max(found.end(), start + 1)
                pieces.append(_Piece(text[start:position]))
            except UnreadableCallError as error:
                position = self._unread_to(text, found.end())
                pieces.append(_Piece(text[start:position], problem=str(error)[:300]))
        pieces.append(_Piece(text[position:]))
        return pieces

    def _unread_to(self, text: str, position: int) -> int:
        """Where a call ends that cannot be read, from `position` in it on."""
        closed = text.find(self._close, position) if self._close else -1
        if closed < 0 or self._begun.search(text, position, closed):
            return len(text)
        return closed + len(self._close)

    def _without_strays(self, pieces: list[_Piece]) -> list[_Piece]:
        """The pieces, those from the first call on as one malformed call where a tag closes what none opened."""
        called = next((index for index, piece in enumerate(pieces) if piece.calls or piece.problem), len(pieces))
        for index, piece in enumerate(pieces):
            stray = self._stray(piece) if index > called else self._end_alone(piece, called < len(pieces))
            if stray:
                start = min(called, index)
                problem = (
                    f"there is a {stray} that closes nothing, so nothing from the first call on was run; begin each "
                    "call with its own tag, and write no tags of a call into its arguments"
                )
                unclear = "".join(piece.text for piece in pieces[start:] if not piece.thought)
                thoughts = [piece for piece in pieces[start:] if piece.thought]
                return [*pieces[:start], *thoughts, _Piece(unclear, problem=problem)]
        return pieces

    def _end_alone(self, piece: _Piece, calls: bool) -> str:
        """The tag of a piece, before any call, that ends a call whose beginning is not there; "" without one.

        Args:
            calls: whether the turn has calls; in one without, only a call's own end is looked for.
        """
        if piece.calls or piece.thought or piece.problem:
            return ""
        found = (self._ends_part_of_one if calls else self._ends_one).search(piece.text)
        return found["tag"] if found else ""

    def _stray(self, piece: _Piece) -> str:
        """The first tag of a piece, after a call, that closes nothing; "" without one. What is left of an argument that
        was cut may look like a thought.
        """
        if piece.calls:
            return ""
        if piece.problem:  # one that is closed; one that was cut short is the turn's last
            return self._close if self._in_tags and self._close in piece.text else ""
        found = self._closing.search(piece.text)
        if found is None:
            return ""
        quoted = piece.thought and not self._in_tags and self._begun.search(piece.text, 0, found.start())
        return "" if quoted else found[0]

    @abstractmethod
    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        """The call that begins at `found`, or several where it is a list, and where the text goes on.

        Raises:
            UnreadableCallError: it is none.
            NoCallError: it is not meant as one.
        """


@dataclass(frozen=True)
class JsonForm:
    """A call in JSON: `{"name": …, "arguments": {…}}`, or the arguments alone after the name."""

    begun: str
    close: str
    header: str
    """Regular expression of what is before the JSON; the group `name` where the name is there."""
    end: str
    """Regular expression of what is after the JSON."""
    written: str
    """What the model is told."""


HERMES = JsonForm(
    begun="<tool_call>",
    close="</tool_call>",
    header=r"<tool_call>\s*",
    end=r"\s*</tool_call>",
    written='<tool_call>{"name": …, "arguments": {…}}</tool_call>',
)


class JsonParser(TextParser):
    """Calls in JSON."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_ids: Sequence[int],
        form: JsonForm = HERMES,
        marks: Sequence[tuple[str, str]] = (THINK,),
    ) -> None:
        super().__init__(tokenizer, end_ids, marks, form.begun, form.close)
        self._form = form
        self._header = re.compile(form.header)
        self._end = re.compile(form.end)

    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        if self._close and text.find(self._close, found.end()) < 0:
            raise UnreadableCallError(f"the call is not closed; end it with {self._close}")
        header = self._header.match(text, found.start())
        if header is None:
            raise UnreadableCallError(f"the call cannot be read; write it as {self._form.written}")
        value, position = self._value(text, header.end())
        end = self._end.match(text, position)
        if end is None:
            raise UnreadableCallError(f"the call's JSON is followed by something else; write {self._form.written}")
        if "name" in header.re.groupindex and header["name"]:
            return [(header["name"], as_json(value))], end.end()
        return named_calls(value), end.end()

    def _value(self, text: str, position: int) -> tuple[Any, int]:
        return read_json(text, position)


def turn_text(tokenizer: Tokenizer, ids: Sequence[int], end_ids: Collection[int]) -> str:
    """The text of a turn without the ids that end it."""
    kept = list(ids)
    while kept and kept[-1] in end_ids:
        kept.pop()
    return tokenizer.decode(kept, skip_special_tokens=False)
