"""The certificate: an honest row raises no alarm, and no corrupted one passes."""

import ast
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT, CharBuilder, CharTokenizer, EchoTool
from tests.long.tokens.corruptions import CORRUPTIONS
from tests.support.samples import Sample, padding_row, rebuilt, sample_of_record
from verl_multiturn import CertificateError, Conversation, Generation, Limits, Request, ScriptedEngine, StopReason
from verl_multiturn.certificate.check import CertificateRow, verify
from verl_multiturn.certificate.conversations import repeated, shared
from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine, Receipts
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.cli.main import app
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.life import Life
from verl_multiturn.rows.keys import RowKey

CALL = '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'
PROMPT = [1, 2, 3]
# Three turns, with two tokens of context after the first and three after the second.
RESPONSE = [10, 11, 12, 4, 5, 20, 21, 6, 7, 8, 30, 31, 32]
MASK = [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
LOGPROBS = [-0.1, -0.2, -0.3, 0.0, 0.0, -0.4, -0.5, 0.0, 0.0, 0.0, -0.6, -0.7, -0.8]
VERSIONS = [4, 4, 4, -1, -1, 4, 5, -1, -1, -1, 5, 5, 5]


def receipt(start: int, end: int) -> Receipt:
    """Return the receipt of the generation that the response holds from `start` to `end`."""
    given = np.array(PROMPT + RESPONSE[:start], "<i4")
    return Receipt(
        prompt_tokens=len(given),
        prompt_digest=hashlib.blake2b(given.tobytes(), digest_size=16).hexdigest(),
        max_tokens=99,
        ids=np.array(RESPONSE[start:end], "<i4"),
        logprobs=np.array(LOGPROBS[start:end], "<f4"),
        versions=np.array(VERSIONS[start:end], "<i8"),
    )


def literal(uid: str = "u", session_id: int = 0) -> Sample:
    row = rebuilt(
        np.array(PROMPT), np.array(RESPONSE), np.array(MASK), np.array(LOGPROBS, np.float32), np.array(VERSIONS)
    )
    row = replace(row, min_version=4, max_version=5, uid=uid, key=f"{uid}_{session_id}_0")
    return Sample(row, Receipts("r1", [receipt(0, 3), receipt(5, 7), receipt(10, 13)], uid, session_id))


def foreign() -> Sample:
    """Return another conversation of the same length."""
    sample = literal()
    ids = np.array(RESPONSE) + 100
    row = replace(sample.row, response_ids=ids, input_ids=np.concatenate([PROMPT, ids]))
    generations = [replace(g, ids=g.ids + np.int32(100)) for g in sample.receipts.generations]
    return Sample(row, replace(sample.receipts, generations=generations))


def test_the_literal_row_is_honest() -> None:
    sample = literal()
    assert verify(sample.row, sample.receipts) == []


def test_there_are_enough_corruptions() -> None:
    assert len(CORRUPTIONS) >= 20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_caught_where_it_is(name: str, seed: int) -> None:
    corrupted = CORRUPTIONS[name](literal(), foreign(), random.Random(seed))
    assert corrupted is not None
    assert corrupted.caught(), [str(violation) for violation in corrupted.found()]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"mask": np.array([1, 1, 0, *MASK[3:]])},
            "request r1 (row u_0_0), turn 0, token 5: mask is 0, by the receipts 1",
        ),
        (
            {"response_ids": np.array([*RESPONSE[:10], 30, 99, 98])},
            "turn 2, token 14: id is 99, the engine returned 31 (2 tokens differ)",
        ),
        ({"prompt_ids": np.array([1, 9, 3])}, "turn 0, token 0: tokens 0 to 2 are not those the engine saw"),
        ({"versions": np.array(VERSIONS[:-1])}, "turn 2, token 15: the version column has shape [12], expected [13]"),
        ({"max_version": 9}, "request r1 (row u_0_0): the tag of the newest weights is 9, by the receipts 5"),
        ({"uid": "v"}, "the row has uid 'v', the receipts 'u'"),
        ({"request_id": "r2"}, "the row is of request 'r2', the receipts of 'r1'"),
        ({"request_id": "r0"}, "the row is of request 'r0', the receipts of 'r1'"),
        ({"key": "u_0_1"}, "the row is called 'u_0_1', the receipts are of 'u_0_0'"),
        ({"min_version": 3}, "the tag of the oldest weights is 3, by the receipts 4"),
        ({"min_version": None}, "the tag of the oldest weights is None, by the receipts 4"),
        (
            {"response_ids": np.array([*RESPONSE[:4], 5 + 2**32, *RESPONSE[5:]])},
            "turn 1, token 7: id is 4294967301, expected an integer from 0 to 2**31 - 1",
        ),
        ({"prompt_ids": np.array([1, 2.5, 3])}, "turn 0, token 1: id is 2.5, expected an integer"),
        (
            {"loss_inputs": {"ref_log_prob": np.array([0.0] * 7 + [np.nan] + [0.0] * 5)}},
            "turn 2, token 10: ref_log_prob is nan, expected a finite number",
        ),
        (
            {"loss_inputs": {"values": np.zeros(16)}},
            "turn 3, token 16: the values column has shape [16], expected [13]",
        ),
    ],
)
def test_a_violation_names_request_turn_and_token(change: dict[str, Any], text: str) -> None:
    sample = literal()
    found = [str(violation) for violation in verify(replace(sample.row, **change), sample.receipts)]
    assert any(text in violation for violation in found), found


