"""The rows of a conversation belong together: each generation is in one row, or listed with a cause."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.long.tokens.row_conversations import CONVERSATION_FAULTS, NOT_TRAINED, TRAINED, honest, trials, violations
from tests.support.sample_records import sample_record
from tests.support.samples import Sample
from verl_multiturn.certificate.conversations import gaps, shared, unjoined
from verl_multiturn.certificate.receipts import CAUSES, GenerationPlace, Receipt, Receipts
from verl_multiturn.errors import CertificateError
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.rows import row_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.rows.keys import RowKey

WHERE = [0, "undelivered", 0, 1, "not_selected", 2]


def generation(number: int) -> Receipt:
    ids = np.array([number, number + 1], np.int32)
    return Receipt(3 + number, f"{number:032x}", 9, ids, np.full(2, -0.5, np.float32), np.full(2, 4))


GENERATIONS = [generation(number) for number in range(len(WHERE))]


def rows_of(uid: str = "u", session_id: int = 0, **changes: Any) -> dict[RowKey, Receipts]:
    made = Receipts.of_rows("r1", GENERATIONS, WHERE, uid, session_id, **changes)
    return {RowKey(uid, str(session_id), str(row.row)): row for row in made}


def keys(*names: str) -> list[RowKey]:
    return [RowKey.parse(name) for name in names]


def test_each_row_gets_its_generations_and_all_know_the_places() -> None:
    rows = list(rows_of().values())
    assert [[int(g.ids[0]) for g in row.generations] for row in rows] == [[0, 2], [3], [5]]
    assert [row.row for row in rows] == [0, 1, 2]
    assert [place.where for place in rows[2].ledger] == WHERE
    assert unjoined(rows_of()) == []
    assert unjoined({**rows_of(), **rows_of(session_id=1, invalid=True)}) == []


def test_the_places_survive_bytes() -> None:
    row = rows_of()[RowKey("u", "0", "1")]
    copy = Receipts.from_bytes(row.to_bytes())
    assert (copy.row, copy.ledger, copy.to_bytes()) == (1, row.ledger, row.to_bytes())


def test_a_conversation_without_a_generation_has_one_row() -> None:
    (row,) = Receipts.of_rows("r1", [], [], invalid=True)
    assert (row.generations, row.row, unjoined({RowKey("u", "0", "0"): row})) == ([], 0, [])
    (row,) = Receipts.of_rows("r1", GENERATIONS[:1], ["dropped_row"], invalid=True)
    assert (row.generations, unjoined({RowKey("u", "0", "0"): row})) == ([], [])


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ([0, 0, 0, 0, 0, "lost"], r"'lost' is no cause; expected the index of a row, or one of \['too_old', 'inv"),
        ([0, 0, 0, 0, 0], r"6 generations have the places \[0, 0, 0, 0, 0\]; expected one for each"),
        ([0, 0, 2, 2, 2, 2], "counted from 0 without a gap"),
        ([1, 1, 1, 1, 1, 1], "counted from 0 without a gap"),
    ],
)
def test_places_that_cannot_be(where: list[int | str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Receipts.of_rows("r1", GENERATIONS, where)


def test_rows_are_counted_from_0_without_a_gap() -> None:
    assert gaps(keys("u_0_1", "u_0_0", "v_b_2_0", "u_0_2")) == []
    (violation,) = gaps(keys("u_0_0", "u_0_2", "u_1_0"))
    assert str(violation) == "request of conversation u_0: the batch has its rows [0, 2], expected [0, 1]"
    assert len(gaps(keys("u_0_1", "u_1_x", "u_2_0"))) == 2


def test_rows_of_a_conversation_share_a_request() -> None:
    first, second = keys("u_0_0", "u_0_1")
    assert shared({first: "r1", second: "r1", RowKey("u", "1", "0"): "r2"}) == []
    (violation,) = shared({first: "r1", second: "r1", RowKey("v", "0", "1"): "r1"})
    assert str(violation) == "request r1: it is in the batch as 'u_0_0' and as 'v_0_1'"


def without(rows: dict[RowKey, Receipts], name: str) -> None:
    del rows[RowKey.parse(name)]


def change(rows: dict[RowKey, Receipts], name: str, **changes: Any) -> None:
    key = RowKey.parse(name)
    rows[key] = replace(rows[key], **changes)


def relist(rows: dict[RowKey, Receipts], number: int, where: int | str) -> None:
    """List a generation with another place, in all rows of the first conversation."""
    for key, row in [(key, row) for key, row in rows.items() if key.conversation == "u_0"]:
        places = row.ledger
        places[number] = GenerationPlace(places[number].digest, where)
        rows[key] = replace(row, places=places)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda rows: without(rows, "u_0_2"), "one is listed with 2, expected a row below 2, or one of ['too_old'"),
        (lambda rows: change(rows, "u_0_1", request_id="r2"), "its rows do not agree on request_id: ['r1', 'r2']"),
        (lambda rows: change(rows, "u_0_1", invalid=True), "its rows do not agree on invalid: [False, True]"),
        (lambda rows: change(rows, "u_0_1", void=True), "its rows do not agree on void: [False, True]"),
        (lambda rows: change(rows, "u_0_1", places=None), "rows 0 and 1 do not agree on the places"),
        (lambda rows: change(rows, "u_0_0", generations=GENERATIONS[:1]), "row 0 lacks 1 of the 2 generations that"),
        (lambda rows: change(rows, "u_0_1", generations=GENERATIONS[2:4]), "row 1 lacks 0 of the 1 generations that"),
        (lambda rows: change(rows, "u_0_1", generations=GENERATIONS[1:2]), "with it, and has 1 others"),
        (lambda rows: change(rows, "u_0_0", generations=GENERATIONS[2::-2]), "row 0 has its generations in another"),
        (lambda rows: relist(rows, 2, "mislaid"), "one is listed with 'mislaid', expected a row below 3, or one of"),
        (lambda rows: relist(rows, 2, "too_old"), "row 0 lacks 0 of the 1 generations that are listed with it"),
        (lambda rows: relist(rows, 1, 1), "row 1 lacks 1 of the 2 generations that are listed with it"),
    ],
)
def test_what_does_not_join(fault: Callable[[dict[RowKey, Receipts]], None], what: str) -> None:
    rows = {**rows_of(), **rows_of(session_id=1)}
    fault(rows)
    (violation,) = unjoined(rows)
    assert str(violation).startswith("request r1 (rows u_0_*): ")
    assert what in str(violation)


def test_each_row_of_several_has_a_generation() -> None:
    rows = rows_of()
    relist(rows, 3, CAUSES[0])
    change(rows, "u_0_1", generations=[])
    (violation,) = unjoined(rows)
    assert "row 1 of 3 has no generation" in str(violation)


SEVERAL = [honest(seed) for seed in range(60)]


def test_honest_conversations_of_several_rows_raise_no_alarm() -> None:
    assert [str(violation) for rows in SEVERAL for violation in violations(rows)] == []
    assert {len(rows) for rows in SEVERAL} >= {2, 3, 4}
    assert {rows[0].receipts.invalid for rows in SEVERAL} == {False, True}
    listed = {place.where for rows in SEVERAL for place in rows[0].receipts.ledger}
    assert listed >= set(CAUSES)


@pytest.mark.parametrize("name", CONVERSATION_FAULTS)
def test_every_fault_of_several_rows_is_caught_at_its_place(name: str) -> None:
    put, caught = trials(name, SEVERAL, 20)
    assert (put, caught) == (20, 20)


def record_of_rows(rows: list[Sample]) -> dict[str, Any]:
    """Return the record of a conversation of several rows, as JSON reads it; each generation is in one of them."""
    receipts = rows[0].receipts
    kept, each = [], [iter(sample.receipts.generations) for sample in rows]
    for sample in rows:
        row, before = sample.row, len(sample.row.prompt_ids)
        assert row.logprobs is not None
        assert row.versions is not None
        sampled = [int(any(start <= at < end for start, end in sample.spans)) for at in range(len(row.response_ids))]
        ends = [end for _, end in sample.spans]
        kept.append(
            row_of(
                before,
                [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
                [0] * before + sampled,
                [0.0] * before + row.logprobs.tolist(),
                [-1] * before + row.versions.tolist(),
                [0] * before + [sum(end <= at for end in ends) for at in range(len(sampled))],
                [0] * before + [1 if each else 3 for each in sampled],
            )
        )
    generations = []
    for digest, place, role in receipts.ledger:
        assert isinstance(place, int)
        made = next(each[place])
        entry = {"prompt_tokens": made.prompt_tokens, "prompt_digest": made.prompt_digest, "finish": "stop"}
        entry |= {"max_tokens": made.max_tokens, "tokens": len(made.ids), "digest": digest}
        generations.append({**entry, "row": place, "start": made.prompt_tokens, "role": role})
    names = {"request_id": receipts.request_id, "uid": receipts.uid, "number": receipts.session_id}
    roles = {generation["role"] for generation in generations} - {None}
    session = {"roles": [*TRAINED, NOT_TRAINED], "trained": [*TRAINED]} if roles else None
    made_of = sample_record(**names, rows=kept, generations=generations, calls=[], replies=[], session=session)
    read: dict[str, Any] = json.loads(line_of(made_of))
    return read


def test_a_record_may_hold_several_rows() -> None:
    rows = next(
        rows
        for rows in SEVERAL
        if len(rows) > 2
        and not rows[0].receipts.invalid
        and all(isinstance(place.where, int) for place in rows[0].receipts.ledger)
    )
    record = record_of_rows(rows)
    verdict = verify_record(record)
    assert verdict.violations == []
    assert verdict.sampled_tokens == sum(len(row["logprobs"]) for row in record["rows"])
    with pytest.raises(CertificateError, match="cannot be read: its row is "):
        verify_record({**record, "rows": record["rows"][:-1]})
    swapped = {**record, "rows": record["rows"][::-1]}
    assert "the engine returned" in " ".join(map(str, verify_record(swapped).violations))
    record["rows"][1]["ids"][-1] += 1
    assert "the engine returned" in str(verify_record(record).violations[0])
    with pytest.raises(CertificateError, match="rows is 3: input should be a valid"):
        verify_record({**record, "rows": 3})
    lone = verify_record({**record, "rows": [], "generations": []})
    assert "it has no row" in " ".join(map(str, lone.violations))
