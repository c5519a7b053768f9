"""`FirstPrompts`: the text of a first prompt as the template writes it, and the check that it shows its messages.

verl's builder swallows an error of the template, and renders again without the part before the first message: the
system's text, the tools and the first token. So the template itself is called before.

Invariants:
- a first prompt that the template refuses is refused in the template's own words, with message and field;
- a first prompt that was not refused shows its messages and tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import Any

from verl_multiturn.chat.content_check import check_messages_shown, check_tools_shown
from verl_multiturn.chat.images import Message
from verl_multiturn.chat.template_form import MessageError

Write = Callable[[Sequence[Message], Sequence[dict[str, Any]]], str]
"""A function that returns a template's text for a first prompt, or raises the template's error."""
# A text that no template writes on its own.
_MARK = "q7z"
_USER: Message = {"role": "user", "content": "x"}


class RequiredPart(Enum):
    """The part of a first prompt's messages and tools that must be in it."""

    ALL = auto()
    OTHERS = auto()
    """Everything but messages of the assistant: the model wrote them, and the template may shorten them."""
    NOTHING = auto()


class FirstPrompts:
    """A template's first prompts as text.

    Args:
        write: Writes them.
        first_token: The token that begins a text, as text; None where the tokenizer has none.
    """

    def __init__(self, write: Write, first_token: str | None) -> None:
        self._write = write
        self._first_token = first_token

    def write(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> str:
        """Return the text of a prompt.

        Raises:
            MessageError: The template refuses it.
        """
        try:
            return self._write(messages, schemas)
        except Exception as error:  # a template is other people's code and may raise anything
            raise refusal(messages, schemas, self._write, error) from error

    def check(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], check: RequiredPart) -> None:
        """Refuse messages and tools of which the template refuses or does not show a part.

        Args:
            messages: The messages.
            schemas: The tools' schemas.
            check: The texts that must be shown.

        Raises:
            MessageError: There is such a part.
        """
        text = self.write(messages, schemas)
        check_messages_shown(messages, text, with_assistant=check is RequiredPart.ALL)
        check_tools_shown(schemas, messages, text, self._shows_tools)
        if not text.startswith(self._beginning):
            raise MessageError(f"the prompt does not begin with {self._beginning!r}; use another chat template")
        calling = [index for index, message in enumerate(messages) if message.get("tool_calls")]
        if check is RequiredPart.ALL and len(calling) > 1 and not self._repeats_calls:
            raise MessageError(
                "the chat template writes calls in a second turn without the header of the assistant's turn, as if "
                "the message before went on; leave earlier calls out, or use another chat template",
                calling[1],
                "assistant",
            )

    @cached_property
    def _beginning(self) -> str:
        """The token with which the template begins a plain prompt, as text; "" where it begins with text."""
        first = self._first_token
        return first if first and self._text([_USER]).startswith(first) else ""

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template shows tools with their descriptions."""
        function = {"name": "probe", "description": _MARK, "parameters": {"type": "object", "properties": {}}}
        return _MARK in self._text([_USER], [{"type": "function", "function": function}])

    @cached_property
    def _repeats_calls(self) -> bool:
        """Whether a second turn with calls begins as the first does. DeepSeek's templates forget its header."""
        for content, text in (("", False), ("", True), (None, True)):
            messages: list[Message] = []
            for name in ("k3w", _MARK):
                arguments: Any = "{}" if text else {}
                call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
                messages += [
                    {"role": "user", "content": "w8v"},
                    {"role": "assistant", "content": content, "tool_calls": [call]},
                    {"role": "tool", "content": "x", "tool_call_id": "call00000", "name": name},
                ]
            first, _, rest = self._text([*messages, _USER]).partition("w8v")[2].partition("k3w")
            second, found, _ = rest.partition("w8v")[2].partition(_MARK)
            if found:
                return first.strip() == second.strip()
        return True

    def _text(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text of a prompt; "" where the template refuses it."""
        try:
            return self._write(messages, schemas)
        except Exception:  # a template is other people's code and may raise anything
            return ""


def refusal(
    messages: Sequence[Message],
    schemas: Sequence[dict[str, Any]],
    write: Write,
    error: Exception,
) -> MessageError:
    """Return the refusal of messages that a template cannot render, with the message and the field that it refuses.

    Args:
        messages: The messages.
        schemas: The tools' schemas.
        write: Renders messages.
        error: The template's own error.
    """

    def fails(tried: Sequence[Message], shown: Sequence[dict[str, Any]] = schemas) -> bool:
        try:
            write(tried, shown)
        except Exception as again:  # a template is other people's code and may raise anything
            return str(again) == str(error)
        return False

    said = f"{error}"
    if schemas and not fails(messages, ()):
        return MessageError(f"the chat template refuses the tools: {said}; change them, or use another chat template")
    index = next((index for index in range(len(messages)) if fails(messages[: index + 1])), None)
    if index is None:
        return MessageError(f"the chat template refuses the messages: {said}; change them, or use another template")
    message, field = messages[index], "role at this place"
    without: list[tuple[str, Message]] = [("content", {**message, "content": "x"})]
    if message.get("tool_calls"):
        bare = {key: value for key, value in message.items() if key != "tool_calls"}
        without.insert(0, ("tool_calls", {**bare, "content": message.get("content") or "x"}))
    field = next((name for name, each in without if not fails([*messages[:index], each])), field)
    return MessageError(
        f"the chat template refuses its {field}: {said}; change it, or use another chat template",
        index,
        str(message["role"]),
    )
