"""The rule that a prompt shows its messages, for one template: a mark in each role and form, looked for in the prompt.

A form that a template does not take is refused by name, by the first prompt that holds it. That is harmless, and known
from the start. A mark that is missing in a prompt that was not refused is a fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.chat.messages import read_messages
from verl_multiturn.chat.template_rules import Rule, RuleEffect
from verl_multiturn.errors import ConfigError

NAME = "what is said is shown"
_CITY, _CALLS = "cityq7", "calls in a history"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "toolq7",
        "description": "describedq7",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "A place."}}},
    },
}


def _said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _call(number: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "calledq7", "arguments": arguments}}


def _answer(number: int, content: Any) -> Message:
    return _said("tool", content, tool_call_id=f"call0000{number}")


def _forms() -> Iterator[tuple[str, list[Message], tuple[str, ...]]]:
    """Yield forms of messages: their name, a conversation, and the marks that its prompt must hold."""
    user = _said("user", "userq7")
    arguments = {"place": _CITY}
    called = ("calledq7", "place", _CITY)
    yield "a user's text", [user], ("userq7",)
    yield "a system message", [_said("system", "sysq7"), user], ("sysq7", "userq7")
    yield "a developer's message", [_said("developer", "devq7"), user], ("devq7", "userq7")
    yield "two system messages", [_said("system", "sysq7"), _said("developer", "devq7"), user], ("sysq7", "devq7")
    yield (
        "a later system message",
        [user, _said("assistant", "saidq7"), _said("system", "sysq7"), user],
        ("saidq7", "sysq7"),
    )
    yield (
        "text blocks",
        [_said("user", [{"type": "text", "text": text} for text in ("oneq7", "twoq7")])],
        ("oneq7", "twoq7"),
    )
    yield "a greeting of the assistant's", [_said("assistant", "saidq7"), user], ("saidq7", "userq7")
    yield "two user messages in a row", [user, _said("user", "nextq7")], ("userq7", "nextq7")
    for given in (arguments, json.dumps(arguments)):
        history = [user, _said("assistant", "", tool_calls=[_call(1, given)]), _answer(1, "resultq7"), user]
        yield _CALLS, history, (*called, "resultq7")
    empty = [user, _said("assistant", None, tool_calls=[_call(1, "")]), _answer(1, "resultq7"), user]
    yield _CALLS, empty, ("calledq7", "resultq7")
    beside = [user, _said("assistant", "saidq7", tool_calls=[_call(1, arguments)]), _answer(1, "resultq7"), user]
    yield "text beside a call", beside, ("saidq7", *called, "resultq7")
    again = [*empty, _said("assistant", "", tool_calls=[_call(2, {"place": "townq7"})]), _answer(2, "otherq7"), user]
    yield "calls in a second turn", again, ("calledq7", "resultq7", "townq7", "otherq7")
    calls = [_call(1, arguments), _call(2, {"place": "townq7"})]
    several = [user, _said("assistant", "", tool_calls=calls), _answer(1, "resultq7"), _answer(2, "otherq7"), user]
    yield "several calls of a turn", several, (*called, "townq7", "resultq7", "otherq7")


def said_is_shown(codec: ChatCodec, tokenizer: Any, tools: bool) -> Rule:
    """Check that each role and form is in the prompt, or is refused by name.

    Args:
        codec: The model's codec.
        tokenizer: The model's tokenizer.
        tools: Whether the run calls tools.
    """
    refused: list[str] = []
    for name, messages, marks in _forms():
        if _CALLS in refused and any(message.get("tool_calls") for message in messages):
            continue
        try:
            trusted = codec.trusted(read_messages(messages, name))
            text = tokenizer.decode(codec.initial(trusted, []))
        except ConfigError:
            refused.append(name)
            continue
        if lost := next((mark for mark in marks if mark not in text), None):
            return Rule(NAME, RuleEffect.REFUSED, f"{name}: {lost!r} is not in the prompt, and nothing says so")
    if tools:
        shown = codec.trusted_schemas([_TOOL])
        try:
            text = tokenizer.decode(codec.initial([_said("user", "userq7")], shown))
        except ConfigError:
            refused.append("tools that no message describes")
        else:
            if lost := next((mark for mark in ("toolq7", "describedq7") if mark not in text), None):
                return Rule(NAME, RuleEffect.REFUSED, f"a tool's {lost!r} is not in the prompt, and nothing says so")
    first = getattr(tokenizer, "bos_token_id", None)
    prompt = codec.rendered([_said("user", "userq7")], [])
    if first is not None and list(tokenizer.encode("x"))[:1] == [first] != prompt[:1]:
        found = f"the tokenizer begins a text with {tokenizer.decode([first])!r}, and the template's prompts have none"
        return Rule(NAME, RuleEffect.REFUSED, found)
    if refused:
        return Rule(NAME, RuleEffect.KNOWN, f"not taken, and refused where a row has it: {', '.join(refused)}")
    return Rule(NAME, RuleEffect.KEPT, "")
