"""From sampled ids to text and tool calls.

The Hermes format (Qwen and many more) is ours, since it is the default and no malformed call may vanish; other formats
come through the same protocol from `verl_bridge.parsers`, whose parsers skip what they cannot read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


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

    async def parse(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int) -> AssistantTurn:
        """The turn's text and calls. `turn` numbers the turn, so that call ids are unique in a conversation."""
        ...


class Tokenizer(Protocol):
    """The little of a tokenizer that is used here."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str: ...


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them.

    Args:
        tokenizer: decodes the turn.
        end_ids: ids that end a turn; they and what follows them are no text.
    """

    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)

    async def parse(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]], turn: int) -> AssistantTurn:
        text = turn_text(self._tokenizer, ids, self._end_ids)
        calls = [
            _read_call(found.group(1).strip(), closed=bool(found.group(2)), call_id=f"call_{turn}_{index}")
            for index, found in enumerate(self._CALL.finditer(text))
        ]
        return AssistantTurn(content=self._CALL.sub("", text).strip(), calls=calls)


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
