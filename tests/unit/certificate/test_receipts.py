"""Receipts: requests to the engine and its answers, whatever happens to the lists later."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from tests.support.samples import rebuilt, sample_of_record
from tests.unit.certificate.test_certificate import PROMPT, converse, literal
from verl_multiturn import Ask, EngineError, Generation, ScriptedEngine, StopReason
from verl_multiturn.certificate.check import verify
from verl_multiturn.certificate.conversations import uncaused
from verl_multiturn.certificate.receipts import ReceiptingEngine, Receipts, as_unrewarded
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.rows.keys import RowKey


class SlowEngine:
    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        raise TimeoutError


class Scripted:
    """An engine that answers with the same lists each time, as a real one may."""

    def __init__(self, **changes: Any) -> None:
        self.generation = Generation(
            **{"ids": [5, 6], "logprobs": [-0.1, -0.2], "versions": [0, 1], "finish": "stop", **changes}
        )

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        return self.generation


async def test_what_is_done_to_the_lists_later_changes_no_receipt() -> None:
    engine = ReceiptingEngine(Scripted())
    prompt = [1, 2, 3]
    generation = await engine.generate(Ask("r1", prompt, {}, 10))
    prompt[0] = 9
    generation.ids[0], generation.logprobs[0], generation.versions[0] = 9, -9.0, 9
    (kept,) = engine.take("r1")
    assert (kept.ids.tolist(), kept.versions.tolist(), kept.prompt_tokens, kept.max_tokens) == ([5, 6], [0, 1], 3, 10)
    assert kept.logprobs.tolist() == pytest.approx([-0.1, -0.2])
    assert kept.prompt_digest == hashlib.blake2b(np.array([1, 2, 3], "<i4").tobytes(), digest_size=16).hexdigest()
    with pytest.raises(ValueError, match="read-only"):
        kept.ids[0] = 9


async def test_the_digest_is_of_what_the_engine_was_given_also_when_history_changes() -> None:
    engine = ReceiptingEngine(Scripted())
    prompts = ([1, 2, 3], [1, 2, 3, 5, 6, 7], [1, 9, 3, 5, 6, 7, 8], [1])
    for prompt in prompts:
        await engine.generate(Ask("r1", prompt, {}, 10))
    expected = [hashlib.blake2b(np.array(p, "<i4").tobytes(), digest_size=16).hexdigest() for p in prompts]
    assert [kept.prompt_digest for kept in engine.take("r1")] == expected


async def test_requests_are_kept_apart_and_an_engine_that_fails_leaves_no_receipt() -> None:
    engine = ReceiptingEngine(ScriptedEngine([[5]]))
    await engine.generate(Ask("a", [1], {}, 10))
    await engine.generate(Ask("b", [2], {}, 10))
    with pytest.raises(Exception, match="the script has 1 turns"):
        await engine.generate(Ask("a", [1, 5], {}, 10))
    assert len(engine.take("a")) == len(engine.take("b")) == 1
    with pytest.raises(TimeoutError):
        await ReceiptingEngine(SlowEngine()).generate(Ask("a", [1], {}, 10))


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": [], "logprobs": [], "versions": []},
        {"logprobs": [-0.1]},
        {"logprobs": [-0.1, float("nan")]},
        {"logprobs": [-0.1, 0.1]},
        {"ids": [5, 6, 7]},
        {"ids": [5, 6, 7], "logprobs": [-0.1, -0.2, -0.3], "versions": [0, 0, 0]},
    ],
)
async def test_what_is_no_generation_must_not_be_in_a_row(changes: dict[str, Any]) -> None:
    engine = ReceiptingEngine(Scripted(**changes))
    await engine.generate(Ask("r1", PROMPT, {}, 2))
    receipts = Receipts("r1", engine.take("r1"))
    assert not receipts.generations[0].is_generation
    masked = rebuilt(np.array(PROMPT), np.array([0]), np.array([0]), np.array([0.0], np.float32), np.array([-1]))
    assert verify(masked, receipts) == []
    trained = rebuilt(np.array(PROMPT), np.array([5, 6]), np.array([1, 1]), np.array([-0.1, -0.2]), np.array([0, 1]))
    assert {violation.what.split()[0] for violation in verify(trained, receipts)} >= {"mask", "logprob", "version"}


async def test_ids_that_are_no_numbers_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="not a generation"):
        await ReceiptingEngine(Scripted(ids=["a", "b"])).generate(Ask("r1", [1], {}, 10))


@pytest.mark.parametrize(("value", "shape"), [(5, r"\(\)"), ([[5, 6]], r"\(1, 2\)")])
@pytest.mark.parametrize("name", ["ids", "logprobs", "versions"])
async def test_what_is_no_list_of_numbers_is_an_engine_error(name: str, value: Any, shape: str) -> None:
    engine = ReceiptingEngine(Scripted(**{name: value}))
    with pytest.raises(EngineError, match=rf"not a generation: expected a list of numbers, got .* of shape {shape}"):
        await engine.generate(Ask("r1", [1], {}, 10))
    assert engine.take("r1") == []


async def test_an_id_below_zero_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="not a generation: id -1"):
        await ReceiptingEngine(Scripted(ids=[5, -1])).generate(Ask("r1", [1], {}, 10))


@pytest.mark.parametrize(
    ("logprob", "reason"),
    [
        (-1e39, StopReason.ENGINE_ERROR),
        (float("-inf"), StopReason.ENGINE_ERROR),
        (1e-40, StopReason.ENGINE_ERROR),
        (1e-60, StopReason.FINISHED),
        (-1e-60, StopReason.FINISHED),
        (-3e38, StopReason.FINISHED),
    ],
)
async def test_conversation_and_receipts_agree_on_what_float32_makes_of_a_logprob(
    logprob: float, reason: StopReason
) -> None:
    record = await converse(["ok"], first_logprob=logprob)
    assert record["stop_reason"] == reason
    assert verify_record(record).violations == []
    sample = sample_of_record(record)
    row = replace(sample.row, loss_inputs={})  # the trainer's own columns have further conditions
    assert verify(row, sample.receipts, filtered=sample.receipts.invalid) == []


def test_receipts_survive_bytes() -> None:
    receipts = literal("uid-7", 3).receipts
    copy = Receipts.from_bytes(receipts.to_bytes())
    assert copy.to_bytes() == receipts.to_bytes()
    assert (copy.uid, copy.session_id, copy.held) == ("uid-7", 3, receipts.held)
    assert Receipts.from_bytes(Receipts("r", []).to_bytes()).generations == []


def test_a_digest_has_128_bits() -> None:
    assert {len(each.digest) for each in literal().receipts.generations} == {32}


@pytest.mark.parametrize("cut", [0, 3, 40, -1])
def test_bytes_that_are_no_receipts(cut: int) -> None:
    with pytest.raises(ValueError, match="no receipts"):
        Receipts.from_bytes(literal().receipts.to_bytes()[:cut])
    with pytest.raises(ValueError, match="no receipts"):
        Receipts.from_bytes(literal().receipts.to_bytes() + b"x")


@pytest.mark.parametrize("invalid", [True, False])
def test_receipts_say_whether_a_conversation_is_invalid(invalid: bool) -> None:
    receipts = replace(literal().receipts, invalid=invalid)
    assert Receipts.from_bytes(receipts.to_bytes()).invalid is invalid


async def test_what_was_noted_cannot_be_written_to() -> None:
    engine = ReceiptingEngine(Scripted())
    await engine.generate(Ask("r1", [1], {}, 10))
    (kept,) = engine.take("r1")
    for column in (kept.ids, kept.logprobs, kept.versions):
        assert not column.flags.writeable
    for noted in (kept, literal().receipts):
        with pytest.raises(FrozenInstanceError):
            noted.void = True  # type: ignore[union-attr]


def with_header(blob: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return the bytes of receipts after a change of their header."""
    size = int.from_bytes(blob[:4], "little")
    header = json.loads(blob[4 : 4 + size])
    change(header)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(4, "little") + encoded + blob[4 + size :]