def test_the_first_weights_have_the_version_0() -> None:
    """An engine that does not know its version reports -1."""
    sample = literal()
    generations = [
        replace(g, versions=np.array([0 if i == 0 and not start else 1 for i in range(len(g.ids))]))
        for start, g in enumerate(sample.receipts.generations)
    ]
    known = iter(np.concatenate([g.versions for g in generations]))
    column = np.array([next(known) if trained else -1 for trained in MASK])
    row = replace(sample.row, versions=column, min_version=0, max_version=1)
    receipts = replace(sample.receipts, generations=generations)
    assert verify(row, receipts) == []
    for tags in ({"min_version": 1}, {"max_version": 0}, {"min_version": -1}):
        assert len(verify(replace(row, **tags), receipts)) == 1


def test_one_wrong_token_early_does_not_bring_an_alarm_for_every_later_turn() -> None:
    sample = literal()
    ids = np.array([10, 99, *RESPONSE[2:]])
    row = replace(sample.row, response_ids=ids, input_ids=np.concatenate([PROMPT, ids]))
    assert [(v.turn, v.token) for v in verify(row, sample.receipts)] == [(0, 4)]


def test_rejection_sampling_may_only_take_tokens_out() -> None:
    sample = literal()
    rejected = replace(sample.row, mask=np.array([0, 0, 0, *MASK[3:]]))
    assert verify(rejected, sample.receipts, mask_may_shrink=True) == []
    assert verify(rejected, sample.receipts) != []
    added = replace(sample.row, mask=np.array([1, 1, 1, 1, *MASK[4:]]))
    assert [(v.turn, v.token) for v in verify(added, sample.receipts, mask_may_shrink=True)] == [(1, 6)]


def test_old_log_probs_are_the_engines_in_bypass_mode_only() -> None:
    sample = literal()
    other = replace(sample.row, loss_inputs={"old_log_probs": np.array(LOGPROBS, np.float32) - 1})
    assert verify(other, sample.receipts) == []
    assert verify(sample.row, sample.receipts, bypass=True) == []
    (violation,) = verify(other, sample.receipts, bypass=True)
    assert "old_log_probs is -1.1" in str(violation)


