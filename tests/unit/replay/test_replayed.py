"""Recorded conversations are made again from their records, with scripted engines in the place of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.support.on_disk import from_disk
from verl_multiturn import BaseTool, Interaction, Reply, ToolResponse, ToolSchema
from verl_multiturn.calls.slots import Gates
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.rendering_check import RenderingCheck
from verl_multiturn.errors import EngineError, UnjudgedError
from verl_multiturn.interactions.running.session import InteractionGate
from verl_multiturn.records.read.records import read_back
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.replay.calls import DivergedError
from verl_multiturn.replay.comparison import differences
from verl_multiturn.replay.engine import RecordedTurns, ReplayEngine
from verl_multiturn.replay.tools import RecordedGate
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.conversation import Conversation
from verl_multiturn.rollout.engines.protocol import Ask
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.rollout.scripted_chat import TinyBuilder, tiny_tokenizer
from verl_multiturn.tools.running.gate import Gate

END = "<|im_end|>"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
ROOMY = Limits(4096, 4096, max_parallel_calls=2)


class Look(BaseTool):
    """Answers, is late, raises, or answers at length, by the word."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        word = parameters["word"]
        if word == "late":
            await asyncio.Event().wait()
        if word == "wrong":
            raise ValueError("no such word")
        if word == "broken":
            raise OSError("gone")
        return ToolResponse(word * 200 if word == "long" else f"<{word}>"), 0.25, {"asked": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.75


class User(Interaction):
    """A user who writes three messages."""

    name = "user"

    async def start(self, instance_id: str, **kwargs: Any) -> Reply:
        return Reply("Begin.", state="begun")

    async def reply(self, instance_id: str, messages: Sequence[Any], **kwargs: Any) -> Reply:
        said = sum(message["role"] == "assistant" for message in messages)
        return Reply(f"Go on {said}.", reward=0.5, done=said >= 3, state=said, shows=["look"] if said == 2 else [])

    async def score(self, instance_id: str) -> float:
        return 2.0


def call(word: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"word": "{word}"}}}}\n</tool_call>'


def conversation(
    engine: Any, limits: Limits, stage: ReplayEngine | None = None, context: Context | None = None
) -> Conversation:
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id]
    made = {} if stage is None else {"make_tools": stage.make_tools, "make_user": stage.make_user}
    return Conversation(
        engine,
        ChatCodec(TinyBuilder(tokenizer), ends, firewall=Firewall(tokenizer), tokenizer=tokenizer),
        JsonParser(tokenizer, ends),
        limits,
        Gates(Gate if stage is None else RecordedGate, 0.05),
        RenderingCheck(tokenizer, {}, "<|im_start|>assistant\n", ends),
        interactions=Gates(InteractionGate, 0.05),
        context=context,
        **made,
    )


def request(user: bool = False, hides: bool = False) -> Request:
    tools = {"look": Look({}, ToolSchema.read(SCHEMA, "look"))}
    kwargs = {"look": {"shown": False}} if hides else {}
    user_of_row = User({}) if user or hides else None
    return Request("r", [{"role": "user", "content": "What?"}], tools, kwargs, interaction=user_of_row)


async def record(
    turns: Sequence[str],
    limits: Limits = ROOMY,
    user: bool = False,
    context: Context | None = None,
    hides: bool = False,
) -> dict[str, Any]:
    """Roll a conversation out and return its record, read from disk."""
    tokenizer = tiny_tokenizer()
    engine = ReceiptingEngine(ScriptedEngine([tokenizer.encode(turn + END) for turn in turns]))
    outcome = await conversation(engine, limits, None, context).run(request(user, hides))
    return from_disk(Life("r", outcome=outcome, generations=engine.take("r"), request=request(user, hides)))


async def replay(
    recorded: dict[str, Any],
    limits: Limits = ROOMY,
    user: bool = False,
    context: Context | None = None,
    hides: bool = False,
) -> dict[str, Any]:
    stage = ReplayEngine()
    engine = ReceiptingEngine(stage)
    outcome = Outcome.begun("r")
    stage.begin(recorded, outcome, RecordedTurns(recorded))
    await conversation(engine, limits, stage, context).run(request(user, hides), outcome)
    life = Life("r", outcome=outcome, generations=engine.take("r"), request=request(user, hides))
    return read_back(record_of(life))


CONVERSATIONS = {
    "an answer": ["It is."],
    "calls": [call("a") + call("b"), call("long"), "It is."],
    "refusals": [
        call("a") + call("b") + call("c"),
        "<tool_call>{</tool_call>",
        call("1").replace("look", "see"),
        "Yes.",
    ],
    "failures": [call("wrong") + call("late"), call("broken"), "Yes."],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_conversation_is_made_again(name: str) -> None:
    recorded = await record(CONVERSATIONS[name])
    assert recorded["stop_reason"] == "finished"
    assert differences(recorded, await replay(recorded)) == []


async def test_a_tool_that_could_not_judge_cannot_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Look, "calc_reward", AsyncMock(side_effect=UnjudgedError("the grader is lost")), raising=False)
    recorded = await record(CONVERSATIONS["an answer"])
    assert (recorded["stop_reason"], recorded["error"]) == ("unjudged", "tool 'look': the grader is lost")
    assert differences(recorded, await replay(recorded)) == []


