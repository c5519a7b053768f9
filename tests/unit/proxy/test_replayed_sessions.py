"""Sessions of agents are made again from their records, through the forest as it is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.agent_sessions import call_text, make_run, tiny_template
from tests.harness_requests import PROGRAMS
from tests.support.replayed_sessions import drawn, program, replayed, with_engine
from tests.support.session_play import TOOL, PlayedChat
from verl_multiturn.proxy.sessions.forest import Forest
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


async def replay_of(record: dict[str, Any]) -> list[Any]:
    stage = ReplayEngine()
    run = with_engine(make_run(lambda *_: [], **ROOMY), stage, tiny_template())
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
