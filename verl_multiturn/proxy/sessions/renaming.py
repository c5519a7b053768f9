"""`Renaming`: which calls of the session a request speaks of, where its client gives them ids of its own.

Agno numbers the calls of each request anew, and others write ids in the form of another provider. The messages of such
a request are compared, kept and rendered with the ids that the session gave:

    the request has    call c0 · answer to c0 · call c1 · answer to c1
    it is read as      call X  · answer to X  · call Y  · answer to Y

Invariants:
- a renaming is one for one, over all ids of a request, those mapped to themselves among them;
- an id is learnt at a call of the model's only. An answer speaks of a call before it, or its id is mapped to itself;
- an id that the session gave is mapped to itself. So calls that look the same are distinguished by a client that can.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl_multiturn.chat.codec import Message
from verl_multiturn.proxy.sessions.canonical import CanonicalMessage


@dataclass(frozen=True, eq=False, slots=True)
class Renaming:
    """The ids of a request up to one of its messages."""

    stands_for: Mapping[str, str]
    """Ids of the session by those of the request; empty as long as each is mapped to itself."""
    written: Mapping[str, str]
    """The same, the other way round."""

    def reads(
        self,
        message: Message,
        one: CanonicalMessage,
        other: CanonicalMessage,
        given: Container[str],
        before: Iterable[Message],
    ) -> Renaming | None:
        """Return this with the ids of a message that is read as another one with an equal key; None if it cannot be.

        Args:
            message: The request's message.
            one: The same, as it is compared.
            other: The session's message.
            given: Ids that the session gave to calls.
            before: The request's messages before this one.
        """
        if not one.ids or not other.ids:
            return self.through([message])
        if one.ids == other.ids and not self.stands_for:
            return self
        pairs = list(zip(one.ids, other.ids, strict=True))
        for id_, own in pairs:
            learnt = message["role"] == "assistant" and own in given and id_ not in given
            if not learnt and self.stands_for.get(id_, id_) != own:
                return None
        known = self if self.stands_for else self._with((each, each) for each in _ids(before))
        return known and known._with(pairs)

    def through(self, messages: Iterable[Message]) -> Renaming | None:
        """Return this with the ids of further messages, which nothing is known of; None if they contradict it."""
        if not self.stands_for:
            return self
        return self._with((each, self.stands_for.get(each, each)) for each in _ids(messages))

    def applied(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with the session's ids."""
        if not self.stands_for:
            return messages
        return [self._applied(message) for message in messages]

    def _applied(self, message: Message) -> Message:
        own = self.stands_for
        if message.get("tool_calls"):
            calls = [{**call, "id": own.get(given := call.get("id", ""), given)} for call in message["tool_calls"]]
            return {**message, "tool_calls": calls}
        if message.get("tool_call_id"):
            return {**message, "tool_call_id": own.get(message["tool_call_id"], message["tool_call_id"])}
        return message

    def _with(self, pairs: Iterable[tuple[str, str]]) -> Renaming | None:
        """Return this with further ids; None if it would not be one for one."""
        stands_for, written = {**self.stands_for}, {**self.written}
        for id_, own in pairs:
            if stands_for.setdefault(id_, own) != own or written.setdefault(own, id_) != id_:
                return None
        return Renaming(stands_for, written)


AS_WRITTEN = Renaming({}, {})
"""Each id is mapped to itself."""


def _ids(messages: Iterable[Message]) -> Iterator[str]:
    """Return all ids that are in messages."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if call.get("id"):
                yield call["id"]
        if message.get("tool_call_id"):
            yield message["tool_call_id"]
