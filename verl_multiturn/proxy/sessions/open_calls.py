"""`OpenCalls`: which call of a turn each answer of a tool is for, also where its client writes no id.

    the turn has       call X of f · call Y of g · call Z of g
    the answers are    "a" for Y · "b" of g, without an id: it is for Z · "c" without both: it is for X

An answer without an id is for the first call that has no answer yet: of its function, where it names one, else of all.
Without that two requests with the same texts were one prompt, although they answered other calls: the model was shown
an answer as the one to a call that its client had not named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from verl_multiturn.chat.codec import Message


class NamedCall(NamedTuple):
    """A call as answers refer to it."""

    id: str
    """Its id; "" for a call without one."""
    function: str
    """Name of its function."""


class OpenCalls:
    """The calls of the last turn, while the messages after it are read in order.

    Args:
        calls: The turn's calls.
    """

    def __init__(self, calls: Sequence[NamedCall] = ()) -> None:
        self._begin(calls)

    def _begin(self, calls: Sequence[NamedCall]) -> None:
        self._calls = calls
        self._of_id: dict[str, list[int]] = defaultdict(list)
        self._of_function: dict[str | None, list[int]] = defaultdict(list)
        """Indices of the calls with an id, and of those of a function or of all (None), the first one last."""
        self._first: dict[str, int] = {}
        """Index of the first call with an id."""
        for index in reversed(range(len(calls))):
            self._first[calls[index].id] = index
            self._of_id[calls[index].id].append(index)
            self._of_function[None].append(index)
            self._of_function[calls[index].function].append(index)
        self._answered: set[int] = set()
        self._known = True

    @classmethod
    def before(
        cls, messages: Sequence[Message], end: int, start: int = 0, calls: Sequence[NamedCall] = ()
    ) -> OpenCalls:
        """Return the calls that wait for an answer after the first messages of a request.

        Args:
            messages: The request's messages.
            end: Number of messages that were read.
            start: Index of the message after a turn of the session's.
            calls: Calls of that turn.
        """
        first = end
        while first > start and messages[first - 1]["role"] != "assistant":
            first -= 1
        waiting = cls(calls) if first <= start else cls(_calls(messages[first - 1]))
        for index in range(first, end):
            waiting.answered(messages[index])
        return waiting

    def answered(self, message: Message) -> int | None:
        """Return the index of the call that the next message answers; None if it answers none that is known."""
        if message["role"] == "assistant":
            self._begin(_calls(message))
        if message["role"] != "tool":
            return None
        named = message.get("tool_call_id")
        if named and named not in self._first:
            # It may be the session's id of a call that the client has sent back without one.
            self._known = self._known and "" not in self._first
            return None
        if named:
            index = self._first_open(self._of_id[named])
            index = self._first[named] if index is None else index  # it is answered twice
        else:
            index = self._first_open(self._of_function[message.get("name") or None]) if self._known else None
        if index is not None:
            self._answered.add(index)
        return index

    def _first_open(self, indices: list[int]) -> int | None:
        """Return the first of some calls that has no answer yet, and forget those before it; None: all have one."""
        while indices and indices[-1] in self._answered:
            indices.pop()
        return indices[-1] if indices else None

    def named(self, message: Message) -> Message:
        """Return the next message, with the id of the call that it answers."""
        index = self.answered(message)
        if index is None or message.get("tool_call_id") or not self._calls[index].id:
            return message
        return {**message, "tool_call_id": self._calls[index].id}


def with_ids(messages: Sequence[Message], start: int, calls: Sequence[NamedCall]) -> Sequence[Message]:
    """Return a request's messages, with the ids of the calls that are answered.

    Args:
        messages: The messages.
        start: Index of the first one that is looked at.
        calls: Calls of the turn before it.
    """
    if all(message["role"] != "tool" or message.get("tool_call_id") for message in messages[start:]):
        return messages
    waiting = OpenCalls(calls)
    return [*messages[:start], *map(waiting.named, messages[start:])]


def _calls(message: Message) -> list[NamedCall]:
    return [NamedCall(call.get("id") or "", call["function"]["name"]) for call in message.get("tool_calls") or ()]
