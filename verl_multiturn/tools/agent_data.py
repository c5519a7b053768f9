"""`AgentData`: the object that verl 0.9 passes to the `execute` of its tools as `agent_data`, beside the arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from verl_multiturn.chat.images import images_of, is_pil


class AgentData:
    """One conversation, as verl 0.9's tools see it. Tools may set attributes of their own on it.

    It holds no token ids: only `Trajectory` has those.

    Args:
        request_id: Id of the conversation.
        tools_kwargs: The row's `tools_kwargs`.
        messages: The list of the conversation's messages, which grows as the conversation goes on. Those that it holds
            now are the prompt.

    Attributes:
        extra_fields: Values that tools leave for the reward function, which finds them in `extra_info`.
    """

    def __init__(
        self, request_id: str, tools_kwargs: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.request_id = request_id
        self._tools_kwargs = tools_kwargs
        self.extra_fields: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.tool_rewards: list[float] = []
        self.turn_scores: list[float] = []
        self.video_data = None
        self.audio_data = None
        self.mm_processor_kwargs: dict[str, Any] = {}
        self._messages = messages
        self._asked = len(messages)

    @cached_property
    def tools_kwargs(self) -> dict[str, Any]:
        """Copy of the row's `tools_kwargs`, one for this conversation."""
        return copy.deepcopy(dict(self._tools_kwargs))

    @property
    def messages(self) -> list[Any]:
        """Copy of the messages so far. The model does not see what a tool changes in it."""
        return [_copied(message) for message in self._messages]

    @property
    def image_data(self) -> list[Any] | None:
        """Copies of the images so far, in order; None without any."""
        return images_of(self.messages) or None

    @property
    def assistant_turns(self) -> int:
        """Number of the model's turns after the prompt so far, with the turn that makes the call."""
        return sum(message["role"] == "assistant" for message in self._messages[self._asked :])

    @property
    def user_turns(self) -> int:
        """Number of turns in which tools were answered before this one."""
        return max(0, self.assistant_turns - 1)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value if isinstance(value, str) or not is_pil(value) else value.copy()
