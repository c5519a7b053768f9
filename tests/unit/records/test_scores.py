"""A conversation's score by a join, and which join counts."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sample_records import sample_record, sample_run_file
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.joins import JoinedRow, JoinName
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import (
    NO_SCORE,
    acc_of,
    are_right,
    is_right,
    joined_rewards,
    parts_of,
    ranges_of,
    rewards_in,
    rewards_of,
    sum_of_rows,
)
from verl_multiturn.records.summaries import summary_of
from verl_multiturn.records.write.run_file import path_of
from verl_multiturn.rows.reward_numbers import ScoreRange

A, B = "20261126T101500_aaaaaa", "20261126T111500_bbbbbb"
NUMBERS = st.one_of(st.none(), st.floats(-8, 8), st.sampled_from([math.nan, math.inf, -math.inf]))


def row(number: int, at: int = 0, score: float | None = 1.0, **more: Any) -> JoinedRow:
    return JoinedRow(f"r{number}", "u", number, at, more.pop("validation", False), 1, score=score, **more)


def earned(*rows: JoinedRow) -> dict[str, float | None]:
    table = rewards_in(joins.table_of(rows))
    return dict(zip(table["request_id"].to_pylist(), table["score"].to_pylist(), strict=True))


def write(folder: Path, name: JoinName, *rows: JoinedRow, **settings: Any) -> None:
    run = sample_run_file(start=name.start)
    path_of(folder, name.start).write_text(json.dumps({**run, "settings": {**run["settings"], **settings}}))
    joins.write(folder, joins.name_of(*name), joins.table_of([replace(each, step=name.step) for each in rows]))


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=4), min_size=1, max_size=6))
def test_a_column_of_rows_and_a_single_conversation_have_one_rule(scores: list[list[float | None]]) -> None:
    rows = [row(number, at, score) for number, own in enumerate(scores) for at, score in enumerate(own)]
    found = earned(*rows)
    for number, own in enumerate(scores):
        expected = sum_of_rows(own)
        assert found[f"r{number}"] == (None if expected is None else pytest.approx(expected))


def test_numbers_that_no_float_holds() -> None:
    beyond, deep = "1" + "0" * 400, '{"a": ' * 1_020 + "1" + "}" * 1_020
    for text in (f'{{"acc": {beyond}, "b": 1}}', f'{{"acc": {beyond}, "b": 1, "c": NaN}}'):
        assert (acc_of(text), parts_of(text)) == (None, {"b": 1.0})
    assert [*parts_of(deep).values()] == [1.0]
    largest = 9.9e291
    assert (
        earned(*(row(0, at, largest) for at in range(3))) == {"r0": 3 * largest} == {"r0": sum_of_rows([largest] * 3)}
    )
    for score in (1e308, -1e292):
        assert earned(row(0, 0, 1.0), row(0, 1, score)) == {"r0": None}
        assert sum_of_rows([1.0, score]) is None


def test_a_conversation_of_several_names_has_one_reward() -> None:
    again = [replace(row(0, 0, score), uid=uid, number=number) for score, uid, number in ((1.0, "u", 0), (2.0, "v", 7))]
    assert rewards_in(joins.table_of(again))["score"].to_pylist() == [2.0]
    table = rewards_in(joins.table_of([replace(each, request_id=None) for each in again]))
    assert [(each["uid"], each["number"], each["score"]) for each in table.to_pylist()] == [
        ("u", 0, 1.0),
        ("v", 7, 2.0),
    ]


@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(-2, 2)), st.one_of(st.none(), st.floats(-1, 1))), min_size=1))
def test_a_column_and_a_single_conversation_are_right_by_one_rule(
    conversations: list[tuple[float | None, float | None]],
) -> None:
    known = ScoreRange.of(score for score, _ in conversations)
    scores, accs = (pa.chunked_array([pa.array(each, pa.float64())]) for each in zip(*conversations, strict=True))
    found = are_right(scores, accs, known).to_pylist()
    assert [bool(each) for each in found] == [
        score is not None and known.is_right(score, acc) for score, acc in conversations
    ]


@pytest.mark.parametrize("cause", NO_SCORE)
def test_a_cause_for_which_a_score_says_nothing(cause: str) -> None:
    assert earned(row(0, 0, untrained=cause), row(0, 1), row(1, untrained="too_old")) == {"r0": None, "r1": 1.0}


def test_a_row_that_stands_there_twice_counts_once_and_one_of_another_loop_by_its_place() -> None:
    others = [JoinedRow(None, "v", number, 0, False, 1, score=0.5) for number in (0, 1)]
    table = rewards_in(joins.table_of([row(0, 0, 9.0), row(0, 1, 1.0), row(0, 0, 0.5), *others]))
    assert table.select(["request_id", "uid", "number", "score"]).to_pylist() == [
        {"request_id": "r0", "uid": "u", "number": 0, "score": 1.5},
        {"request_id": None, "uid": "v", "number": 0, "score": 0.5},
        {"request_id": None, "uid": "v", "number": 1, "score": 0.5},
    ]


def test_a_join_of_a_stranger_that_lacks_columns() -> None:
    table = joins.table_of([row(0)]).drop_columns(["parts", "untrained", "number"])
    assert rewards_in(table)["score"].to_pylist() == [1.0]
    assert rewards_in(table.drop_columns(["score"]))["score"].to_pylist() == [None]


def test_the_last_start_s_join_counts_though_its_step_is_an_earlier_one(tmp_path: Path) -> None:
    # The second start went on from step 1, and took the conversation again in step 2.
    write(tmp_path, JoinName(False, 3, A), row(0, 0, 0.25), row(0, 1, 0.5))
    write(tmp_path, JoinName(False, 2, A), row(1, 0, 0.5))
    write(tmp_path, JoinName(False, 2, B), row(0, 0, 1.0))
    records = Records(tmp_path)
    found = joined_rewards(records)
    assert {key: (each.score, each.step, each.undone) for key, each in found.items()} == {
        "r0": (1.0, 2, False),
        "r1": (0.5, 2, True),
    }
    assert sorted(records.joined()["score"].to_pylist()) == [0.5, 1.0]


def test_each_start_of_an_evaluation_counts(tmp_path: Path) -> None:
    for start, number in ((A, 0), (B, 1)):
        write(tmp_path, JoinName(True, 0, start), row(number, validation=True), evaluation={})
    assert [each.undone for each in rewards_of(Records(tmp_path)).values()] == [False, False]


def test_an_invalid_conversation_earned_nothing_whatever_a_join_or_a_line_says(tmp_path: Path) -> None:
    write(tmp_path, JoinName(False, 1, A), row(0, score=0.5), row(1, score=0.5))
    lines = []
    for number, valid in enumerate([False, True, False, True]):
        line = {"request_id": f"r{number}", "uid": "u", "number": number, "validation": False, "step": 1, "at": 1.0}
        end = {"event": "end", "summary": summary_of(sample_record(valid=valid))}
        lines += [line | {"event": "begin"}, line | end, line | {"event": "score", "score": 0.25}]
    (tmp_path / f"{A}-host-1-00000000.lines.jsonl").write_bytes(b"".join(map(line_of, lines)))
    found = rewards_of(Records(tmp_path))
    assert {key: each.score for key, each in found.items()} == {"r0": None, "r1": 0.5, "r2": None, "r3": 0.25}


def test_training_and_validation_have_a_range_each(tmp_path: Path) -> None:
    write(tmp_path, JoinName(False, 1, A), row(0, score=0.0), row(1, score=1.0))
    write(tmp_path, JoinName(True, 1, A), row(2, score=0.25, validation=True), row(3, score=0.0, validation=True))
    found = rewards_of(Records(tmp_path))
    ranges = ranges_of(found.values())
    assert ranges == (ScoreRange(0.0, 1.0), ScoreRange(0.0, 0.25))
    assert {key for key, each in found.items() if is_right(each, ranges)} == {"r1", "r2"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, {}),
        ("[" * 100_000, {}),
        ("[1]", {}),
        ('{"acc": true, "a": {"b": 2}, "c": "x", "d": NaN, "e": Infinity}', {"acc": 1.0, "a/b": 2.0}),
    ],
)
def test_the_parts_of_a_reward(text: str | None, parts: dict[str, float]) -> None:
    assert parts_of(text) == parts