def test_honest_padding() -> None:
    row = padding_row(literal().row)
    assert verify(row, Receipts("", []), bypass=True) == []
    positions = np.broadcast_to(np.arange(128), (4, 128))
    assert verify(replace(row, position_ids=positions), Receipts("", [])) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"uid": "pad1", "key": "pad1_0_0"}, "the trainer's filling, whose name is not 'pad1_0_0', of uid 'pad1'"),
        ({"uid": None}, "whose name is not"),
        ({"key": f"pad{0:032x}_x_0"}, "whose name is not"),
        ({"prompt_ids": np.array([*[7] * 126, 8])}, "not 1 tokens of response, 2 different ones in all"),
        ({"prompt_ids": np.full(126, 7), "response_ids": np.full(2, 7)}, "not 2 tokens of response, 1 different"),
        ({"prompt_ids": np.full(127, -7), "response_ids": np.full(1, -7)}, "token 0: id is -7"),
        ({"input_ids": np.full(128, 8)}, "token 0: input_ids is 8"),
        ({"position_ids": np.zeros(128, int)}, "token 1: position_ids is 0"),
        ({"mask": np.array([1])}, "token 127: mask is 1, by its tag 0"),
        ({"loss_mask": np.array([1])}, "token 127: loss_mask is 1, by its tag 0"),
        ({"loss_inputs": {"old_log_probs": np.array([-0.1])}}, "token 127: old_log_probs is -0.1, by its tag 0"),
    ],
)
def test_what_is_tagged_as_padding_must_be_padding(change: dict[str, Any], text: str) -> None:
    row = replace(padding_row(literal().row), **change)
    found = [str(violation) for violation in verify(row, Receipts("", []), bypass=True)]
    assert any(text in violation for violation in found), found


@pytest.mark.parametrize(
    ("name", "honest", "wrong"),
    [
        ("old_log_probs", (0.0, -0.5, 0.05, -1e5), (0.0625, 1.0, -1.1e5, -1e30)),
        ("ref_log_prob", (0.0, -0.5, 0.05, -1e5), (0.0625, 1.0, -1.1e5, -1e30)),
        ("rollout_is_weights", (0.0, 0.5, 1e9), (-1e-6, -1.0)),
        ("advantages", (-1e9, 1e9), ()),
        ("values", (-1e9, 1e9), ()),
    ],
)
def test_what_a_column_of_the_loss_can_be(name: str, honest: tuple[float, ...], wrong: tuple[float, ...]) -> None:
    sample = literal()
    for value in (*honest, *wrong):
        column = np.full(len(MASK), -0.5 if "log" in name else 0.5)
        column[4] = value
        found = [str(each) for each in verify(replace(sample.row, loss_inputs={name: column}), sample.receipts)]
        assert len(found) == (value in wrong), (value, found)
        if found:
            assert f"turn 1, token 7: {name} is {column[4]}, expected a finite number from" in found[0]


def test_every_column_of_the_loss_is_looked_at() -> None:
    """Columns count even after one that was compared elsewhere, or that is wrong itself."""
    sample = literal()
    right, wrong, short = np.array(LOGPROBS, np.float32), np.full(len(MASK), np.nan), np.zeros(3)
    columns = {"old_log_probs": right, "ref_log_prob": short, "advantages": wrong, "values": wrong}
    found = [str(each) for each in verify(replace(sample.row, loss_inputs=columns), sample.receipts, bypass=True)]
    assert ["ref_log_prob" in found[0], "advantages is nan" in found[1], "values is nan" in found[2]] == [True] * 3


def test_one_conversation_under_two_names() -> None:
    known = {RowKey("u", "0", "0"): "r1", RowKey("u", "1", "0"): "r2"}
    assert shared(known) == []
    (violation,) = shared({**known, RowKey("v", "0", "0"): "r1"})
    assert str(violation) == "request r1: it is in the batch as 'u_0_0' and as 'v_0_0'"


def test_receipts_that_were_lost_do_not_pass_for_those_of_a_conversation_without_a_generation() -> None:
    row = rebuilt(np.array(PROMPT), np.array([0]), np.array([0]), np.array([0.0], np.float32), np.array([-1]))
    row = replace(row, uid="u", key="u_0_0")
    assert verify(row, Receipts("r1", [], "u", 0, invalid=True), filtered=True) == []
    (violation,) = verify(row, Receipts("r1", [], "u", 0))
    assert "its receipts hold no generation, and do not say that it is invalid" in str(violation)


def test_rows_of_one_name() -> None:
    key, other = RowKey("a", "0", "0"), RowKey("a", "1", "0")
    (violation,) = repeated([key, RowKey("b", "0", "0"), key, other, key])
    assert str(violation) == "request of row a_0_0: it is 3 times in the batch"
    assert repeated([key, other]) == []