async def test_a_users_answers_are_made_again() -> None:
    recorded = await record(["One.", call("a"), "Two.", "Three."], user=True)
    assert (recorded["stop_reason"], recorded["score"], len(recorded["replies"])) == ("environment_done", 2.0, 3)
    assert differences(recorded, await replay(recorded, user=True), None) == []


class Answers(Interaction):
    """A user who writes nothing before the model has."""

    name = "user"
    reply = User.reply


async def test_the_answer_to_a_greeting_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = [{"role": "system", "content": "S"}, {"role": "assistant", "content": "Hello."}]
    greeted = replace(request(), messages=greeting, interaction=Answers({}))
    monkeypatch.setitem(globals(), "request", lambda user, hides: greeted)
    recorded = await record(["One.", "Two."], user=True)
    assert [(reply["turn"], reply["text"]) for reply in recorded["replies"]] == [
        (None, "Go on 1."),
        (0, "Go on 2."),
        (1, "Go on 3."),
    ]
    assert differences(recorded, await replay(recorded, user=True), None) == []


@pytest.mark.parametrize("context", [None, Context("window", turns=1)])
async def test_a_tool_is_shown_where_it_was(context: Context | None) -> None:
    limits = Limits(4096, 4096, max_assistant_turns=9)
    recorded = await record([call("a"), "Two.", call("b"), "Three."], limits, context=context, hides=True)
    assert [each["status"] for each in recorded["calls"]] == ["unknown_tool", "ok"]
    assert [each["shows"] for each in recorded["replies"]] == [[], ["look"], []]
    assert differences(recorded, await replay(recorded, limits, context=context, hides=True)) == []
    tokenizer, schema = tiny_tokenizer(), '"function": {"name": "look"'
    prompts = [tokenizer.decode(row["ids"][: row["prompt_length"]]).count(schema) for row in recorded["rows"]]
    # A later row has it in the list of tools, and in the user's message as long as that is kept.
    assert prompts == ([0] if context is None else [0, 0, 2, 1])
    recorded["replies"][1]["shows"] = []
    with pytest.raises(DivergedError):
        await replay(recorded, limits, context=context, hides=True)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(4096, 20),
        Limits(4096, 4096, turn_length=4),
        Limits(4096, 4096, max_assistant_turns=1),
        Limits(4096, 4096, max_tool_calls=1),
        Limits(8, 4096),
        Limits(4096, 4096, observation_length=8, turns_reminder=True, max_assistant_turns=9),
    ],
)
async def test_limits_end_it_where_they_did(limits: Limits) -> None:
    recorded = await record(CONVERSATIONS["calls"], limits)
    assert differences(recorded, await replay(recorded, limits)) == []


@pytest.mark.parametrize(
    ("turns", "user", "time_up", "reason"),
    [
        (["One.", call("late")], True, "tools", "wall_clock"),
    ],
)
async def test_the_clock_runs_out_where_it_did(turns: list[str], user: bool, time_up: str, reason: str) -> None:
    limits = Limits(4096, 4096, wall_clock_s=0.02)
    recorded = await record(turns, limits, user)
    assert (recorded["time_up"], recorded["stop_reason"]) == (time_up, reason)
    assert differences(recorded, await replay(recorded, Limits(4096, 4096), user)) == []


async def test_an_engine_that_failed_before_the_time_was_up_fails_again() -> None:
    recorded = {"rows": [], "generations": [], "stop_reason": "engine_error", "error": "gone", "time_up": "score"}
    with pytest.raises(EngineError, match="gone"):
        await RecordedTurns(recorded).answer(Ask("r", [1], {}, 10))


async def test_a_conversation_that_had_seen_only_outages_when_its_time_was_up() -> None:
    recorded = await record(["One.", call("late")], Limits(4096, 4096, wall_clock_s=0.02), user=True)
    error = "tool look: each of its calls met an outage"
    recorded |= {"stop_reason": "outage", "valid": False, "error": error, "outages": ["tool look"]}
    assert differences(recorded, await replay(recorded, user=True)) == []


async def test_another_prompt_is_named_with_its_turn_and_token() -> None:
    recorded = await record(CONVERSATIONS["calls"])
    with pytest.raises(DivergedError) as diverged:
        await replay(recorded, Limits(4096, 4096, max_parallel_calls=2, max_tool_response_length=300))
    difference = diverged.value.difference
    assert (difference.turn, difference.field) == (2, "generations.prompt")
    ids = recorded["rows"][0]["ids"]
    text = tiny_tokenizer().decode(ids[: difference.token])
    assert text.endswith("longlong")
