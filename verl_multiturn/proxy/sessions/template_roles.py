"""Messages of a request, changed to what a chat template takes.

Agents write `developer` messages, several system messages, and system messages after the first turn. A template may
refuse them, or leave them out without a word. What it takes stays as it is; the model reads the rest as a user's words.

- System and developer messages at the beginning become one system message.
- A later one stays a system message where the template shows it; else it becomes a user message.
- User messages in a row are joined where the template refuses them.
- The arguments of a call are an object; text where the template takes nothing else (DeepSeek-V3).
- A tool without a description gets an empty one where the template refuses it otherwise (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.sessions.canonical import SYSTEM_ROLES, object_of

_BETWEEN = "\n\n"
_USER: Message = {"role": "user", "content": "x"}
_SAID: Message = {"role": "assistant", "content": "x"}


class TemplateRoles:
    """The roles that one chat template takes. They are found out by rendering small conversations.

    Args:
        codec: Renders with the template.
    """

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self.takes_system = self._shows([], "system", [_USER])
        """Whether a system message may begin a conversation."""
        self.takes_later_system = (
            self._shows([_USER], "system", [])
            and self._shows([_USER], "system", [_USER])
            and self._shows([_USER, _SAID, _USER], "system", [])
            and self._appends("system")
        )
        """Whether a system message may stand anywhere."""
        self.takes_objects = self._renders_call({}) or not self._renders_call("{}")
        """Whether the arguments of a call may be an object."""
        self.needs_descriptions = not self._renders_tool({}) and self._renders_tool({"description": ""})
        """Whether each tool must have a description."""
        self.takes_users_in_a_row = self._shows([_USER], "user", []) and self._shows([_USER], "user", [_USER])

    def _shows(self, before: list[Message], role: str, after: list[Message]) -> bool:
        """Tell whether the template shows the text of a message with this role."""
        try:
            one, other = (
                self._codec.initial([*before, {"role": role, "content": text}, *after], []) for text in ("q7z", "k3w")
            )
        except ConfigError:
            return False
        return one != other

    def _renders_call(self, arguments: Any) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer: Message = {"role": "tool", "content": "x", "tool_call_id": "call00000", "name": "f"}
        try:
            self._codec.initial([_USER, {**_SAID, "tool_calls": [call]}, answer], [])
        except ConfigError:
            return False
        return True

    def _renders_tool(self, fields: Mapping[str, str]) -> bool:
        function = {"name": "f", **fields, "parameters": {"type": "object", "properties": {}}}
        try:
            self._codec.initial([_USER], [{"type": "function", "function": function}])
        except ConfigError:
            return False
        return True

    def _appends(self, role: str) -> bool:
        try:
            one, other = (
                self._codec.observation([_USER, _SAID], [{"role": role, "content": text}, _USER], [0], [])
                for text in ("q7z", "k3w")
            )
        except ConfigError:
            return False
        return one != other

    def prompt(self, messages: Sequence[Message]) -> list[Message]:
        """Return all messages of a conversation in the form of the template."""
        leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
        written = self._written(messages[len(leading) :], messages)
        if leading:
            system: Message = {"role": "system", "content": _joined([each.get("content") or "" for each in leading])}
            written = [system if self.takes_system else {**system, "role": "user"}, *written]
        return self._in_turns(written)

    def tools(self, schemas: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the schemas of tools in the form of the template."""
        if not self.needs_descriptions:
            return schemas
        return [{**schema, "function": {"description": "", **schema["function"]}} for schema in schemas]

    def added(self, messages: Sequence[Message], said: Message) -> list[Message]:
        """Return the messages after an assistant's turn, in the form of the template.

        Args:
            messages: Messages of tools and users.
            said: The assistant's turn, with its calls.
        """
        return self._in_turns(self._written(messages, [said, *messages]))

    def _written(self, messages: Sequence[Message], conversation: Sequence[Message]) -> list[Message]:
        """Return messages with the fields that templates know, and later system messages in a role that is shown.

        Args:
            messages: The last messages of `conversation`.
            conversation: Messages with the calls that those of tools answer.
        """
        names: dict[str, str] = {}
        waiting: list[str] = []
        written: list[Message] = []
        first = len(conversation) - len(messages)
        for index, message in enumerate(conversation):
            role, content = message["role"], message.get("content")
            made: Message = {"role": role, "content": "" if content is None else content}
            if role == "assistant":
                calls = message.get("tool_calls") or []
                waiting = [call["function"]["name"] for call in calls]
                names |= {call.get("id") or "": call["function"]["name"] for call in calls}
                made |= self.assistant_fields(message)
            elif role == "tool":
                next_name = waiting.pop(0) if waiting else "error"
                answered = message.get("tool_call_id")
                made["name"] = names.get(answered, next_name) if answered else next_name
                made |= {"tool_call_id": answered} if answered else {}
            elif role in SYSTEM_ROLES:
                made["role"] = "system" if self.takes_later_system else "user"
            if index >= first:
                written.append(made)
        return written

    def assistant_fields(self, message: Message) -> Message:
        """Return the calls and the reasoning of an assistant's message as the template expects them."""
        made: Message = {}
        if message.get("reasoning_content"):
            made["reasoning_content"] = message["reasoning_content"]
        if message.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return made

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function, given = call["function"], {"id": call["id"]} if call.get("id") else {}
        text = function.get("arguments") or ""
        arguments = _arguments(text) if self.takes_objects else text.strip() or "{}"
        return {**given, "type": "function", "function": {"name": function["name"], "arguments": arguments}}

    def _in_turns(self, messages: list[Message]) -> list[Message]:
        """Join user messages in a row, if the template refuses them."""
        if self.takes_users_in_a_row:
            return messages
        joined: list[Message] = []
        for message in messages:
            if joined and message["role"] == "user" == joined[-1]["role"]:
                joined[-1] = {**message, "content": _joined([joined[-1]["content"], message["content"]])}
            else:
                joined.append(message)
        return joined


def _arguments(text: str) -> Any:
    """Return arguments as the object that templates expect. Other text stays text."""
    if not text.strip():
        return {}
    parsed = object_of(text)
    return text if parsed is None else parsed


def _joined(contents: Sequence[Any]) -> Any:
    """Join contents with a blank line between them."""
    if all(isinstance(content, str) for content in contents):
        return _BETWEEN.join(content for content in contents if content)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": _BETWEEN}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
