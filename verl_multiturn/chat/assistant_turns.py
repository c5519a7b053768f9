"""The turns of the assistant in a first prompt: whether the template begins one for each of its messages with calls.

DeepSeek-V3 shows all the calls of a row, and begins a turn for the first message that has some, and for no later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from verl_multiturn.chat.images import Message
from verl_multiturn.chat.template_form import MessageError, TemplateForm

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

    def check(self, messages: Sequence[Message]) -> None:
        """Refuse a message with calls that the template writes into the turn of another role.

        Args:
            messages: The messages of a first prompt.

        Raises:
            MessageError: There is such a message.
        """
        calling = [index for index, message in enumerate(messages) if message.get("tool_calls")]
        if len(calling) > 1 and not self.repeats_calls:
            raise MessageError(
                "the chat template begins no turn of the assistant's for a second message with tool_calls; write the "
                f"earlier calls into the content of messages, {_OTHER_TEMPLATE}",
                calling[1],
                "assistant",
            )

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