def test_generations_do_not_overlap() -> None:
    """The second generation saw only a part of the first, so no model ever saw this row as a whole."""
    ids, ones = np.array(RESPONSE[:3]), np.ones(3, int)
    row = rebuilt(np.array(PROMPT), ids, ones, np.array(LOGPROBS[:3], np.float32), np.array(VERSIONS[:3]))
    assert verify(row, Receipts("r1", [receipt(0, 3)])) == []
    (violation,) = verify(row, Receipts("r1", [receipt(0, 3), receipt(2, 3)]))
    assert "turn 1, token 5: begins at 5, before the end of what precedes it at 6" in str(violation)


def test_a_row_without_a_generation_is_masked() -> None:
    row = rebuilt(np.array(PROMPT), np.array([0]), np.array([0]), np.array([0.0], np.float32), np.array([-1]))
    assert verify(row, Receipts("r1", [])) == []
    mask = np.array([1])
    assert len(verify(replace(row, mask=mask, loss_mask=mask), Receipts("r1", []))) == 2


def test_the_verifier_knows_nothing_of_what_builds_a_row() -> None:
    """Look through everything that the verifier imports, whatever the package imports beside it."""
    seen: set[str] = set()
    todo = ["verl_multiturn.certificate.conversations"]
    while todo:
        name = todo.pop()
        path = ROOT / Path(*name.split(".")).with_suffix(".py")
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
    allowed = {"certificate.conversations", "certificate.check", "certificate.receipts"}
    allowed |= {"rollout.engines.protocol", "describe", "errors", "rows.keys"}
    assert seen == {f"verl_multiturn.{name}" for name in allowed}


# Honest rows of real conversations.