@pytest.mark.parametrize("change", [lambda counts: counts.append(0), lambda counts: counts.pop()])
def test_a_header_with_other_counts_is_no_receipt(change: Callable[[list[int]], Any]) -> None:
    blob = with_header(literal().receipts.to_bytes(), lambda header: change(header["generations"][0]))
    with pytest.raises(ValueError, match="no receipts"):
        Receipts.from_bytes(blob)


def test_roles_of_receipts() -> None:
    receipts = literal().receipts
    count = len(receipts.generations)
    blob = receipts.to_bytes()
    named = with_header(blob, lambda header: header.update(roles=["white"] * count))
    assert [each.role for each in Receipts.from_bytes(named).generations] == ["white"] * count
    older = with_header(blob, lambda header: header.pop("roles"))  # in a checkpoint
    assert [each.role for each in Receipts.from_bytes(older).generations] == [None] * count
    for roles in ([1] * count, "w" * count, None):
        wrong = with_header(blob, lambda header, roles=roles: header.update(roles=roles))
        with pytest.raises(ValueError, match=rf"roles is {re.escape(repr(roles))}, expected a list of texts"):
            Receipts.from_bytes(wrong)


@pytest.mark.parametrize("unrewarded", [False, True])
def test_receipts_keep_what_is_said_of_outages(unrewarded: bool) -> None:
    receipts = literal().receipts
    receipts = replace(receipts, outages=["tool search", "interaction user"])
    blob = as_unrewarded(receipts.to_bytes()) if unrewarded else receipts.to_bytes()
    read = Receipts.from_bytes(blob)
    assert (list(read.outages), read.unrewarded) == (["tool search", "interaction user"], unrewarded)
    assert [each.digest for each in read.generations] == [each.digest for each in receipts.generations]
    older = with_header(blob, lambda header: header.pop("outages"))  # in a checkpoint
    assert list(Receipts.from_bytes(older).outages) == []
    with pytest.raises(ValueError, match=r"outages is \[1\], expected a list of texts"):
        Receipts.from_bytes(with_header(blob, lambda header: header.update(outages=[1])))


def test_causes_that_the_receipts_bear_out() -> None:
    met, unrewarded, sound = (
        Receipts("met", [], outages=["tool search"]),
        Receipts("unrewarded", [], unrewarded=True),
        Receipts("sound", []),
    )
    rows = {RowKey("u", str(session), "0"): each for session, each in enumerate((met, unrewarded, sound))}
    assert uncaused(rows, {"u_0": "outage", "u_1": "reward_outage"}) == []
    assert uncaused(rows, {"u_1": "reward_outage"}) == [], "the keeper may have judged that it was none"
    found = uncaused(rows, {"u_0": "reward_outage", "u_1": "outage", "u_2": "outage"})
    assert [str(violation) for violation in found] == [
        "request met (rows u_0_*): it is left out as 'reward_outage', and its reward was judged",
        "request unrewarded (rows u_1_*): its reward could not be judged, and the cause why it is left out is 'outage'",
        "request sound (rows u_2_*): it is left out as 'outage', and none of its calls met one",
    ]
    assert len(uncaused(rows, {"u_1": "reward_outage", "u_2": "late"})) == 1
