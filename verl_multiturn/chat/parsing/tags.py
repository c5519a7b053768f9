"""Calls whose arguments are between tags of their own, as Qwen3-Coder, GLM, MiniMax and others write them."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.chat.parsing.arguments import read_arguments, read_value
from verl_multiturn.chat.parsing.call_json import NamedCall, UnreadableCallError, as_json, read_json
from verl_multiturn.chat.parsing.text_parser import TextParser
from verl_multiturn.chat.parsing.turns import ParserTokenizer


@dataclass(frozen=True)
class TagForm:
    """A format that writes a call in tags.

    Each argument is between two tags, as text. The tool's schema gives its type.
    """

    begun: str
    """Regular expression for how a call begins."""
    close: str
    """Text that closes a call."""
    header: str
    """Regular expression for the text before the arguments, with the group `name`."""
    argument: str
    """Regular expression for one argument, with the groups `key` and `value`.

    Where the model marks whether a value is a string, the expression has the group `string`, too.
    """
    end: str
    """Regular expression for the text after the arguments."""
    opening: str
    """Regular expression for every tag that begins a call or a part of one.

    A value that holds such a tag is not read: it is unknown whether the tag is text of the value, or the value was
    not closed.
    """
    closing: str
    """Regular expression for every tag that ends a call or a part of one."""
    written: str
    """Example of a call, shown to the model when a call cannot be read."""
    escaped: bool = False
    """True where values are escaped as in HTML."""


class TagParser(TextParser):
    """A parser for calls whose arguments are in tags.

    Args:
        tokenizer: Decodes the model's turns.
        end_ids: Every token id that ends a turn.
        form: The format.
        marks: Pairs of texts that open and close the model's reasoning.
    """

    def __init__(
        self, tokenizer: ParserTokenizer, end_ids: Sequence[int], form: TagForm, marks: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(tokenizer, end_ids, marks, form.begun, form.close, form.closing)
        self._form = form
        self._header, self._end = re.compile(form.header), re.compile(form.end)
        self._argument = re.compile(form.argument, re.DOTALL)
        self._tag = re.compile(form.opening)

    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        header = self._header.match(text, found.start())
        if header is None:
            raise UnreadableCallError(f"the call cannot be read; write it as {self._form.written}")
        written: dict[str, re.Match[str]] = {}
        position = header.end()
        while one := self._argument.match(text, position):
            key = one["key"].strip()  # not in the expression: skipping white space there takes quadratic time
            if key in written:
                raise UnreadableCallError(f"the call has the argument {key!r:.100} twice")
            if tag := self._tag.search(one["value"]):
                raise UnreadableCallError(
                    f"the argument {key!r:.100} is not closed before {tag[0]!r}, or holds it, and none may"
                )
            written[key] = one
            position = one.end()
        arguments = self._arguments(written, schemas, header["name"])
        if not arguments and (opened := re.compile(r"\s*(?=\{)").match(text, position)):
            arguments, position = read_json(text, opened.end())  # DeepSeek's models may write one object instead
        end = self._end.match(text, position)
        if end is None:
            rest = text[position : position + 20].strip()
            where = f"from {rest!r} on" if rest else "to its end"
            form = self._form.written
            raise UnreadableCallError(f"the call of {header['name']!r} cannot be read {where}; write it as {form}")
        return [(header["name"], as_json(arguments))], end.end()

    def _unread_to(self, text: str, position: int) -> int:
        return len(text)  # the end of an unreadable argument is unknown

    def _arguments(
        self, written: Mapping[str, re.Match[str]], schemas: Sequence[dict[str, Any]], name: str
    ) -> dict[str, Any]:
        """Return the arguments of a call, read by the schema of its tool or as the model marked."""
        texts = {
            key: html.unescape(one["value"]) if self._form.escaped else one["value"] for key, one in written.items()
        }
        if "string" in self._argument.groupindex:
            return {key: text if written[key]["string"] == "true" else read_value(text) for key, text in texts.items()}
        return read_arguments(texts, _parameters(schemas, name))


def _parameters(schemas: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments; an empty one for a tool that does not exist."""
    for schema in schemas:
        if schema["function"]["name"] == name:
            parameters = schema["function"].get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}
