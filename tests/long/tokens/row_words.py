"""The words of a data row, for `benchmarks.rows`: content in order, and in whose turns a prompt may show it.

Invariants:
- It shares no code with the product, and reads the row as its author wrote it.
- Shown are the text of each message, names and arguments of calls, and answers of tools. Ids of calls, names of
  speakers and reasoning are not shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = Mapping[str, Any]
Nulls = Literal["said", "perhaps", "never"]
"""Whether a null is content. In a JSON text it is, in a mapping perhaps; in a column of a file it is a missing key."""
MARK = re.compile(r"zq\d+x")
"""Words that occur once in all rows of the benchmark."""
REASONING = ("reasoning_content", "reasoning", "thinking")
SYSTEM = ("system", "developer")
_OLD_TOOLS = ("function", "ipython")
"""Roles that others have for a tool."""
_NO_SYSTEM = {"gemma3"}
"""Families whose template writes the system message into the user's first."""
_ANSWERS_AS_JSON = {"llama3.1", "llama3.2", "gpt-oss"}
"""Families whose template writes a tool's answer as a JSON text."""
_CONTENT_LAST = {"gemma4"}
"""Families whose template writes the text of a message with calls behind these calls and their answers."""


@dataclass(frozen=True)
class Said:
    """A part of a row's content, in the order of the row."""

    where: str
    """Place in the row, for example "message 2, content"."""
    roles: frozenset[str]
    """The roles in whose turns a prompt may show it."""
    kind: Literal["text", "name", "arguments"]
    value: Any
    """A text, or a mapping of arguments."""
    nulls: Nulls = "said"
    """Whether a null in the arguments is content."""
    encoded: bool = False
    """Whether the text may be in the prompt as a JSON text has it."""


def words_of(messages: Sequence[Any], family: str, nulls: Nulls = "perhaps") -> list[Said]:
    """Return the content of a row's messages, in the order in which the family's template shows it.

    Args:
        messages: The messages as their author wrote them.
        family: Name of the family.
        nulls: Whether nulls in arguments that are a mapping are content.
    """
    found: list[Said] = []
    held: list[Said] = []
    leading = True
    for index, message in _in_order_of_calls(messages):
        role = str(message.get("role"))
        leading = leading and role in SYSTEM
        where, roles = f"message {index}", _roles(role, leading, family)
        encoded = role == "tool" and family in _ANSWERS_AS_JSON
        content = [
            Said(f"{where}, {key}", roles, "text", text, encoded=encoded or not plain)
            for key, text, plain in _texts(message, role)
        ]
        calls = list(_calls(message, where, roles, nulls))
        if role != "tool":
            found, held = [*found, *held], []
        late = family in _CONTENT_LAST and bool(calls)
        found += [*calls] if late else [*content, *calls]
        held += content if late else []
    return [*found, *held]


def _in_order_of_calls(messages: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return messages with their numbers, answers to the calls of one turn in the order of the calls, by their ids."""
    order: dict[int, tuple[int, int]] = {}
    turn, ids = -1, list[Any]()
    for index, message in enumerate(messages):
        role = str(message.get("role"))
        if role != "tool":
            turn, ids = index, [call.get("id") for call in message.get("tool_calls") or () if isinstance(call, dict)]
        run = [each.get("tool_call_id") for each in messages[turn + 1 : index + 1]] if role == "tool" else []
        order[index] = index, 0
        if run and len(set(run)) == len(run) and set(run) <= set(ids):
            for place, answered in enumerate(run):
                order[turn + 1 + place] = turn + 1, ids.index(answered)
    return sorted(enumerate(messages), key=lambda each: order[each[0]])


def _roles(role: str, leading: bool, family: str) -> frozenset[str]:
    if role not in SYSTEM:
        return frozenset([role, "tool"] if role in _OLD_TOOLS else [role])
    return frozenset([*SYSTEM, "user"] if not leading or family in _NO_SYSTEM else SYSTEM)


def _texts(message: Message, role: str) -> Iterator[tuple[str, str, bool]]:
    """Yield key, text and whether the text is plain in a message, for each of its texts."""
    content = message.get("content")
    keys = [key for key in message if key not in ("role", "content", "tool_calls", "function_call", *REASONING)]
    if content is None and not message.get("tool_calls") and not message.get("function_call"):
        others = [key for key in keys if key not in ("name", "tool_call_id", "id")]
        yield from ((key, text, False) for key in others for text in _leaves(message[key]))
    elif message.get("refusal"):
        yield "refusal", str(message["refusal"]), True
    if isinstance(content, str):
        yield from (("content", text, True) for text in _without_reasoning(content, role))
    elif isinstance(content, list | tuple):
        for block in content:
            if isinstance(block, str):
                yield "content", block, True
            elif isinstance(block, Mapping) and isinstance(block.get("text"), str):
                yield from (("content", text, True) for text in _without_reasoning(block["text"], role))
            elif not isinstance(block, Mapping) or block.get("type") not in ("thinking", "reasoning"):
                yield from (("content", text, False) for text in _leaves(block))
    else:
        yield from (("content", text, False) for text in _leaves(content))


def _without_reasoning(text: str, role: str) -> list[str]:
    """Return the pieces of a text around its reasoning; where that has no beginning, it begins with the text."""
    if role != "assistant":
        return [text] if text.strip() else []
    spoken = re.sub(r"^(?:(?!<think>).)*?</think>", "", text, flags=re.DOTALL)
    return [piece for piece in re.split(r"<think>.*?</think>", spoken, flags=re.DOTALL) if piece.strip()]


def _leaves(value: Any) -> Iterator[str]:
    """Yield each text and number in a value that is not a text, without a block's `type`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from () if key == "type" else _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None and str(value).strip():
        yield json.dumps(value) if isinstance(value, bool) else str(value)


def _calls(message: Message, where: str, roles: frozenset[str], nulls: Nulls) -> Iterator[Said]:
    calls = message.get("tool_calls")
    if isinstance(calls, str | Mapping):
        yield from (Said(f"{where}, tool_calls", roles, "text", text, encoded=True) for text in _leaves(calls))
        calls = None
    old = message.get("function_call")
    for number, call in enumerate([*(calls or ()), *([old] if old else [])]):
        if not isinstance(call, Mapping):
            yield from (Said(f"{where}, call {number}", roles, "text", text, encoded=True) for text in _leaves(call))
            continue
        function = call.get("function") or call
        at = f"{where}, call {number}"
        named = function.get("name")
        if isinstance(named, str) and named:
            yield Said(f"{at}, name", roles, "name", named)
        else:
            yield from (Said(f"{at}, name", roles, "text", text, encoded=True) for text in _leaves(named))
        raw = function.get("arguments")
        read = _read(raw)
        if isinstance(read, Mapping):
            yield Said(f"{at}, arguments", roles, "arguments", read, "said" if isinstance(raw, str) else nulls)
        else:
            yield from (Said(f"{at}, arguments", roles, "text", text, encoded=True) for text in _leaves(raw))


def _read(raw: Any) -> Any:
    """Return arguments as a mapping; text that is none, and other values, as they are."""
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    if not isinstance(raw, str):
        return raw
    try:
        return {} if (read := json.loads(raw)) is None else read
    except ValueError:
        return raw
