"""From sampled ids to text and tool calls.

The Hermes format (Qwen and many more) is ours, since it is the default; other formats come through the same protocol
from `verl_bridge.parsers`. For all of them: a call inside a reasoning section is not executed, and no call that cannot
be read vanishes: it is a `MalformedCall`, which the model is told about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
        call: what opens and closes a call; a mark inside a call is part of its arguments. The second may be empty.
    """

    def __init__(
        self,
        marks: Sequence[tuple[str, str]] = (THINK,),
        call: tuple[str, str] = ("<tool_call>", "</tool_call>"),
    ) -> None:
        self._closes = dict(marks)
        self._call, self._call_end = call
        openings = sorted([*self._closes, *([self._call] if self._call else [])], key=len, reverse=True)
        self._openings = re.compile("|".join(map(re.escape, openings)))

    def opened_by(self, before: str) -> str | None:
        """The mark of a section that the text before a turn has opened and not closed."""
        marks = self._closes.items()
        return next((start for start, end in marks if before.rfind(start) > before.rfind(end)), None)

    def split(self, text: str, opened: str | None = None) -> tuple[str, str]:
        """`(reasoning, rest)`, each in its order, the marks included, also the one that was `opened` before the turn.

        A section that is not closed reaches to the end.
        """
        inside: list[str] = []
        outside: list[str] = []
        position = 0
        if opened:
            inside.append(opened)
            position = self._take(text, 0, self._closes[opened], inside)
        while found := self._openings.search(text, position):
            outside.append(text[position : found.start()])
            mark = found[0]
            target, close = (outside, self._call_end) if mark == self._call else (inside, self._closes[mark])
            target.append(mark)
            position = self._take(text, found.end(), close, target)
        return "".join(inside), "".join([*outside, text[position:]])

    @staticmethod
    def _take(text: str, start: int, close: str, target: list[str]) -> int:
        """Move the text up to and with `close` to `target`; where the rest begins."""
        if not close:
            return start
        at = text.find(close, start)
        end = len(text) if at < 0 else at + len(close)
        target.append(text[start:end])
        return end


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them.

    Args:
        tokenizer: decodes the turn.
        end_ids: ids that end a turn; they and what follows them are no text.
        reasoning: finds the sections in which no call is executed.
    """

    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], reasoning: Reasoning | None = None) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._reasoning = reasoning or Reasoning()

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        opened = self._reasoning.opened_by(self._tokenizer.decode(list(before)))
        reasoning, text = self._reasoning.split(turn_text(self._tokenizer, ids, self._end_ids), opened)
        calls = [
            _read_call(found.group(1).strip(), closed=bool(found.group(2)), call_id=f"call_{turn}_{index}")
            for index, found in enumerate(self._CALL.finditer(text))
        ]
        return AssistantTurn(content=(reasoning + self._CALL.sub("", text)).strip(), calls=calls)


class HarmonyParser:
    """gpt-oss: a turn is several messages, each with a channel, and one addressed `to=functions.name` is a call.

    The turn begins after `<|start|>assistant`. verl's parser wants that header in the turn, and the channel before the
    recipient; the model samples neither always.
    """

    _MESSAGE = re.compile(
        r"<\|start\|>assistant(?P<header>.*?)(?:<\|message\|>(?P<body>.*?))?"
        r"(?P<end><\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
        re.DOTALL,
    )
    # To its end, whatever it holds: a call written in there is none.
    _ANALYSIS = re.compile(r"<\|start\|>assistant[^<]*<\|channel\|>\s*analysis\b.*?(?:<\|end\|>|\Z)", re.DOTALL)
    _RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def parse(
        self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int, before: Sequence[int] = ()
    ) -> AssistantTurn:
        text = "<|start|>assistant" + turn_text(self._tokenizer, ids, ())
        content: list[str] = []
        calls: list[ToolCall | MalformedCall] = []
        for message in self._MESSAGE.finditer(self._ANALYSIS.sub("", text)):
            body, call_id = message["body"], f"call_{turn}_{len(calls)}"
            recipient = self._RECIPIENT.search(message["header"])
            if recipient is None:
                content.append(body or "")
            elif body is None or message["end"] != "<|call|>":
                problem = "the call is not closed; write its JSON after <|message|> and end it with <|call|>"
                calls.append(MalformedCall(message[0], problem, call_id))
            else:
                calls.append(ToolCall(recipient[1], body, call_id))
        return AssistantTurn("".join(content).strip(), calls)


def turn_text(tokenizer: Tokenizer, ids: Sequence[int], end_ids: Collection[int]) -> str:
    """The text of a turn without the ids that end it."""
    kept = list(ids)
    while kept and kept[-1] in end_ids:
        kept.pop()
    return tokenizer.decode(kept, skip_special_tokens=False)


def _read_call(text: str, closed: bool, call_id: str) -> ToolCall | MalformedCall:
    if not closed:
        return MalformedCall(text, "the call is not closed; end it with </tool_call>", call_id)
    try:
        parsed = json.loads(text)
    except ValueError as error:
        return MalformedCall(text, f"the call is no valid JSON ({error})"[:200], call_id)
    except RecursionError:
        return MalformedCall(text, "the call's JSON is nested too deeply", call_id)
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return MalformedCall(text, 'a call is a JSON object {"name": …, "arguments": {…}}', call_id)
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):
        # Some models write the arguments as a JSON string, as the OpenAI API does.
        return ToolCall(parsed["name"], arguments, call_id)
    return ToolCall(parsed["name"], json.dumps(arguments, ensure_ascii=False), call_id)
