"""Parts of the rows that `benchmarks.rows` tries: a case, and a source of words that occur once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
RICH = ' "quoted" and \'single\', <b>a & b</b>, C:\\dir, {"k": [1, null]},\n\tline two:  Größe, 北京, नमस्ते, 🙂'


@dataclass(frozen=True)
class Case:
    """A data row, as its author wrote it."""

    role: str
    """Subject of the case: a role in its place, calls, answers, …"""
    form: str
    messages: list[Any]
    honest: bool = True
    """Whether an author may write such a row in good faith."""
    refused: bool = False
    """Whether the row has to be refused, whatever its prompt shows."""
    schemas: tuple[dict[str, Any], ...] = ()
    interaction: bool = False
    opening: str | None = None
    """First words of the row's interaction; None: it has none."""
    replies: bool = False
    """Whether they come in `reply` to the row's last message, and none in `start`."""
    stored: Any = None
    """The row's messages as a file of rows gives them back; None: as they were written."""
    columns: bool = False
    """Whether they have been in columns, in which each row has the keys of all rows."""

    @property
    def name(self) -> str:
        """Return the name of the case."""
        return f"{self.role}: {self.form}"


class Words:
    """A source of words that occur once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def mark(self) -> str:
        """Return a word."""
        return f"zq{next(self._numbers)}x"

    def text(self, rest: str = "") -> str:
        """Return a text of two words, with something between them."""
        return f"Say {self.mark()}{rest} and {self.mark()}."

    def call(self, arguments: Any, number: int = 0, name: str | None = None) -> dict[str, Any]:
        """Return a call of a tool, by default of one that has a word for its name."""
        function = {"name": name or f"tool_{self.mark()}", "arguments": arguments}
        return {"id": f"call0000{number}", "type": "function", "function": function}

    def calling(self, *arguments: Any, content: Any = "") -> Message:
        """Return an assistant's message with a call for each of the arguments."""
        calls = [self.call(each, number) for number, each in enumerate(arguments)]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def answer(self, content: Any = None, call: Any = None) -> Message:
        """Return a tool's answer, by default a text."""
        text = self.text() if content is None else content
        given = {"tool_call_id": call["id"], "name": call["function"]["name"]} if call else {}
        return {"role": "tool", "content": text, **given}

    def user(self) -> Message:
        """Return a user's message."""
        return {"role": "user", "content": self.text()}

    def said(self) -> Message:
        """Return an assistant's message."""
        return {"role": "assistant", "content": self.text()}

    def block(self, **more: Any) -> dict[str, Any]:
        """Return a block of text."""
        return {"type": "text", "text": self.text(), **more}


def dialogue(w: Words, arguments: Any) -> list[Message]:
    """Return a user's question, a call with these arguments, its answer and another question."""
    calling = w.calling(arguments)
    return [w.user(), calling, w.answer(call=calling["tool_calls"][0]), w.user()]
