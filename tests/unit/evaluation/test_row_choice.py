"""Rows that are kept by a model's results."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.evaluation_samples import INVALID, OPEN, data_row, write_evaluation
from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.results import Results, read_results
from verl_multiturn.evaluation.row_choice import Condition, choose, keep_rows
from verl_multiturn.rows.files import read_rows, row_digest

SAMPLES: dict[int, list[float | str]] = {
    0: [0.0, 0.0],
    1: [1.0, 0.0],
    2: [1.0, 1.0],
    3: [INVALID, INVALID],
    4: [0.0, 1.0],
}
ROWS = [data_row(number) for number in range(6)]


def test_lines_are_blank_as_they_are_to_the_reader(tmp_path: Path) -> None:
    results = read_results(write_evaluation(tmp_path / "eval", {0: [0.0], 1: [1.0]}))
    lines = [json.dumps(data_row(0)), "\u00a0", "\x1c", json.dumps(data_row(1))]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    keep_rows(tmp_path / "rows.jsonl", results, Condition("rate == 1"), tmp_path / "kept.jsonl")
    assert read_rows(tmp_path / "kept.jsonl", [".jsonl"]) == [data_row(1)]


@pytest.mark.parametrize(
    ("text", "n", "right", "holds"),
    [
        ("0 < rate < 1", 8, 1, True),
        ("0 < rate < 1", 8, 0, False),
        ("0 < rate < 1", 8, 8, False),
        ("rate <= 0.5 and n >= 8", 8, 4, True),
        ("rate <= 0.5 and n >= 8", 7, 3, False),
        ("right == 0 or right == n", 8, 8, True),
        ("(right != 0) and (rate > .9 or n < 3)", 2, 1, True),
        ("-1 < rate", 1, 0, True),
        ("rate<1 or rate>1 and n>9", 5, 0, True),
    ],
)
def test_conditions(text: str, n: int, right: int, holds: bool) -> None:
    assert Condition(text).holds(n, right) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rate",
        "0 <",
        "rate < x",
        "__import__('os').system('true')",
        "rate < __import__('os')",
        "rate < (1).real",
        "rate < 'a'",
        "rate < True",
        "not rate < 1",
        "rate in (0, 1)",
        "rate is 1",
        "rate < 1 + 1",
        "2 ** 10 ** 10 < rate",
        "rate < 1 if n else 0",
        "(r := 1) < rate",
        "[x for x in ()] < rate",
        "rate < 1; n",
        "rate < 1\x00",
        "(" * 400 + "rate < 1" + ")" * 400,
        "n > 1 and " * 200 + "n > 1",
        "rate < 1" + "0" * 400,
    ],
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected comparisons of rate, n and right with numbers"):
        Condition(text)


@given(st.text(max_size=60))
def test_a_text_is_a_condition_or_refused(text: str) -> None:
    try:
        condition = Condition(text)
    except ConfigError:
        return
    assert condition.holds(4, 2) in (True, False)


def results(tmp_path: Path, **changes: Any) -> Results:
    return read_results(write_evaluation(tmp_path / "eval", SAMPLES, **changes))


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    found = choose([row_digest(row) for row in ROWS], results(tmp_path), Condition("0 < rate < 1"), "'rows'")
    assert found.kept == [1, 4]
    assert found.left_out == {(0, 2): 1, (2, 2): 1}
    assert (found.unjudged, found.unknown, found.rows) == (1, 1, 6)


def test_a_row_that_stands_elsewhere_is_the_same(tmp_path: Path) -> None:
    digests = [row_digest(row) for row in reversed(ROWS)]
    assert choose(digests, results(tmp_path), Condition("0 < rate < 1"), "'rows'").kept == [1, 4]


def test_rows_that_say_the_same_keep_their_order(tmp_path: Path) -> None:
    rows = [data_row(0), data_row(0), data_row(0)]
    made = read_results(write_evaluation(tmp_path, {0: [1.0], 1: [0.0], 2: [1.0]}, rows=rows))
    assert choose([row_digest(row) for row in rows], made, Condition("rate > 0"), "'rows'").kept == [0, 2]


def test_rows_that_changed_since_are_refused(tmp_path: Path) -> None:
    digests = [row_digest(row | ({"data_source": "words"} if number == 2 else {})) for number, row in enumerate(ROWS)]
    with pytest.raises(
        ConfigError, match=r"'rows' lacks 1 rows of the evaluation, such as row 2 \(\w{16}\): they changed"
    ):
        choose(digests, results(tmp_path), Condition("rate < 1"), "'rows'")


def test_an_evaluation_that_is_not_over_is_refused(tmp_path: Path) -> None:
    made = read_results(write_evaluation(tmp_path, {0: [1.0], 1: [OPEN]}))
    with pytest.raises(ConfigError, match="is not over"):
        choose([row_digest(row) for row in ROWS], made, Condition("rate < 1"), "'rows'")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_command_writes_the_rows_as_they_are(tmp_path: Path, suffix: str) -> None:
    file, target = tmp_path / f"rows{suffix}", tmp_path / f"kept{suffix}"
    folder = write_evaluation(tmp_path / "eval", SAMPLES)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS).replace_schema_metadata({"made": "here"}), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    arguments = ["rows", "keep", str(file), "--eval", str(folder), "--where", "0 < rate < 1", "--to", str(target)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    assert read_rows(target, [suffix]) == [ROWS[1], ROWS[4]]
    if suffix == ".parquet":
        assert pq.read_schema(target).equals(pq.read_schema(file), check_metadata=True)
    *told, last = done.stdout.splitlines()
    assert told == [
        "kept 2 of 6 rows, by what outputs/model (1dd3c9151dcf78eb) made of them",
        "left out 1 rows that were right 0 of 2 times",
        "left out 1 rows that were right 2 of 2 times",
        "left out 1 rows without a conversation that has a reward",
        "left out 1 rows that were not evaluated",
        "of 2 samples a row that is right once in 20 times is never right in 90%",
    ]
    assert json.loads(last) == {
        "rows": 6,
        "kept": 2,
        "left_out": {"0 of 2": 1, "2 of 2": 1},
        "without_reward": 1,
        "not_evaluated": 1,
        "where": "0 < rate < 1",
        "model": "1dd3c9151dcf78eb",
        "samples": 2,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["eval", file.name, target.name])
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "expected a new file" in again.stderr
    none = CliRunner().invoke(app, [*arguments[:-3], "rate > 2", "--to", str(tmp_path / f"none{suffix}")])
    assert none.exit_code == 2
    assert "leaves no row" in none.stderr
