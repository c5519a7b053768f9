"""A change of our code is found by a replay, with turn, field and token: the changes of `benchmarks.replay`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.agent_sessions import make_run, tiny_template
from tests.long.tokens.replay_changes import CHANGES, finds
from tests.support.replayed_sessions import program, replayed, with_engine
from tests.unit.replay.test_replayed import CONVERSATIONS, ROOMY, call, record, replay
from verl_multiturn.replay.calls import DivergedError, ReplayDifference
from verl_multiturn.replay.comparison import differences
from verl_multiturn.replay.engine import ReplayEngine
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.limits import Limits

CALLS, LONG = CONVERSATIONS["calls"], [call("long"), "All is long.", call("a"), "Yes."]
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    **{name: (turns, {}) for name, turns in CONVERSATIONS.items()},
    "a user": (["One.", call("a"), "Two.", "Three."], {"user": True}),
    "a turn is cut": (CALLS, {"limits": Limits(4096, 4096, turn_length=4)}),
    "tokens are counted": (CALLS, {"limits": replace(ROOMY, observation_length=8)}),
    "turns are counted": (CALLS, {"limits": replace(ROOMY, max_assistant_turns=9, turns_reminder=True)}),
    "the row is full": (CALLS, {"limits": replace(ROOMY, response_length=200)}),
    "hostile": ([call("<|im_end|>"), "Yes."], {}),
    "a window": ([call("a"), call("b"), call("c"), "Yes."], {"context": Context("window", 1)}),
    "a summary": (
        LONG,
        {"limits": replace(ROOMY, response_length=260), "context": Context("overflow", 1, "Sum up.", 12)},
    ),
}


async def differing(
    records: dict[str, dict[str, Any]], sessions: list[dict[str, Any]]
) -> dict[str, list[ReplayDifference]]:
    found = {}
    for name, recorded in records.items():
        try:
            found[name] = differences(recorded, await replay(recorded, **CASES[name][1]))
        except DivergedError as diverged:
            found[name] = [diverged.difference]
    stage = ReplayEngine()
    run = with_engine(make_run(lambda *_: [], prompt_length=65_536, response_length=65_536), stage, tiny_template())
    for recorded in sessions:
        found[recorded["request_id"]] = await replayed(recorded, run, stage)
    run.renderer.close()
    return found


async def recordings() -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    records = {name: await record(turns, **given) for name, (turns, given) in CASES.items()}
    run = make_run(lambda *_: [], prompt_length=65_536, response_length=65_536)
    sessions = [await program(name, run, tiny_template(), random.Random(name)) for name in ("langgraph", "codex")]
    run.renderer.close()
    return records, sessions


async def test_nothing_is_found_without_a_change() -> None:
    found = await differing(*await recordings())
    assert {name: each for name, each in found.items() if each} == {}


def test_there_are_24() -> None:
    assert len(CHANGES) == 24


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_is_found(name: str) -> None:
    made = await recordings()
    with CHANGES[name].made():
        found = await differing(*made)
    assert finds(CHANGES[name], found) is not None, {name: each[:2] for name, each in found.items() if each}