async def converse(
    turns: list[str], tool: EchoTool | None = None, first_logprob: float | None = None, **limits: Any
) -> dict[str, Any]:
    """Run a conversation with a scripted engine, and return its record."""
    tokenizer = CharTokenizer()
    rng = random.Random(0)

    class Noisy(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            made = await super().generate(*args, **kwargs)
            logprobs = [-rng.random() for _ in made.ids]
            if first_logprob is not None:
                logprobs[0] = first_logprob
            return replace(made, logprobs=logprobs)

    engine = ReceiptingEngine(Noisy([tokenizer.turn(turn) for turn in turns], version=3))
    settings = {"prompt_length": 100, "response_length": 400, "max_parallel_calls": 8, **limits}
    parser = JsonParser(tokenizer, [tokenizer.eos_token_id])
    conversation = Conversation(engine, ChatCodec(CharBuilder()), parser, Limits(**settings))
    tools = {"echo": tool or EchoTool()}
    outcome = await conversation.run(Request("r1", [{"role": "user", "content": "Q"}], tools))
    record = record_of(Life("r1", "u", 2, step=1, outcome=outcome, generations=engine.take("r1")))
    assert engine.take("r1") == []
    read: dict[str, Any] = json.loads(line_of(record))
    return read


def with_token(record: dict[str, Any], token: int, column: str, value: int) -> None:
    """Change a column of the record's row at one token."""
    row = record["rows"][0]
    row["runs"] = [[1, *run[1:]] for run in row["runs"] for _ in range(run[0])]
    row["runs"][token][1 + ("mask", "versions", "turn_ids", "sources").index(column)] = value


@pytest.mark.parametrize(
    ("turns", "limits", "reason"),
    [
        (["no call"], {}, StopReason.FINISHED),
        ([CALL, "ok"], {}, StopReason.FINISHED),
        ([CALL, CALL, CALL, "ok"], {"response_length": 900}, StopReason.FINISHED),
        ([CALL * 2, "ok"], {"max_parallel_calls": 1, "response_length": 900}, StopReason.FINISHED),
        ([CALL] * 9, {"max_assistant_turns": 2}, StopReason.MAX_ASSISTANT_TURNS),
        ([CALL] * 9, {"response_length": 100}, StopReason.RESPONSE_LENGTH),
        ([CALL] * 9, {"response_length": 20}, StopReason.RESPONSE_LENGTH),
        ([CALL], {}, StopReason.ENGINE_ERROR),
        ([], {}, StopReason.ENGINE_ERROR),
        (["x"], {"prompt_length": 2}, StopReason.PROMPT_TOO_LONG),
    ],
)
async def test_honest_conversations_raise_no_alarm(
    turns: list[str], limits: dict[str, Any], reason: StopReason
) -> None:
    record = await converse(turns, **limits)
    assert record["stop_reason"] == reason
    verdict = verify_record(record)
    assert verdict.violations == []
    assert verdict.sampled_tokens == sum(count * mask for row in record["rows"] for count, mask, *_ in row["runs"])
    sample = sample_of_record(record)
    invalid = reason in (StopReason.ENGINE_ERROR, StopReason.PROMPT_TOO_LONG)
    assert (sample.receipts.invalid, any(sample.row.mask)) == (invalid, not invalid)
    assert verify(sample.row, sample.receipts, filtered=invalid) == []


async def test_a_conversation_that_ran_out_of_time_raises_no_alarm() -> None:
    record = await converse([CALL, "ok"], EchoTool({"execute": "hang"}), wall_clock_s=0.05)
    assert record["stop_reason"] == StopReason.WALL_CLOCK
    assert verify_record(record).violations == []


@pytest.mark.parametrize(("column", "value"), [("mask", 1), ("versions", 3), ("turn_ids", 1), ("sources", 1)])
async def test_a_records_prompt_is_verified_too(column: str, value: int) -> None:
    record = await converse([CALL, "ok"])
    with_token(record, 1, column, value)
    if column == "sources":  # a sampled token has a logprob
        record["rows"][0]["logprobs"].insert(0, 0.0)
    (violation,) = verify_record(record).violations
    assert (violation.turn, violation.token) == (0, 1)


# The command.


async def test_verify_command(tmp_path: Path) -> None:
    record = await converse([CALL, "ok"])
    honest, faulty = tmp_path / "honest.jsonl", tmp_path / "faulty.jsonl"
    honest.write_text(json.dumps(record) + "\n")
    again = honest.read_text().replace('"r1"', '"r2"')
    with_token(record, 4, "mask", 0)
    faulty.write_text(again + json.dumps(record).replace('"r1"', '"r3"') + "\n")

    done = CliRunner().invoke(app, ["verify", str(honest)])
    said = f"ok 1 records, {len(CALL) + 4} sampled tokens, 0 violations"
    assert (done.exit_code, done.output.splitlines()[0]) == (0, said)
    done = CliRunner().invoke(app, ["verify", str(honest), str(faulty)])
    assert done.exit_code == 1
    assert f"{faulty}:2: request r3, turn 0, token 4: mask is 0, by the receipts 1" in done.output
    assert f"error 3 records, {3 * (len(CALL) + 4)} sampled tokens, 1 violations" in done.output


async def test_verify_goes_on_past_a_torn_line(tmp_path: Path) -> None:
    line = json.dumps(await converse([CALL, "ok"])) + "\n"
    path = tmp_path / "x.jsonl"
    path.write_text(line + line[:200] + "\n" + line[:100] + line + line.replace('"r1"', '"r2"') + line[:50])
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 0
    for number in (2, 3, 5):
        assert f"{path}:{number}: not verified: a torn line" in done.output
    assert f"ok 2 records, {2 * (len(CALL) + 4)} sampled tokens, 0 violations, 3 torn" in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no record"),
        ("not json\n", "holds no record"),
        ("[1]\n", ":1: expected a record, a JSON object, got a list"),
        ('{"x": 1}\n', ":1: no record of a conversation: it has no entry 'schema', expected 2"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_records(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.jsonl"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(app, ["verify", str(path)])
    assert done.exit_code == 2
    assert message in done.output


async def test_a_record_without_receipts() -> None:
    record = await converse(["ok"])
    assert verify_record({**record, "generations": []}).violations
    del record["generations"]
    with pytest.raises(CertificateError, match=r"no record of a conversation: generations is .*: field required"):
        verify_record(record)


def test_a_row_of_several_position_axes_is_a_violation() -> None:
    sample = literal()
    row: CertificateRow = replace(sample.row, position_ids=np.zeros((3, 16), int))
    assert "position_ids column has shape [3, 16]" in str(verify(row, sample.receipts)[0])
