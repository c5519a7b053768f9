"""The requests of a session, as its record has them."""

from typing import Any

import pytest

from tests.agent_sessions import ADD, Agent, answer, call_text, echo, make_run, turns, user
from tests.proxy_clients import FakeSession, connect, post, serving
from tests.proxy_clients import answer as read
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError
from verl_multiturn.proxy.sessions.journal import Journal
from verl_multiturn.rollout.outcome import SessionRequest


def said(request: SessionRequest) -> dict[str, Any]:
    """Return a request without its time and tools."""
    names = ("parent", "shared", "messages", "wishes", "generations", "delivered", "order", "refused")
    return {name: getattr(request, name) for name in names}


PLAIN = {"parent": None, "shared": 0, "wishes": {}, "delivered": True, "refused": None}


async def test_requests_in_their_order() -> None:
    agent = Agent(make_run(turns(call_text("add", {"a": 1}), "two", "other", "again")))
    asked = [user("1+1?")]
    first = await agent.ask(asked, [ADD])
    answered = [*asked, echo(first), *answer(first, "2")]
    second = await agent.ask(answered, [ADD], max_tokens=50, stop=["!"])
    await agent.ask([user("another")], lost=True)
    await agent.ask([*answered, echo(second), user("sure?")], [ADD], reads_calls=False)
    found = agent.session.journal.requests()
    assert [request.protocol for request in found] == ["chat"] * 4
    assert [request.tools for request in found] == [[ADD], [ADD], (), [ADD]]
    assert found[0].at <= found[3].at
    assert list(map(said, found)) == [
        {**PLAIN, "messages": asked, "generations": [0], "order": 0},
        {
            **PLAIN,
            "parent": 0,
            "shared": 2,
            "messages": answer(first, "2"),
            "wishes": {"max_tokens": 50, "stop": ["!"]},
            "generations": [1],
            "order": 1,
        },
        {**PLAIN, "messages": [user("another")], "generations": [2], "delivered": False, "order": 2},
        {
            **PLAIN,
            "parent": 1,
            "shared": 4,
            "messages": [user("sure?")],
            "wishes": {"tool_choice": "none"},
            "generations": [3],
            "order": 3,
        },
    ]


async def test_a_kept_completion_answers_the_next_identical_request() -> None:
    agent = Agent(make_run(turns("a")))
    await agent.ask([user("q")], lost=True)
    await agent.ask([user("q")])
    found = agent.session.journal.requests()
    assert [(request.generations, request.delivered, request.order) for request in found] == [
        ([0], False, 0),
        ([0], True, 1),
    ]


async def test_counts_and_refusals() -> None:
    agent = Agent(make_run(turns("a"), prompt_length=60))
    await agent.session.count_tokens(ChatRequest([user("q")]))
    with pytest.raises(RefusedError):
        await agent.ask([user("long " * 100)])
    await agent.ask([user("q")])
    agent.session.returned()
    with pytest.raises(RefusedError):
        await agent.ask([user("too late")])
    found = agent.session.journal.requests()
    assert [(request.protocol, request.refused, request.generations) for request in found] == [
        ("count_tokens", None, []),
        ("chat", "context_length_exceeded", []),
        ("chat", None, [0]),
        ("chat", "session_over", []),
    ]
    assert [len(request.messages) for request in found] == [1, 1, 1, 0]


async def test_a_request_that_cannot_be_read() -> None:
    session = FakeSession()
    async with serving(session) as (_, access):
        reader, writer = await connect(access)
        writer.write(post(access, {"messages": 3}))
        assert (await read(reader))[0] == 400
        writer.close()
    (request,) = session.journal.requests()
    assert (request.protocol, request.refused, request.messages) == ("chat", "invalid_request_error", ())


def test_an_agent_that_goes_on_asking_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.proxy.sessions.journal._MOST", 2)
    journal = Journal()
    request = ChatRequest(messages=[user("1+1?")])
    for _ in range(3):
        journal.samples(journal.begin(request, "chat"))
        journal.refuse("chat", "bad_request")
    assert [(each.protocol, each.refused) for each in journal.requests()] == [("chat", None), ("chat", "bad_request")]
    assert journal.events == [("request", 0, 0), ("samples", 0, 0)]
