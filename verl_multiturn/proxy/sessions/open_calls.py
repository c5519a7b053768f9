"""`OpenCalls`: which call of a turn each answer of a tool is for, also where its client writes no id.

    the turn has       call X · call Y
    the answers are    "a" for Y · "b" without an id: it is for X, the first call that has no answer yet

Without it two requests with the same texts were one prompt, although they answered other calls: the model was shown
an answer as the one to a call that its client had not named.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_multiturn.chat.codec import Message


class OpenCalls:
    """The calls of the last turn, while the messages after it are read in order.

    Args:
        ids: Ids of the turn's calls; "" for a call without one.
    """

    def __init__(self, ids: Sequence[str] = ()) -> None:
        self._begin(ids)

    def _begin(self, ids: Sequence[str]) -> None:
        self._ids = ids
        self._open = list(range(len(ids)))
        self._known = True

    @classmethod
    def before(cls, messages: Sequence[Message], end: int, start: int = 0, ids: Sequence[str] = ()) -> OpenCalls:
        """Return the calls that wait for an answer after the first messages of a request.

        Args:
            messages: The request's messages.
            end: Number of messages that were read.
            start: Index of the message after a turn of the session's.
            ids: Ids of the calls of that turn.
        """
        first = end
        while first > start and messages[first - 1]["role"] != "assistant":
            first -= 1
        calls = cls(ids) if first <= start else cls(_ids(messages[first - 1]))
        for index in range(first, end):
            calls.answered(messages[index])
        return calls

    def answered(self, message: Message) -> int | None:
        """Return the index of the call that the next message answers; None if it answers none that is known."""
        if message["role"] == "assistant":
            self._begin(_ids(message))
        if message["role"] != "tool":
            return None
        named = message.get("tool_call_id")
        if named and named not in self._ids:
            # It may be the session's id of a call that the client has sent back without one.
            self._known = self._known and all(self._ids)
            return None
        index = self._ids.index(named) if named else next(iter(self._open if self._known else ()), None)
        if index in self._open:
            self._open.remove(index)
        return index

    def named(self, message: Message) -> Message:
        """Return the next message, with the id of the call that it answers."""
        index = self.answered(message)
        if index is None or message.get("tool_call_id") or not self._ids[index]:
            return message
        return {**message, "tool_call_id": self._ids[index]}


def with_ids(messages: Sequence[Message], start: int, ids: Sequence[str]) -> Sequence[Message]:
    """Return a request's messages, with the ids of the calls that are answered.

    Args:
        messages: The messages.
        start: Index of the first one that is looked at.
        ids: Ids of the calls of the turn before it.
    """
    if all(message["role"] != "tool" or message.get("tool_call_id") for message in messages[start:]):
        return messages
    calls = OpenCalls(ids)
    return [*messages[:start], *map(calls.named, messages[start:])]


def _ids(message: Message) -> list[str]:
    return [call.get("id") or "" for call in message.get("tool_calls") or ()]
