"""The items of `/v1/responses` that a client sends, as messages.

An assistant's turn is several items here: its reasoning, its text, its calls, in this order. They become one message
again. An item that cannot follow the one before it in a turn begins the next turn. A reference stands for the item that
this session sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.protocols import reading

_ROLES = ("user", "assistant", "system", "developer")
_REASONING, _TEXT, _CALLS = range(3)
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class Turns:
    """The messages read so far.

    Args:
        unenforced: Gets the name of each item that is left out.
        sent: Returns the item that the session sent with an id; None if there is none.
    """

    def __init__(self, unenforced: list[str], sent: Callable[[str], dict[str, Any] | None]) -> None:
        self.messages: list[Message] = []
        self._unenforced = unenforced
        self._sent = sent
        self._named: set[str] = set()
        self._last: int | None = None

    def add(self, value: Any, where: str) -> None:
        """Add an item.

        Raises:
            RefusedError: It holds something else than the protocol says, or refers to what this session did not send.
        """
        item = reading.mapping(value, where)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "item_reference":
            item = self._referred(item, where)
            kind = item["type"]
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            calls = self._of_turn(_CALLS).setdefault("tool_calls", [])
            calls.append(_call(kind, item, where))
        elif kind in _OUTPUTS:
            self._other(_output(item, where))
        elif isinstance(kind, str):
            self._unenforced.append(reading.counted("input", kind))
        else:
            raise reading.wrong(f"{where}.type", kind, "the name of an item's kind")

    def _referred(self, item: Mapping[str, Any], where: str) -> dict[str, Any]:
        name = reading.text(item.get("id"), f"{where}.id")
        found = self._sent(name)
        if found is None or name in self._named:  # else a short request could be a very long prompt
            expected = "the id of an item that this session sent, and each at most once"
            raise reading.wrong(f"{where}.id", name, expected, "send the item itself, store=false")
        self._named.add(name)
        return found

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise reading.wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
        content = reading.content(item.get("content"), f"{where}.content", partial(_part, images=role != "assistant"))
        if role == "assistant":
            self._of_turn(_TEXT)["content"] = content
        else:
            self._other({"role": role, "content": content})

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        parts = reading.array(item.get("content"), f"{where}.content")
        name = "content" if parts else "summary"
        texts = []
        for index, each in enumerate(parts or reading.array(item.get("summary"), f"{where}.summary")):
            here = f"{where}.{name}[{index}]"
            texts.append(reading.text(reading.mapping(each, here).get("text"), f"{here}.text"))
        if texts:  # there may be encrypted content only, which nobody here can read
            self._of_turn(_REASONING)["reasoning_content"] = "\n".join(texts)

    def _of_turn(self, stage: int) -> Message:
        """Return the assistant's message to which an item belongs."""
        if self._last is None or stage < self._last or stage == self._last != _CALLS:
            self.messages.append({"role": "assistant", "content": ""})
        self._last = stage
        return self.messages[-1]

    def _other(self, message: Message) -> None:
        self.messages.append(message)
        self._last = None


def _call(kind: str, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    id_ = item.get("call_id")
    if kind == "custom_tool_call":
        arguments: Any = {"input": reading.text_or_empty(item.get("input"), f"{where}.input")}
        return reading.call(id_, item.get("name"), arguments, where)
    if kind == "local_shell_call":
        return reading.call(id_, "local_shell", reading.mapping(item.get("action"), f"{where}.action"), where)
    return reading.call(id_, item.get("name"), item.get("arguments"), where)


def _output(item: Mapping[str, Any], where: str) -> Message:
    id_ = item.get("call_id")
    content = reading.content(item.get("output"), f"{where}.output", partial(_part, images=True))
    message: Message = {"role": "tool", "content": content}
    if id_ is not None:
        message["tool_call_id"] = reading.text(id_, f"{where}.call_id")
    return message


def _part(value: Any, where: str, images: bool) -> str | dict[str, Any]:
    part = reading.mapping(value, where)
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return reading.text(part.get("text"), f"{where}.text")
    if kind == "refusal":
        return reading.text(part.get("refusal"), f"{where}.refusal")
    if kind == "input_image" and images:
        return reading.image_of_url(part.get("image_url"), f"{where}.image_url")
    raise reading.wrong(f"{where}.type", kind, "input_text, output_text or input_image", "send files as text or images")
