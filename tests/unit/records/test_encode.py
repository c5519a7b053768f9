"""The record of a conversation that ended: every entry, from conversations that were played."""

import json
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.agent_sessions import ADD, Agent, call_text, echo, make_run, turns, user
from tests.conftest import CharBuilder, CharTokenizer, EchoTool
from tests.scripted import CALL
from tests.support.on_disk import from_disk
from tests.unit.rollout.test_context import Counting, play
from verl_multiturn import Conversation, Limits, Outcome, Request, StopReason
from verl_multiturn.calls.timeline import Span, Timeline
from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.life import Life

ROW = {
    "raw_prompt": [{"role": "user", "content": "Q", "tool_calls": None}],
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": np.str_("4")},
    "extra_info": {"index": 3, "numbers": np.array([1.0, np.nan])},
}


class Told(ScriptedEngine):
    """A scripted engine that reports how much of each prompt it had in its cache."""

    async def generate(self, ask: Ask) -> Generation:
        return replace(await super().generate(ask), cached=len(ask.ids) - 1)


async def ended(*said: str, **known: Any) -> Life:
    """Play a conversation with the tool `echo`, and return its life."""
    tokenizer = CharTokenizer()
    engine = ReceiptingEngine(Told([tokenizer.turn(text) for text in said], version=3))
    parser = JsonParser(tokenizer, [tokenizer.eos_token_id])
    conversation = Conversation(engine, ChatCodec(CharBuilder()), parser, Limits(100, 400))
    request = Request(
        "r1", [{"role": "user", "content": "Q"}], {"echo": EchoTool()}, {"echo": {}}, {"temperature": 1.0}
    )
    outcome = await conversation.run(request)
    life = Life("r1", row=ROW, outcome=outcome, generations=engine.take("r1"), **known)
    life.request, life.sampling = request, request.sampling
    return life


def read(made: Life) -> dict[str, Any]:
    """Return a record as a reader gets it, which equals the one in memory: no entry is missing."""
    found = from_disk(made)
    written: dict[str, Any] = json.loads(line_of(record_of(made)))
    assert found == written
    return found


async def test_the_record_of_an_evaluation_says_whose_it_is() -> None:
    record = read(await ended("ok", data_row=(17, "00ff00ff00ff00ff"), model="1dd3c9151dcf78eb"))
    assert record["row"] == {"number": 17, "digest": "00ff00ff00ff00ff"}
    assert record["model"] == "1dd3c9151dcf78eb"


async def test_the_record_of_a_conversation() -> None:
    known = {"loop": "multiturn_agent", "number": 2, "rerolled_from": "v", "validation": True, "step": 5}
    timeline = Timeline()
    timeline.spans = [Span("call", "echo", 0, 1.25, 1.5)]
    record = read(await ended(CALL, "ok", **known, group="u", began=1.0, ended=2.0, timeline=timeline))
    assert {name: record[name] for name in [*known, "uid"]} == {**known, "uid": "u"}
    assert (record["schema"], record["request_id"], record["began"], record["ended"]) == (2, "r1", 1.0, 2.0)
    assert record["sample"] == {
        "index": 3,
        "data_source": "gsm8k",
        "ground_truth": "4",
        "extra_info": {"index": 3, "numbers": [1.0, "nan"]},
        "messages": [{"role": "user", "content": "Q"}],
        "tools": ["echo"],
        "tools_kwargs": {"echo": {}},
        "interaction": None,
        "interaction_kwargs": {},
    }
    assert (record["sampling"], record["stop_reason"], record["valid"]) == ({"temperature": 1.0}, "finished", True)
    assert (record["row"], record["model"]) == (None, None)
    (row,) = record["rows"]
    assert (row["prompt_length"], CharTokenizer().decode(row["ids"])) == (3, f"PQ>{CALL}¶\n[hi]>ok¶")
    assert row["logprobs"] == [-0.5] * 72
    assert row["runs"] == [[3, 0, -1, 0, 0], [69, 1, 3, 0, 1], [1, 0, -1, 1, 2], [5, 0, -1, 1, 3], [3, 1, 3, 1, 1]]
    first, second = record["generations"]
    assert {
        key: first[key] for key in ("prompt_tokens", "max_tokens", "tokens", "finish", "row", "start", "cause")
    } == {
        "prompt_tokens": 3,
        "max_tokens": 400,
        "tokens": 69,
        "finish": "stop",
        "row": 0,
        "start": 3,
        "cause": None,
    }
    assert (first["ids"], first["logprobs"], first["versions"]) == (None, None, None)
    assert [each["cached_tokens"] for each in record["generations"]] == [2, 77]
    assert (second["parent"], second["start"], second["text"]) == (0, 78, "ok")
    assert second["asked_at"] <= second["at"]
    (call,) = record["calls"]
    assert {key: call[key] for key in ("turn", "id", "tool", "name", "arguments", "status", "text", "attempts")} == {
        "turn": 0,
        "id": "call_0_0",
        "tool": "echo",
        "name": "echo",
        "arguments": {"text": "hi"},
        "status": "ok",
        "text": "hi",
        "attempts": 1,
    }
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert (record["asked"], record["calc_rewards"], record["time_up"]) == (1, {"echo": 0.0}, None)
    assert record["timeline"] == [{"kind": "call", "name": "echo", "turn": 0, "start": 1.25, "end": 1.5}]


