"""`TemplateForm`: the form in which one chat template takes messages, found out by rendering small conversations.

Rows, agents and users write `developer` messages, several system messages, system messages after the first turn, a
greeting of the assistant's. A template may refuse them, or leave them out without a word. Messages that it takes stay
as they are; the rest is written in the nearest form that it shows.

- System and developer messages at the beginning become one system message.
- A later one stays a system message where the template shows it; else it becomes a user message.
- User messages in a row are joined where the template refuses them.
- An empty user message goes before an assistant's greeting where the template takes none at the beginning (Gemma 3).
- The arguments of a call are an object; text where the template takes nothing else (DeepSeek-V3).
- Text is a block where the template shows nothing else.
- A tool without a description gets an empty one where the template refuses it otherwise (gpt-oss).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

from verl_multiturn.chat.images import Message
from verl_multiturn.chat.messages import SYSTEM_ROLES, further_fields
from verl_multiturn.chat.parsing.call_json import object_of
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError

_BETWEEN = "\n\n"
_USER: Message = {"role": "user", "content": "x"}
_SAID: Message = {"role": "assistant", "content": "x"}
_EMPTY: Message = {"role": "user", "content": ""}
_MARKS = ("q7z", "k3w")
"""Texts that no template writes on its own."""


class MessageError(ConfigError):
    """A message that the chat template does not take or does not show.

    Args:
        words: The fault, and its remedy.
        index: Index of the message; None where no single message is at fault.
        role: Its role.
    """

    def __init__(self, words: str, index: int | None = None, role: str = "") -> None:
        super().__init__(words if index is None else f"message {index} ({role}): {words}")
        self.words, self.index, self.role = words, index, role

    def at(self, where: str, shift: int = 0) -> MessageError:
        """Return the error with the name of the row, and with the message's index in it.

        Args:
            where: Name of the row, for example `data row 7`; "": it has none.
            shift: How many messages of the row were joined at its beginning.
        """
        index = self.index + shift if self.index else self.index
        made = MessageError(self.words, index, self.role)
        return MessageError(f"{where}: {made}") if where else made


class Renderer(Protocol):
    """The part of a `ChatCodec` by which a template is found out."""

    def rendered(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> Any:
        """Return the ids or the text of a first prompt, or raise a ConfigError."""
        ...

    def observation(
        self, before: Sequence[Message], added: Sequence[Message], ids: Sequence[int], schemas: Sequence[dict[str, Any]]
    ) -> Any:
        """Return the ids of messages after a turn, or raise a ConfigError."""
        ...


class TemplateForm:
    """The form that one chat template takes.

    Args:
        codec: Renders with the template.
    """

    def __init__(self, codec: Renderer) -> None:
        self._codec = codec
        self._fields: dict[tuple[str, str], bool] = {}
        self.needs_blocks = False
        """Whether text is shown only as a block."""
        plain = self._shows([], "user", [])
        self.needs_blocks = not plain and self._shows([], "user", [], as_block=True)
        self.is_known = plain or self.needs_blocks
        """Whether rendering shows anything; else messages stay in the general form."""
        self.takes_system = self._shows([], "system", [_USER])
        """Whether a system message may begin a conversation."""
        self.takes_later_system = (
            self._shows([_USER], "system", [])
            and self._shows([_USER], "system", [_USER])
            and self._shows([_USER, _SAID, _USER], "system", [])
            and self._appends("system")
        )
        """Whether a system message may be anywhere."""
        forms = [(content, given) for content in ("", None) for given in ("object", "text")]
        content, given = next((form for form in forms if self._shows_call(*form)), ("", "object"))
        self.takes_objects = given == "object"
        """Whether the arguments of a call may be an object."""
        self.needs_null = content is None
        """Whether calls are shown only in a message whose content is null."""
        self.needs_ids = self._shows_call(content, given) and not self._shows_call(content, given, has_id=False)
        """Whether each call must have an id."""
        self.needs_descriptions = not self._renders_tool({}) and self._renders_tool({"description": ""})
        """Whether each tool must have a description."""
        self.takes_users_in_a_row = self._shows([_USER], "user", []) and self._shows([_USER], "user", [_USER])
        self.needs_user_before_greeting = (
            not self._shows([], "assistant", [_USER]) or self._confuses_greetings()
        ) and self._shows([_EMPTY], "assistant", [_USER])
        """Whether a greeting of the assistant's is shown as one only behind a user message."""

    def _shows(self, before: list[Message], role: str, after: list[Message], as_block: bool = False) -> bool:
        """Return whether the template shows the text of a message with this role."""
        contents = [[{"type": "text", "text": text}] if as_block else text for text in _MARKS]
        try:
            one, other = (
                self._codec.rendered(
                    [
                        *map(self._blocks, before),
                        self._blocks({"role": role, "content": each}),
                        *map(self._blocks, after),
                    ],
                    [],
                )
                for each in contents
            )
        except ConfigError:
            return False
        return bool(one != other)

    def _shows_call(self, content: str | None, given: str, has_id: bool = True) -> bool:
        """Return whether the template shows an argument of a call in a message with this content."""
        shown: list[Any] = []
        for text in _MARKS:
            arguments: Any = {"a": text}
            function = {"name": "f", "arguments": arguments if given == "object" else json.dumps(arguments)}
            call = {**({"id": "call00000"} if has_id else {}), "type": "function", "function": function}
            said: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
            answer: Message = {"role": "tool", "content": "x", "tool_call_id": "call00000", "name": "f"}
            try:
                shown.append(self._codec.rendered([self._blocks(each) for each in (_USER, said, answer)], []))
            except ConfigError:
                return False
        return bool(shown[0] != shown[1])

    def _confuses_greetings(self) -> bool:
        """Return whether the template, where there are tools, writes a first message as a user's, whatever its role."""
        function = {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        try:
            one, other = (
                self._codec.rendered([self._blocks(each) for each in (first, _USER)], tools) for first in (_SAID, _USER)
            )
        except ConfigError:
            return False
        return bool(one == other)

    def _renders_tool(self, fields: Mapping[str, str]) -> bool:
        function = {"name": "f", **fields, "parameters": {"type": "object", "properties": {}}}
        try:
            self._codec.rendered([self._blocks(_USER)], [{"type": "function", "function": function}])
        except ConfigError:
            return False
        return True

    def _appends(self, role: str) -> bool:
        try:
            one, other = (
                self._codec.observation([_USER, _SAID], [{"role": role, "content": text}, _USER], [0], [])
                for text in _MARKS
            )
        except ConfigError:
            return False
        return bool(one != other)

    def _shows_field(self, role: str, field: str) -> bool:
        """Return whether the template shows a further field of messages with this role."""
        key = (role, field)
        if key not in self._fields:
            before = [] if role in ("system", "user") else [self._blocks(_USER)]
            messages = [[*before, self._blocks({"role": role, "content": "x", field: text})] for text in _MARKS]
            try:
                one, other = (self._codec.rendered([*each, self._blocks(_USER)], []) for each in messages)
                self._fields[key] = one != other
            except ConfigError:
                self._fields[key] = False
        return self._fields[key]

    def row(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of a row in the form of the template, as `prompt` does.

        Raises:
            MessageError: A message has a field that the template does not show.
        """
        for index, message in enumerate(messages):
            for field, value in further_fields(message).items():
                if not self._shows_field(str(message["role"]), field):
                    words = f"the chat template does not show its {field!r}, {show(value)}"
                    raise MessageError(f"{words}; leave it out, or write it into the content", index, message["role"])
        return self.prompt(messages, keep=True)

    def prompt(self, messages: Sequence[Message], keep: bool = False) -> list[Message]:
        """Return all messages of a conversation in the form of the template.

        Args:
            messages: The messages.
            keep: Whether further fields stay, which `row` has looked at.
        """
        if not self.is_known:
            return list(messages)
        leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
        written = self._written(messages[len(leading) :], messages, keep)
        if written and written[0]["role"] == "assistant" and self.needs_user_before_greeting:
            written.insert(0, dict(_EMPTY))
        if leading:
            system: Message = {"role": "system", "content": _joined([each.get("content") or "" for each in leading])}
            if keep:
                system |= {key: value for each in leading for key, value in further_fields(each).items()}
            written = [system if self.takes_system else {**system, "role": "user"}, *written]
        return [self._blocks(message) for message in self._in_turns(written)]

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
        written = self._written(messages, [said, *messages])
        return [self._blocks(message) for message in self._in_turns(written)]

    def _blocks(self, message: Message) -> Message:
        """Return a message with its text as a block, if the template shows nothing else."""
        if not self.needs_blocks or not isinstance(message.get("content"), str):
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _written(
        self, messages: Sequence[Message], conversation: Sequence[Message], keep: bool = False
    ) -> list[Message]:
        """Return messages with the fields that templates know, and later system messages in a role that is shown.

        Args:
            messages: The last messages of `conversation`.
            conversation: Messages with the calls that those of tools answer.
            keep: As for `prompt`.
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
                if self.needs_null and calls and not content:
                    made["content"] = None
            elif role == "tool":
                next_name = waiting.pop(0) if waiting else message.get("name") or "error"
                answered = message.get("tool_call_id")
                made |= {"tool_call_id": answered} if answered else {}
                made["name"] = names.get(answered, next_name) if answered else next_name
            elif role in SYSTEM_ROLES:
                made["role"] = "system" if self.takes_later_system else "user"
            if keep:
                made |= further_fields(message)
            if index >= first:
                written.append(made)
        return written

    def assistant_fields(self, message: Message) -> Message:
        """Return the calls and the reasoning of an assistant's message as the template expects them."""
        made: Message = {}
        if message.get("reasoning_content"):
            made["reasoning_content"] = message["reasoning_content"]
        if message.get("tool_calls"):
            made["tool_calls"] = [self._call(call, index) for index, call in enumerate(message["tool_calls"])]
        return made

    def _call(self, call: Mapping[str, Any], index: int) -> dict[str, Any]:
        function, given = call["function"], {"id": call["id"]} if call.get("id") else {}
        if self.needs_ids and not given:
            given = {"id": f"call{index:05}"}
        arguments: Any = function.get("arguments") or ""
        if self.takes_objects:
            arguments = _object(arguments) if isinstance(arguments, str) else arguments
        elif isinstance(arguments, str):
            arguments = arguments.strip() or "{}"
        else:
            arguments = json.dumps(arguments, ensure_ascii=False)
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


def _object(text: str) -> Any:
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
        if content:
            parts += [{"type": "text", "text": _BETWEEN}] if parts else []
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
