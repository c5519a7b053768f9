"""The turns of the assistant in a first prompt: whether the template begins one for each of its messages.

Some templates show all that a row says, and write a message of the assistant's into another role's turn:
- with tools, Llama 3.1 takes the first message for the user's, whatever its role;
- DeepSeek-V3 begins a turn for the first message with calls, and for no later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from verl_multiturn.chat.images import Message
from verl_multiturn.chat.messages import SYSTEM_ROLES
from verl_multiturn.chat.template_form import MessageError, TemplateForm

_MARK = "q7z"
_OTHER_TEMPLATE = "or use another chat template"


class AssistantTurns:
    """The assistant's turns as one template writes them, found out by small conversations.

    Args:
        write: Returns the template's text of a first prompt; "" where it cannot render one.
        form: The form in which the template takes messages.
    """

    def __init__(self, write: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str], form: TemplateForm) -> None:
        self._write = write
        self._form = form

    def check(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> None:
        """Refuse messages of the assistant that the template writes into the turn of another role.

        Args:
            messages: The messages of a first prompt.
            schemas: The tools' schemas; empty without tools.

        Raises:
            MessageError: There is such a message.
        """
        first = next((index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), None)
        if schemas and first is not None and messages[first]["role"] == "assistant" and self.greets_as_user:
            raise MessageError(
                "where there are tools, the chat template writes the first message into the user's turn; put a user "
                f"message before it, {_OTHER_TEMPLATE}",
                first,
                "assistant",
            )
        calling = [index for index, message in enumerate(messages) if message.get("tool_calls")]
        if len(calling) > 1 and not self.repeats_calls:
            raise MessageError(
                "the chat template begins no turn of the assistant's for a second message with tool_calls; write the "
                f"earlier calls into the content of messages, {_OTHER_TEMPLATE}",
                calling[1],
                "assistant",
            )

    @cached_property
    def greets_as_user(self) -> bool:
        """Tell whether the template writes a greeting of the assistant's as the user's where there are tools."""
        function = {"name": "probe", "description": "x", "parameters": {"type": "object", "properties": {}}}
        schemas = [{"type": "function", "function": function}]
        one, other = (
            self._write([{"role": role, "content": _MARK}, {"role": "user", "content": "x"}], schemas)
            for role in ("assistant", "user")
        )
        return bool(one) and one == other

    @cached_property
    def repeats_calls(self) -> bool:
        """Tell whether the template begins a second turn with calls as it begins the first."""
        names = ("firstq7z", "laterq7z")
        dialogue: list[Message] = []
        for name in names:
            call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
            dialogue += [
                {"role": "user", "content": "k3w"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "x", "tool_call_id": "call00000", "name": name},
            ]
        parts = self._write(self._form.prompt([*dialogue, {"role": "user", "content": "x"}]), []).split("k3w")
        if len(parts) != 3 or not all(name in part for name, part in zip(names, parts[1:], strict=True)):
            return True  # what is not shown is refused as such
        begins = {part.partition(name)[0] for name, part in zip(names, parts[1:], strict=True)}
        return len(begins) == 1
