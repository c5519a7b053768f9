"""Sessions of agents are made again from their records, through the forest as it is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.agent_sessions import Agent, call_text, echo, make_run, tiny_template, turns, user
from tests.harness_requests import PROGRAMS
from tests.support.replayed_sessions import drawn, program, recorded_session, replayed, with_engine
from tests.support.session_play import TOOL, PlayedChat
from tests.unit.proxy.test_opponents import Models, opponents, server
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult
from verl_multiturn.proxy.protocols.requests import RefusedError
from verl_multiturn.proxy.sessions.forest import Forest
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.replay.engine import ReplayEngine
from verl_multiturn.rollout.limits import Limits

ROOMY = {"prompt_length": 65_536, "response_length": 65_536}


def chat() -> PlayedChat:
    template = tiny_template()
    turns = [
        "It is so.<|im_end|>",
        "Let me see. " + call_text(TOOL, {"word": "a", "count": 1}) + "<|im_end|>",
        "STOPq7 and more<|im_end|>",
        "<tool_call>{</tool_call><|im_end|>",
        "Cut",
    ]
    ends = template.end_ids
    return PlayedChat(template.tokenizer, template.codec, template.parser, ends, turns, ["What?", "<|im_end|>", "a b"])


async def replay_of(record: dict[str, Any], **settings: Any) -> list[Any]:
    stage = ReplayEngine()
    run = with_engine(make_run(lambda *_: [], **ROOMY, **settings), stage, tiny_template())
    try:
        return await replayed(record, run, stage)
    finally:
        run.renderer.close()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_is_made_again(name: str) -> None:
    run = make_run(lambda *_: [], **ROOMY)
    record = await program(name, run, tiny_template(), random.Random(name))
    run.renderer.close()
    assert record["session"]["events"]
    assert await replay_of(record) == []


@pytest.mark.parametrize("seed", range(12))
async def test_a_session_of_chance_is_made_again(seed: int) -> None:
    run = make_run(lambda *_: [], **ROOMY)
    record = await drawn(chat(), run, tiny_template(), f"replay {seed}")
    run.renderer.close()
    assert await replay_of(record) == []


ROLES = Roles(("white", "black"), ("white",))


async def played_in_roles() -> dict[str, Any]:
    """Record a session of two roles: the same asked by both, one's text sent by the other, an unknown name, a loss."""
    run = make_run(turns(*"abcdefg"), roles=ROLES, **ROOMY)
    agent = Agent(run)
    first = await agent.ask([user("x")], model="white", n=2)
    await agent.ask([user("x")], model="black")
    await agent.ask([user("x"), echo(first), user("y")], model="black", lost=True)
    await agent.ask([user("x"), echo(first), user("y")], model="white")
    with pytest.raises(RefusedError):
        await agent.ask([user("x")], model="red")
    await agent.ask([user("x"), echo(first), user("y")], model="black")
    result = AgentResult(roles={"white": 1.0, "black": -1.0}, completions={f"chatcmpl-{first.id}": 0.5})
    record = await recorded_session(agent.session, run, AgentEnd("returned", result))
    run.renderer.close()
    return record


async def test_a_session_of_roles_is_made_again() -> None:
    record = await played_in_roles()
    assert [(each["role"], each["cause"]) for each in record["generations"]] == [
        ("white", None),
        ("white", None),
        ("black", "not_trained_role"),
        ("black", "not_trained_role"),
        ("white", None),
    ]
    assert [each["role"] for each in record["session"]["requests"]][-2:] == ["red", "black"]
    assert verify_record(record).violations == []
    assert await replay_of(record, roles=ROLES) == []
    both = Roles(ROLES.names, ROLES.names)
    assert {each.field for each in await replay_of(record, roles=both)} >= {"session.trained", "rows"}


async def test_a_session_with_an_opponent_is_made_again_without_its_server() -> None:
    async with server("b1", "b2") as (address, _):
        both = Roles(ROLES.names, ROLES.names)
        run = make_run(turns("w1", "w2"), roles=both, opponents=opponents(Models(address, [0]), [0]), **ROOMY)
        agent = Agent(run)
        first = await agent.ask([user("x")], model="white")
        await agent.ask([user("w1")], model="black")
        await agent.ask([user("w1"), user("w2")], model="black", lost=True)
        await agent.ask([user("x"), echo(first), user("b1")], model="white")
        end = AgentEnd("returned", AgentResult(roles={"white": 1.0, "black": -1.0}))
        record = await recorded_session(agent.session, run, end)
        await run.opponents.aclose()  # type: ignore[union-attr]
        run.renderer.close()
    assert [each["opponent"] for each in record["session"]["requests"]] == [None, "step 0", "step 0", None]
    assert [each["delivered"] for each in record["session"]["requests"]] == [True, True, False, True]
    assert verify_record(record).violations == []
    assert await replay_of(record, roles=both) == []


async def test_another_place_in_the_forest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(lambda *_: [], **ROOMY)
    record = await program("codex", run, tiny_template(), random.Random(0))
    match = Forest.match

    def alone(forest: Forest, messages: Any, tools: str, renamed: bool = True) -> Any:
        return match(Forest(), messages, tools, renamed)

    monkeypatch.setattr(Forest, "match", alone)
    (difference, *_) = await replay_of(record)
    # The ids are the same, and a root of their own: the second turn has more room.
    assert (difference.turn, difference.field) == (1, "generations.max_tokens")


async def test_a_smaller_budget_is_named() -> None:
    run = make_run(lambda *_: [], **ROOMY)
    record = await program("codex", run, tiny_template(), random.Random(0))
    stage = ReplayEngine()
    small = with_engine(make_run(lambda *_: [], **{**ROOMY, "response_length": 60_000}), stage, tiny_template())
    assert small.limits == Limits(65_536, 60_000)
    (difference, *_) = await replayed(record, small, stage)
    assert (difference.turn, difference.field) == (0, "generations.max_tokens")
