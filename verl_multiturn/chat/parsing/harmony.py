"""gpt-oss: the Harmony format.

A turn consists of several messages, each with a channel. A message addressed `to=functions.name` is a call, whichever
channel it is on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_multiturn.chat.parsing.call_json import UnreadableCallError, as_json, read_json
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ParserTokenizer, ToolCall, turn_text

_CALL, _END = "<|call|>", "<|end|>"
_WRITTEN = "write its JSON after <|message|> and end it with <|call|>"


class HarmonyParser:
    """A parser that reads a gpt-oss turn message by message.

    The turn begins after `<|start|>assistant`. verl's parser wants that header in the turn, and the channel before the
    recipient; the model does not always sample either.

    Rules for where a message ends:
    - The analysis goes on to its `<|end|>`, whatever it holds: a call written inside it is not a call.
    - An analysis without `<|end|>` and without a call ends where the final answer begins.
    - An unreadable part goes on to the end of the turn.

    Args:
        tokenizer: Decodes the turn.
    """

    _HEADER = re.compile(
        r"<\|start\|>assistant(?P<header>.*?)"
        r"(?:(?P<body><\|message\|>)|(?=<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>)|\Z)",
        re.DOTALL,
    )
    _ANALYSIS = re.compile(r"[^<]*<\|channel\|>\s*analysis\b")
    _FINAL = re.compile(r"<\|start\|>assistant\s*<\|channel\|>\s*final\s*<\|message\|>")
    _RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
    _BODY_END = re.compile(r"<\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)|\Z")
    _SPACE = re.compile(r"\s*")

    def __init__(self, tokenizer: ParserTokenizer) -> None:
        self._tokenizer = tokenizer

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        """Read a turn, as `CallParser.parse` describes."""
        text = "<|start|>assistant" + turn_text(self._tokenizer, ids, ())
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall | MalformedCall] = []
        position = 0
        while message := self._HEADER.search(text, position):
            try:
                if recipient := self._RECIPIENT.search(message["header"]):
                    arguments, position = self._arguments(text, message)
                    calls.append(ToolCall(recipient[1], arguments, f"call_{turn}_{len(calls)}"))
                else:
                    said, position = self._said(text, message)
                    (reasoning if self._ANALYSIS.match(message["header"]) else content).append(said)
            except UnreadableCallError as error:
                problem = str(error)[:300]
                calls.append(MalformedCall(text[message.start() :], problem, f"call_{turn}_{len(calls)}"))
                break
        return AssistantTurn("".join(content).strip(), calls, "\n".join(filter(None, reasoning)).strip())

    def _arguments(self, text: str, message: re.Match[str]) -> tuple[str, int]:
        """Return a call's arguments as the model wrote them, and the index where the call ends."""
        if message["body"] is None:
            raise UnreadableCallError(f"the call is not closed; {_WRITTEN}")
        start = self._space_end(text, message.end())
        value, end = read_json(text, start)
        as_json(value)
        closed = self._space_end(text, end)
        if not text.startswith(_CALL, closed):
            raise UnreadableCallError(f"the call's JSON is followed by something else; {_WRITTEN}")
        return text[start:end], closed + len(_CALL)

    def _said(self, text: str, message: re.Match[str]) -> tuple[str, int]:
        """Return the text of a message that is not a call, and the index where it ends."""
        if self._ANALYSIS.match(message["header"]):
            closed = text.find(_END, message.end())
            if closed < 0 and _CALL in text[message.end() :]:
                raise UnreadableCallError(
                    "the analysis is not ended, so the call in it was not run; end it with <|end|> and begin the call "
                    "with <|start|>assistant"
                )
            if closed < 0 and (final := self._FINAL.search(text, message.end())):
                # The analysis has no end, and the final answer began without a call.
                return text[message.end() : final.start()], final.start()
            return (
                (text[message.end() :], len(text)) if closed < 0 else (text[message.end() : closed], closed + len(_END))
            )
        end = self._BODY_END.search(text, message.end())
        assert end is not None  # the expression matches at the text's end at the latest
        if end[0] == _CALL:
            raise UnreadableCallError("the call has no recipient; name the tool in its header, as to=functions.name")
        return text[message.end() : end.start()] if message["body"] else "", end.end()

    def _space_end(self, text: str, position: int) -> int:
        found = self._SPACE.match(text, position)
        return found.end() if found else position
