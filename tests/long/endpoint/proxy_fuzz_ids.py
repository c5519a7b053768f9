"""Agents of `benchmarks.proxy_fuzz` that write ids of their own, or name items by their ids; and the check of the ids.

Three acts: calls have other ids throughout a request, as with Agno; ids are put in the place of others, so that calls
and answers no longer belong together as they did; items are named by their ids, known ones and such as the session
never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.long.endpoint.proxy_fuzz_agents import Done, Fuzzed, Known, Plan
from tests.long.endpoint.proxy_fuzz_wire import RESPONSES, Message, renamed
from verl_multiturn.proxy.http.parsing import parse_body
from verl_multiturn.proxy.protocols import PROTOCOLS
from verl_multiturn.proxy.protocols.requests import Sent

_ELSEWHERE: deque[tuple[str, str]] = deque(maxlen=200)
"""Sessions and ids of items that they sent."""


async def rename(agent: Fuzzed) -> None:
    """Send a history with other ids for its calls, one for one: it continues the same completion."""
    found = _followed(agent)
    if found is None:
        return
    known, messages, plan = found
    chance, ids = agent.random, _bound(agent, messages)
    number, width = chance.choice((0, 0, 7)), chance.choice((1, 8))
    ids = ids if chance.random() < 0.8 else ids[chance.randrange(len(ids)) :]
    names = {own: f"call_{index:0{width}x}" for index, own in enumerate(ids, number)}
    ask = agent.ask(messages, known.ask.tools, known.ask.path)
    await agent.get(replace(ask, ids=names), plan)


async def cross(agent: Fuzzed) -> None:
    """Send a history whose ids are not renamed one for one: the model has to get the sent text."""
    found = _followed(agent)
    if found is None:
        return
    known, messages, plan = found
    chance, ids = agent.random, _bound(agent, messages)
    one, other = ids[-1], chance.choice(ids)
    kind = chance.choice(("joined", "crossed", "answers", "calls"))
    names = {one: "joined", other: "joined"} if kind == "joined" else {one: other, other: one}
    if kind in ("answers", "calls"):
        names = {one: chance.choice((other, "nobody"))}
    messages = [
        message if (kind == "answers" and "tool_calls" in message) or (kind == "calls" and message["role"] == "tool")
        # Not by `ids`: requests that continue this one have to have the same ones.
        else renamed(message, names)
        for message in messages
    ]  # fmt: skip
    changed = one != other and kind in ("joined", "crossed") and any(own == one for own, _, _ in known.received.calls)
    plan = Plan(plan.shown, rewrites=known if changed else None, crosses=changed)
    await agent.get(agent.ask(messages, known.ask.tools, known.ask.path), plan)


async def refer(agent: Fuzzed) -> None:
    """Name the items of an answer by their ids, or items that the session never sent."""
    chance, known = agent.random, agent.some()
    if known is None or not known.received.id:
        return
    got = known.received
    _ELSEWHERE.append((agent.session.id, got.id))
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": given}}
        for id_, name, given in got.calls
    ]
    said: Message = {"role": "assistant", "content": got.content, "reasoning_content": got.reasoning}
    if calls:
        said["tool_calls"] = calls
    shown = list(known.shown)
    messages = [*known.ask.messages, said, *agent.following(known, shown)]
    ask = replace(agent.ask(messages, known.ask.tools, RESPONSES), more={"store": None})
    at = len(known.ask.messages)
    if chance.random() < 0.7:
        await agent.get(replace(ask, refers={**known.ask.refers, at: got.id}), Plan(shown, known))
        return
    others = [item for session, item in _ELSEWHERE if session != agent.session.id]
    named = chance.choice([*others[-5:], "", "unknown", f"{got.id}x", got.id[:-1]])
    # Without a text its calls are named, by ids that are known. Within a stream that has begun, the refusal would be an
    # event.
    messages[at] = {"role": "assistant", "content": "x"}
    ask = replace(ask, messages=messages, stream=False, refers={at: named})
    await agent.refused(ask, "the id of an item that this session sent")


ACTS: Mapping[Callable[[Fuzzed], Awaitable[None]], int] = {rename: 40, cross: 20, refer: 10}
"""Their actions, and how often."""


def _followed(agent: Fuzzed) -> tuple[Known, list[Message], Plan] | None:
    """Return a completion, the messages that continue it, and their plan; None where there are no ids to change."""
    for _ in range(8):
        known = agent.some()
        if known is None:
            return None
        messages, plan = agent.after(known)
        if _bound(agent, messages):
            return known, messages, plan
    return None


def _bound(agent: Fuzzed, messages: Sequence[Message]) -> list[str]:
    """Return the ids that the session gave to the calls in messages, of turns that have all of theirs."""
    found: list[str] = []
    for message in messages:
        ids = [call.get("id") for call in message.get("tool_calls", ())]
        found += [each for each in ids if all(ids) and each in agent.session.forest.called]
    return list(dict.fromkeys(found))


def misplaced(done: Done, conversation: Sequence[Message], sent_items: Sent) -> str:
    """Return which answer is shown to another call than the client names; "" if there is none.

    Args:
        done: A request.
        conversation: The messages that were rendered for it.
        sent_items: Finds the messages of the session, for items that are named by their ids.
    """
    sent = PROTOCOLS[done.ask.path].read(parse_body(done.ask.body()), sent_items).messages
    if len(sent) != len(conversation):
        return f"{len(sent)} messages are {len(conversation)}"
    unnamed = {place for place, id_ in _calls(sent) if not id_}
    for index, message in enumerate(sent):
        named = message.get("tool_call_id")
        if not named:
            continue
        own = {place for place, id_ in _calls(sent) if id_ == named}
        shown_id = conversation[index].get("tool_call_id")
        shown = {place for place, id_ in _calls(conversation) if id_ == shown_id}
        if shown - unnamed != own:
            return f"answer {index} of {named!r} to {sorted(own)} is shown as one to {sorted(shown)}: {sent}"
    return ""


def _calls(messages: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[int, int], str]]:
    """Return the places and ids of the calls in messages."""
    return [
        ((index, number), call.get("id") or "")
        for index, message in enumerate(messages)
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