async def test_what_the_model_wrote_is_kept_as_it_was() -> None:
    calls = [
        "{",
        '{"name": "other", "arguments": {"a": 1.50}}',
        '{"name": "echo", "arguments": {"text": 99999999999999999999}}',
    ]
    record = read(await ended("".join(f"<tool_call>{call}</tool_call>" for call in calls), "ok"))
    assert [(call["name"], call["arguments"]) for call in record["calls"]] == [
        ("", "<tool_call>{</tool_call>"),
        ("other", {"a": 1.5}),
        ("echo", '{"text": 99999999999999999999}'),
    ]
    assert [(call["tool"], call["status"]) for call in record["calls"]] == [
        ("", "malformed"),
        ("", "unknown_tool"),
        ("echo", "bad_arguments"),
    ]


async def test_a_generation_that_cannot_be_trained_keeps_its_tokens() -> None:
    made = await ended("ok")
    (turn,), (receipt,) = made.outcome.turns, made.generations
    turn.end = turn.start
    strange = Receipt(3, "d", 2, receipt.ids, np.array([-0.1, np.nan, -np.inf], np.float32), receipt.versions)
    (generation,) = read(replace(made, generations=[strange]))["generations"]
    assert (generation["row"], generation["start"], generation["cause"]) == (None, None, "invalid")
    assert (generation["ids"], generation["versions"]) == ([111, 107, 1114112], [[3, 3]])
    assert generation["logprobs"] == [-0.1, "nan", "-inf"]
    assert (generation["tokens"], generation["digest"]) == (3, strange.digest)


async def test_rows_and_replies() -> None:
    outcome, _ = await play(["a", "b"], Counting(), Context("window", 1))
    receipts = [Receipt(1, "", 1, np.array([1]), np.array([-1.0]), np.array([0])) for _ in outcome.turns]
    record = read(Life(outcome.request_id, outcome=outcome, generations=receipts))
    assert [generation["row"] for generation in record["generations"]] == [0, 1]
    assert len(record["rows"]) == 2
    assert [(reply["turn"], reply["text"], reply["reward"]) for reply in record["replies"]] == [
        (None, "zero", None),
        (0, "n1", 1.0),
        (1, "n2", 1.0),
    ]
    assert (record["score"], record["sample"]["tools"]) == (10.0, [])


async def session(*said: str) -> tuple[Outcome, list[Receipt]]:
    agent = Agent(make_run(turns(*said)))
    first = await agent.ask([user("1+1?")], [ADD])
    await agent.ask([user("1+1?"), echo(first), user("sure?")], [ADD], lost=True)
    agent.session.end()
    await agent.session.closed()
    return agent.session.outcome(StopReason.FINISHED), agent.session.receipts()


async def test_a_completion_in_no_row_keeps_its_tokens() -> None:
    outcome, receipts = await session(f"two {call_text('add', {'a': 1})}", "yes")
    first, second = read(Life(outcome.request_id, row=ROW, outcome=outcome, generations=receipts))["generations"]
    assert (first["row"], first["cause"], first["ids"]) == (0, None, None)
    assert (second["row"], second["cause"], second["start"]) == (None, "undelivered", None)
    assert (second["ids"], second["versions"]) == (receipts[1].ids.tolist(), [[len(receipts[1].ids), 3]])
    assert second["logprobs"] == [-0.5] * len(receipts[1].ids)


async def test_nothing_changes_what_an_ended_conversation_refers_to() -> None:
    made = await ended(CALL, "ok")
    before = line_of(record_of(made))
    with pytest.raises(Exception, match="sealed"):
        made.outcome.trajectory.append_sampled([1], [-1.0], [0])
    assert line_of(record_of(made)) == before


async def test_an_image_is_kept_by_its_digest() -> None:
    image = Image.new("RGB", (3, 4))
    kept = {"digest": "deb4996cf65f1bab9100e020cded0ff6", "size": [3, 4]}
    made = await ended(CALL, "ok")
    made.outcome.calls[0].images = (image, None)
    made.outcome.images.append(image)
    assert made.request is not None
    message = {"role": "user", "content": [{"type": "image", "image": image}]}
    record = read(replace(made, request=replace(made.request, messages=[message])))
    assert record["calls"][0]["images"] == record["rows"][0]["images"] == [kept]
    assert record["sample"]["messages"] == [{"role": "user", "content": [{"type": "image", "image": kept}]}]


class Level(IntEnum):
    HIGH = 3


class Whole(int):
    """A whole number of another class."""


def test_whole_numbers_of_other_classes_are_numbers() -> None:
    found = json.loads(line_of({"level": Level.HIGH, "whole": Whole(-(1 << 63)), "large": Whole(1 << 64)}))
    assert found == {"level": 3, "whole": -(1 << 63), "large": str(1 << 64)}
