"""Calls of Llama 3, which most often have no mark around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_multiturn.chat.parsing.call_json import NamedCall, UnreadableCallError
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.parsing.text_parser import NoCallError


class LlamaParser(JsonParser):
    """A parser for Llama 3: JSON that at most `<|python_tag|>` marks as a call.

    Without that mark, an object is a call in two cases: it names a tool of the request, or the request has tools and
    the object is a name and at least one argument and nothing else. Any other object that begins with a name is an
    answer.
    """

    _NAME = re.compile(
        r"""\s*\{\s*["'](?:type["']\s*:\s*["']function["']\s*,\s*["'])?name["']"""
        r"""\s*:\s*["'](?P<name>[^"']*)(?P<cut>\Z)?"""
    )

    def _call(self, text: str, found: re.Match[str], schemas: Sequence[dict[str, Any]]) -> tuple[list[NamedCall], int]:
        marked = "<|python_tag|>" in found[0]
        if not marked and not self._names_a_tool(text, found.end(), schemas):
            try:
                calls, end = super()._call(text, found, schemas)
            except UnreadableCallError:
                raise NoCallError from None
            if not schemas or not calls[0][1].startswith('{"'):
                raise NoCallError
            return calls, end
        return super()._call(text, found, schemas)

    def _names_a_tool(self, text: str, position: int, schemas: Sequence[dict[str, Any]]) -> bool:
        found = self._NAME.match(text, position)
        if found is None:
            return False
        tools = [schema["function"]["name"] for schema in schemas]
        return (
            any(tool.startswith(found["name"]) for tool in tools)
            if found["cut"] is not None
            else found["name"] in tools
        )
