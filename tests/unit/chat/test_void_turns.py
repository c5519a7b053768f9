"""Void turns (SimpleTIR): which turns are void, and the fate of their rows."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import CharBuilder
from tests.text_mode import (
    ANSWER,
    ANSWER_IDS,
    BLOCK,
    CALL,
    CALL_IDS,
    END,
    STOPS,
    CodeTool,
    Pieces,
    pieces,
    quickstart_tokenizer,
    run,
)
from tests.unit.certificate.test_certificate import MASK, literal
from verl_multiturn import ConfigError, Conversation, Generation, Limits, Request, ScriptedEngine, StopReason
from verl_multiturn.calls.slots import Gates
from verl_multiturn.certificate.check import verify
from verl_multiturn.certificate.receipts import ReceiptingEngine, Receipts
from verl_multiturn.chat.parsing.turns import AssistantTurn
from verl_multiturn.chat.tir import TirCodec, TirParser
from verl_multiturn.config import USER, read_settings
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.engines.protocol import Ask
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.life import Life
from verl_multiturn.tools.running.gate import Gate

BOXED = re.compile(r"\\boxed")


@pytest.mark.parametrize(
    ("turns", "void"),
    [
        ([[CALL], [ANSWER]], False),
        ([[ANSWER]], False),
        ([["No idea."]], True),
        ([[CALL], ["No idea."]], True),
        ([["```output"], [ANSWER]], True),
        ([["```output \\boxed"], [ANSWER]], False),
        ([[BLOCK], [ANSWER]], True),
    ],
    ids=["call_answer", "answer", "neither", "call_neither", "unreadable_call", "answered", "not_asked_to_run"],
)
async def test_void_turns(turns: list[list[str]], void: bool) -> None:
    outcome, _ = await pieces(*turns)
    assert outcome.has_void_turn(BOXED) is void


async def test_a_turn_that_was_not_read_is_not_void() -> None:
    class Fails:
        async def generate(self, ask: Ask) -> Generation:
            return Generation([5], [-0.5], [0], "abort")

    outcome = await run(Fails(), Pieces(), CodeTool(), end=0)
    assert (outcome.stop_reason, outcome.trajectory.mask[-1]) == (StopReason.ENGINE_ERROR, 1)
    assert not outcome.has_void_turn(BOXED)


async def test_a_turn_of_the_user_is_not_void() -> None:
    outcome, _ = await pieces([ANSWER])
    (own,) = outcome.turns
    asked = replace(own, number=1, role=USER, said=AssistantTurn("And then?"))
    both = replace(outcome, turns=[own, asked], trained=["assistant", USER])
    assert both.assistant_turns == [own]
    assert not both.has_void_turn(BOXED)
    of_a_session = replace(both, trained=[])
    assert of_a_session.assistant_turns == [own, asked]
    assert of_a_session.has_void_turn(BOXED)


async def test_a_record_says_that_a_turn_is_void() -> None:
    real = quickstart_tokenizer()
    engine = ReceiptingEngine(StopTexts(ScriptedEngine([CALL_IDS, ANSWER_IDS]), real))
    conversation = Conversation(
        engine, TirCodec(CharBuilder(), None, real), TirParser(real, [END]), Limits(100, 900), Gates(Gate, 5.0)
    )
    outcome = await conversation.run(
        Request("r1", [{"role": "user", "content": "Q"}], {"run": CodeTool()}, sampling=STOPS)
    )
    generations = engine.take("r1")
    receipts = Receipts("r1", generations, void=True)
    life = Life("r1", outcome=outcome, generations=generations, void=True)
    record = json.loads(line_of(record_of(life)))
    assert (sum(count * mask for count, mask, *_ in record["rows"][0]["runs"]), record["void"]) == (48, True)
    assert verify_record(record).violations == []
    assert Receipts.from_bytes(receipts.to_bytes()).void is True


def test_a_filtered_row_has_no_trained_token_and_all_else() -> None:
    sample = literal()
    nothing, sampled = np.zeros(len(MASK), int), np.array(MASK)
    row = replace(sample.row, mask=nothing, loss_mask=nothing)
    assert verify(row, sample.receipts, filtered=True) == []
    for changed, filtered, found in [
        (row, False, ["mask is 0", "loss_mask is 0"]),
        (sample.row, True, ["mask is 1", "loss_mask is 1"]),
        (replace(row, mask=sampled), True, ["mask is 1"]),
        (replace(row, loss_mask=sampled), True, ["loss_mask is 1"]),
        (replace(row, logprobs=np.zeros(len(MASK), np.float32)), True, ["logprob is 0.0"]),
        (replace(row, response_ids=row.response_ids + 1), True, ["id is 11", "input_ids is 10"]),
    ]:
        said = [str(violation) for violation in verify(changed, sample.receipts, filtered=filtered)]
        assert said
        assert all(any(what in one for one in said) for what in found), said


@pytest.mark.parametrize("pattern", ["[", "(?P<a>x)(?P<a>y)", "\\"])
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"void_turn_pattern: .*no regular expression") as raised:
        read_settings({"void_turn_pattern": pattern})
    assert repr(pattern) in str(raised.value)


def test_a_good_pattern() -> None:
    assert read_settings({"void_turn_pattern": r"\\boxed"}).void_turn_pattern == r"\\boxed"
    assert read_settings({}).void_turn_pattern is None
