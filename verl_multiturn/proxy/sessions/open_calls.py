"""Which call of a turn each answer of a tool is for, also where its client writes no id.

    the turn has       call X of f · call Y of g · call Z of g
    the answers are    "a" without an id · "b" of g · "c" for Y: "c" is for Y, "b" for Z and "a" for X

The answers with an id have theirs first, then those that name a function have the first call of it that is open, then
the others the first that is open: a client that names some answers has not named the calls of the others. Without that
two requests with the same texts were one prompt, although they answered other calls: the model was shown an answer as
the one to a call that its client had not named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from verl_multiturn.chat.codec import Message


class NamedCall(NamedTuple):
    """A call as answers refer to it."""

    id: str
    """Its id; "" for a call without one."""
    function: str
    """Name of its function."""


def answered_calls(
    messages: Sequence[Message], begin: int, start: int = 0, calls: Sequence[NamedCall] = ()
) -> Iterator[int | None]:
    """Yield for each message of a request the index of the call that it answers, in the last turn before it.

    None is for a message that answers none that is known.

    Args:
        messages: The request's messages.
        begin: Index of the first message that one is yielded for.
        start: Index of the message after a turn of the session's.
        calls: Calls of that turn.
    """
    first = min(begin, len(messages))
    while first > start and messages[first - 1]["role"] != "assistant":
        first -= 1
    if first > start:
        calls = _calls(messages[first - 1])
    while first < len(messages):
        end = first
        while end < len(messages) and messages[end]["role"] != "assistant":
            end += 1
        yield from _answered(calls, messages[first:end])[max(0, begin - first) :]
        if end < len(messages):
            if end >= begin:
                yield None
            calls = _calls(messages[end])
        first = end + 1


def _answered(calls: Sequence[NamedCall], messages: Sequence[Message]) -> list[int | None]:
    """Return for each message between two turns the index of the call that it answers."""
    found: list[int | None] = [None] * len(messages)
    answers = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    if not answers:
        return found
    of_id: dict[str, list[int]] = defaultdict(list)
    of_function: dict[str, list[int]] = defaultdict(list)
    for index in reversed(range(len(calls))):
        of_id[calls[index].id].append(index)
        of_function[calls[index].function].append(index)
    taken: set[int] = set()

    def first_open(indices: list[int]) -> int | None:
        """Return the first of some calls, the last of the list, that has no answer yet; None if all have one."""
        while indices and indices[-1] in taken:
            indices.pop()
        if not indices:
            return None
        taken.add(indices[-1])
        return indices[-1]

    first_of_id = {id_: indices[-1] for id_, indices in of_id.items()}
    known = True
    for index in answers:
        if not (named := messages[index].get("tool_call_id")):
            continue
        if named in first_of_id:
            answered = first_open(of_id[named])
            found[index] = first_of_id[named] if answered is None else answered  # it is answered twice
        elif "" in first_of_id:
            known = False  # it may be the session's id of a call that the client has sent back without one
    if not known:
        return found
    unnamed = [index for index in answers if not messages[index].get("tool_call_id")]
    for index in unnamed:
        if name := messages[index].get("name"):
            found[index] = first_open(of_function[name])
    every = list(reversed(range(len(calls))))
    for index in unnamed:
        if not messages[index].get("name"):
            found[index] = first_open(every)
    return _in_order(found, calls) if unnamed and any(len(indices) > 1 for indices in of_id.values()) else found


def _in_order(found: Sequence[int | None], calls: Sequence[NamedCall]) -> list[int | None]:
    """Return the answers with those to calls of one id in the order of these calls, as if each had the id."""
    of_id: dict[str, list[int]] = defaultdict(list)
    for index in found:
        if index is not None:
            of_id[calls[index].id].append(index)
    ordered = {id_: iter(sorted(indices) if id_ else indices) for id_, indices in of_id.items()}
    return [None if index is None else next(ordered[calls[index].id]) for index in found]


def are_final(messages: Sequence[Message], end: int) -> bool:
    """Return whether no message after the first ones of a request changes which calls their answers are for.

    Args:
        messages: The request's messages.
        end: How many are the first ones.
    """
    following, before = end, end
    while following < len(messages) and messages[following]["role"] not in ("assistant", "tool"):
        following += 1
    if following == len(messages) or messages[following]["role"] == "assistant":
        return True
    while before and (message := messages[before - 1])["role"] != "assistant":
        if message["role"] == "tool" and not message.get("tool_call_id"):
            return False
        before -= 1
    return True


def with_ids(messages: Sequence[Message], start: int, calls: Sequence[NamedCall]) -> Sequence[Message]:
    """Return a request's messages, with the ids of the calls that are answered.

    Args:
        messages: The messages.
        start: Index of the first one that is looked at.
        calls: Calls of the turn before it.
    """
    if all(message["role"] != "tool" or message.get("tool_call_id") for message in messages[start:]):
        return messages
    named = list(messages[:start])
    last = calls
    for message, index in zip(messages[start:], answered_calls(messages, start, start, calls), strict=True):
        if message["role"] == "assistant":
            last = _calls(message)
        if index is not None and not message.get("tool_call_id") and last[index].id:
            message = {**message, "tool_call_id": last[index].id}
        named.append(message)
    return named


def _calls(message: Message) -> list[NamedCall]:
    return [NamedCall(call.get("id") or "", call["function"]["name"]) for call in message.get("tool_calls") or ()]
