"""The items of `/v1/responses` that a client sends, as models and as messages.

An assistant's turn is several items here: its reasoning, its text, its calls, in this order. They become one message
again. An item that cannot follow the one before it in a turn begins the next turn. A reference means the item that this
session sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Tag, ValidationInfo

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.protocols import fields
from verl_multiturn.proxy.protocols.fields import ABSENT, Array, Content, Fields, Other, Refusal, Text
from verl_multiturn.proxy.protocols.validation import wrong

_REASONING, _TEXT, _CALLS = range(3)
_PARTS = {
    **dict.fromkeys(("input_text", "output_text", "text"), "text"),
    "refusal": "refusal",
    "input_image": "image",
}
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = {
    **{name: name for name in ("message", "reasoning", "function_call", "custom_tool_call", "local_shell_call")},
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "local_shell_call_output"), "output"),
}


class Turns:
    """The messages read so far.

    Args:
        unenforced: Gets the name of each item that is omitted.
    """

    def __init__(self, unenforced: list[str]) -> None:
        self.messages: list[Message] = []
        self.unenforced = unenforced
        self._last: int | None = None

    def of_turn(self, stage: int) -> Message:
        """Return the assistant's message to which an item belongs."""
        if self._last is None or stage < self._last or stage == self._last != _CALLS:
            self.messages.append({"role": "assistant", "content": ""})
        self._last = stage
        return self.messages[-1]

    def add_call(self, call: dict[str, Any]) -> None:
        """Add a call of the assistant."""
        self.of_turn(_CALLS).setdefault("tool_calls", []).append(call)

    def add(self, message: Message) -> None:
        """Add a message of another role."""
        self.messages.append(message)
        self._last = None


class References:
    """The items of earlier answers that a request names by their ids.

    Args:
        find: Returns the item that the session sent with an id; None if there is none.
    """

    def __init__(self, find: Callable[[str], dict[str, Any] | None]) -> None:
        self._find = find
        self._named: set[str] = set()

    def take(self, name: str) -> dict[str, Any] | None:
        """Return an item; None if there is none, or if it was named before."""
        if name in self._named:  # else a short request could be a very long prompt
            return None
        self._named.add(name)
        return self._find(name)


class _Image(Fields):
    image_url: fields.ImageUrl = ABSENT

    def part(self) -> dict[str, Any]:
        return fields.image(self.image_url)


_KNOWN_PART = fields.by("type", _PARTS, "input_text, output_text or input_image", "send files as text or images")
_Said = Annotated[Text, Tag("=text")] | Annotated[Refusal, Tag("=refusal")]
_Part = Annotated[_Said | Annotated[_Image, Tag("=image")], _KNOWN_PART]


class _Message(Fields):
    role: str = ABSENT
    content: Content[_Part] = None

    def add_to(self, turns: Turns) -> None:
        turns.add({"role": self.role, "content": fields.content_of(self.content)})


class _AssistantMessage(Fields):
    content: Content[Annotated[_Said, _KNOWN_PART]] = None

    def add_to(self, turns: Turns) -> None:
        turns.of_turn(_TEXT)["content"] = fields.content_of(self.content)


_AnyMessage = Annotated[
    Annotated[_Message, Tag("=other")] | Annotated[_AssistantMessage, Tag("=assistant")],
    fields.by("role", {**dict.fromkeys(_ROLES, "other"), "assistant": "assistant"}, f"one of {', '.join(_ROLES)}"),
]


class _Reasoning(Fields):
    content: Array[Text] = ABSENT
    summary: Annotated[Array[Text], fields.unless("content")] = ABSENT

    def add_to(self, turns: Turns) -> None:
        texts = [each.text for each in self.content or self.summary]
        if texts:  # there may be encrypted content only, which we cannot read
            turns.of_turn(_REASONING)["reasoning_content"] = "\n".join(texts)


class _FunctionCall(Fields):
    call_id: str | None = None
    name: fields.Name = ABSENT
    arguments: fields.Arguments = ABSENT

    def add_to(self, turns: Turns) -> None:
        turns.add_call(fields.call(self.call_id, self.name, self.arguments))


class _CustomCall(Fields):
    call_id: str | None = None
    name: fields.Name = ABSENT
    input: str | None = None

    def add_to(self, turns: Turns) -> None:
        turns.add_call(fields.call(self.call_id, self.name, fields.json_text({"input": self.input or ""})))


class _ShellCall(Fields):
    call_id: str | None = None
    action: dict[str, Any] = ABSENT

    def add_to(self, turns: Turns) -> None:
        turns.add_call(fields.call(self.call_id, "local_shell", fields.json_text(self.action)))


class _Output(Fields):
    call_id: str | None = None
    output: Content[_Part] = None

    def add_to(self, turns: Turns) -> None:
        message: Message = {"role": "tool", "content": fields.content_of(self.output)}
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        turns.add(message)


class _OtherItem(Other):
    def add_to(self, turns: Turns) -> None:
        turns.unenforced.append(fields.counted("input", self.type))


def _tag(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message" if "role" in item else None)
    return f"={_ITEMS.get(kind, 'other')}" if isinstance(kind, str) else None


def _referred(item: Any, info: ValidationInfo) -> Any:
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return item
    name = item.get("id")
    if not isinstance(name, str):
        raise wrong("a text", field="id")
    assert isinstance(info.context, References)
    if (found := info.context.take(name)) is None:
        expected = "the id of an item that this session sent, and each at most once"
        raise wrong(expected, "send the item itself, store=false", "id")
    return found


Item = Annotated[
    Annotated[_AnyMessage, Tag("=message")]
    | Annotated[_Reasoning, Tag("=reasoning")]
    | Annotated[_FunctionCall, Tag("=function_call")]
    | Annotated[_CustomCall, Tag("=custom_tool_call")]
    | Annotated[_ShellCall, Tag("=local_shell_call")]
    | Annotated[_Output, Tag("=output")]
    | Annotated[_OtherItem, Tag("=other")],
    fields.choice(_tag, "the name of an item's kind", field="type"),
    BeforeValidator(_referred),
]
"""An item; the `References` of its request are the context in which it is read."""
