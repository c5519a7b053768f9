"""Answers of A2A agents: a task put together from its events, and its parts as a response of a tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from a2a.types import Artifact, Message, Part, Role, StreamResponse, Task, TaskState, TaskStatus
from google.protobuf.json_format import MessageToDict

from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.services.pictures import decode_pictures

ENDED = (
    TaskState.TASK_STATE_COMPLETED,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_CANCELED,
    TaskState.TASK_STATE_REJECTED,
)
"""States of a task that has ended."""
_WAITS = (TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_AUTH_REQUIRED)
_WITHOUT_WORDS = {
    TaskState.TASK_STATE_FAILED: "the agent failed and did not say why",
    TaskState.TASK_STATE_CANCELED: "the agent cancelled the task",
    TaskState.TASK_STATE_REJECTED: "the agent rejects the message and does not say why",
}
_TEXTS = ("text/", "application/json", "application/xml", "application/yaml")
"""Beginnings of media types whose bytes are text."""
_EXACT = 2**53
"""Integers below it are exact in the numbers of a `data` part, all of which are doubles."""


class Progress:
    """An agent's answer to one message, as far as its events were read.

    Attributes:
        task_id: Id of the task; "" for none yet.
        context_id: Id of the conversation, as the agent named it last.
        state: State of the task.
    """

    def __init__(self) -> None:
        self.task_id = ""
        self.context_id = ""
        self.state: Any = TaskState.TASK_STATE_UNSPECIFIED
        self._message: Message | None = None
        self._said: list[Part] = []
        self._artifacts: dict[str, list[Part]] = {}
        self._history: list[Message] = []

    @property
    def is_over(self) -> bool:
        """Return whether nothing more comes before the next message."""
        return self._message is not None or self.state in ENDED or self.state in _WAITS

    @property
    def is_new(self) -> bool:
        """Return whether the agent has not answered yet."""
        return bool(self.state == TaskState.TASK_STATE_UNSPECIFIED)

    @property
    def waits(self) -> bool:
        """Return whether the task goes on with the next message."""
        return self.state == TaskState.TASK_STATE_INPUT_REQUIRED and self._message is None

    @property
    def is_open(self) -> bool:
        """Return whether the agent has a task that has not ended."""
        return bool(self.task_id and self.state not in ENDED and self._message is None)

    def add(self, event: StreamResponse) -> None:
        """Read one event."""
        kind = event.WhichOneof("payload")
        if kind == "message":
            self._message = event.message
            self.context_id = event.message.context_id or self.context_id
        elif kind == "task":
            self.set(event.task)
        elif kind == "status_update":
            update = event.status_update
            self._name(update.task_id, update.context_id)
            self._set_status(update.status)
        elif kind == "artifact_update":
            change = event.artifact_update
            self._name(change.task_id, change.context_id)
            self._set_artifact(change.artifact, change.append)

    def set(self, task: Task) -> None:
        """Read a task as a whole. It has all that the events before it had."""
        self._name(task.id, task.context_id)
        self._set_status(task.status)
        self._history = list(task.history)
        for artifact in task.artifacts:
            self._set_artifact(artifact, False)

    def _name(self, task_id: str, context_id: str) -> None:
        # Some servers leave out the one or the other in updates.
        self.task_id = task_id or self.task_id
        self.context_id = context_id or self.context_id

    def _set_status(self, status: TaskStatus) -> None:
        self.state = status.state
        self._said = list(status.message.parts)

    def _set_artifact(self, artifact: Artifact, is_more: bool) -> None:
        parts = list(artifact.parts)
        before = self._artifacts.get(artifact.artifact_id, []) if is_more else []
        if before and parts and before[-1].HasField("text") and parts[0].HasField("text"):
            # A text that is streamed comes in pieces. A copy: the part belongs to its event.
            parts[0] = Part(text=before.pop().text + parts[0].text)
        self._artifacts[artifact.artifact_id] = [*before, *parts]

    async def response(self) -> ToolResponse:
        """Return the answer for the model.

        Raises:
            ValueError: The task failed, was rejected or cancelled, or needs a login.
            RuntimeError: A picture cannot be read.
        """
        if self._message is not None:
            return await _response([self._message.parts])
        said = await _response([self._said])
        if self.state == TaskState.TASK_STATE_INPUT_REQUIRED:
            question = said.text or "the agent needs more, and does not say what; send it more"
            return ToolResponse(question, said.image)
        if self.state == TaskState.TASK_STATE_AUTH_REQUIRED:
            raise ValueError(f"the agent wants a login, which it cannot get here{said.text and ': '}{said.text}")
        if self.state != TaskState.TASK_STATE_COMPLETED:
            raise ValueError(said.text or _WITHOUT_WORDS[self.state])
        made = await _response(self._artifacts.values())
        if not said.text or said.text in made.text:  # some agents say it in both places
            said = ToolResponse("", said.image)
        texts = [text for text in (made.text, said.text) if text]
        images = [*(made.image or ()), *(said.image or ())]
        if not texts and not images:
            last = next((each for each in reversed(self._history) if each.role == Role.ROLE_AGENT), Message())
            return await _response([last.parts])
        return ToolResponse("\n".join(texts), images or None)


async def _response(groups: Iterable[Iterable[Part]]) -> ToolResponse:
    texts: list[str] = []
    pictures: list[bytes] = []
    for part in (part for group in groups for part in group):
        kind = part.WhichOneof("content")
        if kind == "raw" and part.media_type.startswith("image/"):
            pictures.append(part.raw)
        else:
            texts.append(_text(part, kind))
    # In a thread: to decode them takes a while, and would block the event loop.
    images = await asyncio.to_thread(decode_pictures, pictures) if pictures else None
    return ToolResponse("\n".join(texts), images)


def _text(part: Part, kind: str | None) -> str:
    if kind == "text":
        return str(part.text)
    if kind == "data":
        # The order of keys is lost on the way.
        return json.dumps(_as_written(MessageToDict(part.data)), ensure_ascii=False, sort_keys=True)
    named = f"file {part.filename!r}" if part.filename else "file"
    if kind == "url":
        return f"[{named}{part.media_type and f' ({part.media_type})'} at {part.url}]"
    if kind == "raw" and part.media_type.startswith(_TEXTS):
        return bytes(part.raw).decode("utf-8", "replace")
    of_kind = f"{part.media_type or 'of no kind'}, {len(part.raw):,} bytes"
    return f"[{named} ({of_kind}) that cannot be shown]" if kind == "raw" else "[an empty part]"


def _as_written(value: Any) -> Any:
    """Return a value of a `data` part with its integers, which the protocol turns into doubles."""
    if isinstance(value, dict):
        return {key: _as_written(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_written(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT else value
