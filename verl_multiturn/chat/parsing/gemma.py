"""Calls of Gemma 4."""

from __future__ import annotations

import json
import re
from typing import Any

from verl_multiturn.chat.parsing.call_json import UnreadableCallError
from verl_multiturn.chat.parsing.json_calls import JsonParser


class GemmaParser(JsonParser):
    """A parser for Gemma 4: JSON with bare keys, and strings between tokens of their own (`<|"|>`)."""

    _QUOTE = '<|"|>'
    _KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)(?=\s*:)")

    def _value(self, text: str, position: int) -> tuple[Any, int]:
        end = self._close_at(text, position)
        parts = text[position:end].split(self._QUOTE)
        strings = [
            json.dumps(part) if index % 2 else self._KEY.sub(r'\1"\2"', part) for index, part in enumerate(parts)
        ]
        value, length = super()._value("".join(strings), 0)
        if length < len("".join(strings).rstrip()):
            raise UnreadableCallError(
                f"the call's arguments are followed by something else; write {self._form.written}"
            )
        return value, end

    def _close_at(self, text: str, position: int) -> int:
        """Return the index of the mark that closes the call. A mark within a string closes nothing.

        Raises:
            UnreadableCallError: The call is not closed.
        """
        in_string = False
        for mark in re.finditer(f"{re.escape(self._QUOTE)}|{re.escape(self._close)}", text[position:]):
            if mark[0] == self._QUOTE:
                in_string = not in_string
            elif not in_string:
                return position + mark.start()
        raise UnreadableCallError(f"the call is not closed; write {self._form.written}")
