"""Calls written as JSON between marks, as Hermes, Qwen and many other models write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.chat.parsing.call_json import NamedCall, UnreadableCallError, as_json, named_calls, read_json
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.parsing.text_parser import TextParser
from verl_multiturn.chat.parsing.turns import ParserTokenizer


@dataclass(frozen=True)
class JsonForm:
    """A format that writes a call as JSON: `{"name": …, "arguments": {…}}`, or only the arguments after the name."""

    begun: str
    """Regular expression for how a call begins."""
    close: str
    """Text that closes a call; "" where the format has no such mark."""
    header: str
    """Regular expression for the text before the JSON, with the group `name` if the name is there."""
    end: str
    """Regular expression for the text after the JSON."""
    written: str
    """Example of a call, shown to the model when a call cannot be read."""


HERMES = JsonForm(
    begun="<tool_call>",
    close="</tool_call>",
    header=r"<tool_call>\s*",
    end=r"\s*</tool_call>",
    written='<tool_call>{"name": …, "arguments": {…}}</tool_call>',
)


class JsonParser(TextParser):
    """A parser for calls written as JSON.

    Args:
        tokenizer: Decodes the model's turns.
        end_ids: Every token id that ends a turn.
        form: The format.
        marks: Pairs of texts that open and close the model's reasoning.
    """

    def __init__(
        self,
        tokenizer: ParserTokenizer,
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
