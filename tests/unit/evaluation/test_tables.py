"""The table and the line of an evaluation."""

from pathlib import Path

import pytest
from rich.console import Console, Group

from tests.support.evaluation_samples import FAILED, INVALID, OPEN, data_row, write_evaluation
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.compare import compare, comparison_table
from verl_multiturn.evaluation.estimates import wilson
from verl_multiturn.evaluation.figures import Price
from verl_multiturn.evaluation.points import point_of
from verl_multiturn.evaluation.probe import probe, probe_table
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.evaluation.tables import failures_of, summary_of, table_of

GENERATIONS = [
    {"prompt_tokens": 100, "cached_tokens": 0, "tokens": 20},
    {"prompt_tokens": 140, "cached_tokens": 120, "tokens": 10},
]


def printed(what: Group) -> list[str]:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(what, highlight=False)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return lines[1:] if lines[0].startswith("model ") else lines


def test_the_table_of_a_whole_evaluation(tmp_path: Path) -> None:
    samples: dict[int, list[float | str]] = {row: [1.0, 0.0] if row < 3 else [0.0, 0.0] for row in range(4)}
    results = read_results(write_evaluation(tmp_path, samples, generations=GENERATIONS))
    # avg: 15 answers, of which no more than the 8 samples count; pass: 0.1875 * 4 / 0.25 = 3 answers; t = 3.1824.
    assert printed(table_of(results, Price(0.5, 2.0))) == [
        "rows 4 of 4 whole, 8 of 8 conversations",
        "data_source  rows                avg@2               pass@2  calls  tokens  cached  seconds   price",
        "sums            4  0.375 [0.076 0.813]  0.750 [0.131 0.984]   1.00    30.0     50%      3.0  0.0014",
        "failure  stop reason  conversations  such as",
        "wrong    finished                 5  0-1-9f3c2a 1-1-9f3c2a 2-1-9f3c2a",
    ]


def test_the_line_of_a_whole_evaluation(tmp_path: Path) -> None:
    rows = [data_row(0), data_row(1, data_source="words")]
    results = read_results(write_evaluation(tmp_path, {0: [1.0], 1: [0.0]}, rows=rows, generations=GENERATIONS))
    found = summary_of(results)
    assert {name: found[name] for name in ("rows", "samples", "model", "avg", "pass", "asked", "whole")} == {
        "rows": 2,
        "samples": 1,
        "model": "1dd3c9151dcf78eb",
        "avg": 0.5,
        "pass": {"1": 0.5},
        "asked": 2,
        "whole": 2,
    }
    assert (found["conversations"], found["invalid"], found["failed"], found["faults"]) == (2, 0, 0, 0)
    assert (found["calls"], found["tokens"], found["cached"], found["seconds"]) == (1.0, 30.0, 0.5, 3.0)
    assert [(name, each["rows"], each["avg"]) for name, each in found["sources"].items()] == [
        ("sums", 1, 1.0),
        ("words", 1, 0.0),
    ]
    assert "price" not in found
    # Two data sources have a line for both.
    assert [line.split()[0] for line in printed(table_of(results))[1:5]] == ["data_source", "sums", "words", "all"]


def test_an_evaluation_that_is_not_over_says_so(tmp_path: Path) -> None:
    times = {(0, 0): (0.0, 50.0), (1, 0): (5.0, 5.0), (2, 0): (20.0, 5.0), (3, 0): (60.0, 0.0)}
    results = read_results(write_evaluation(tmp_path, {0: [1.0], 1: [0.0], 2: [0.0], 3: [OPEN]}, asked=9, times=times))
    assert printed(table_of(results))[:2] == [
        "rows 3 of 9 whole, 3 of 9 conversations",
        "figures are of the first 2 of these: 1 may be there only because their conversations were short",
    ]
    assert (summary_of(results)["rows"], summary_of(results)["avg"]) == (2, 0.5)


def test_the_table_says_what_was_asked(tmp_path: Path) -> None:
    results = read_results(write_evaluation(tmp_path, {0: [1.0]}, engine="ids"))
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table_of(results))
    asked = "model 1dd3c9151dcf78eb, 1 samples a row at temperature 1.0, engine ids"
    assert capture.get().splitlines()[0].rstrip() == asked


def test_nothing_is_said_of_no_row(tmp_path: Path) -> None:
    results = read_results(write_evaluation(tmp_path, {0: [OPEN, 1.0]}, asked=9))
    assert printed(table_of(results)) == ["rows 0 of 9 whole, 1 of 18 conversations"]
    assert (summary_of(results)["rows"], summary_of(results)["avg"]) == (0, None)


def test_failures_have_their_causes(tmp_path: Path) -> None:
    results = read_results(write_evaluation(tmp_path, {0: [1.0, 0.0], 1: [INVALID, FAILED], 2: [0.0, INVALID]}))
    assert failures_of(results) == {
        ("invalid", "engine_error"): ["1-0-9f3c2a", "2-1-9f3c2a"],
        ("failed", "finished"): ["1-1-9f3c2a"],
        ("wrong", "finished"): ["0-1-9f3c2a"],
    }
    text = printed(table_of(results))
    assert text[:2] == [
        "rows 1 of 3 whole, 3 of 6 conversations, 2 invalid, 1 failed",
        "rows with an invalid or failed conversation are left out; the same command asks for these again",
    ]


def test_rewards_that_broke_are_not_called_wrong_answers(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("failed", "timed_out", "outage", "unjudgeable"), 0.0)
    parts = {
        (0, 0): nothing | {"failed": 1.0},
        (0, 1): nothing,
        (1, 0): nothing | {"timed_out": 1.0},
        (1, 1): nothing | {"failed": 1.0, "outage": 1.0},
    }
    results = read_results(write_evaluation(tmp_path / "out", {0: [0.0, 0.0], 1: [0.0, INVALID]}, parts=parts))
    found = summary_of(results)
    assert (found["rewards_failed"], found["rewards_timed_out"], found["failed"]) == (1, 1, 0)
    assert failures_of(results) == {
        ("invalid", "engine_error"): ["1-1-9f3c2a"],
        ("reward failed", "finished"): ["0-0-9f3c2a"],
        ("wrong", "finished"): ["0-1-9f3c2a"],
    }
    said = "the reward broke in 1 and was late in 1 of 3 conversations, which score 0 whatever their answer: "
    assert f"{said}verl-multiturn explain {tmp_path / 'out'}" in " ".join(printed(table_of(results)))


def test_rewards_beyond_one_have_another_interval(tmp_path: Path) -> None:
    scores: dict[int, list[float | str]] = {row: [row - 1.0, row + 1.0] for row in range(8)}
    found = summary_of(read_results(write_evaluation(tmp_path, scores)))
    # Means 0 to 7 of eight rows: 3.5, and 2.3646 standard errors of 2.4495 / sqrt(8) to either side.
    assert found["avg"] == 3.5
    assert found["avg_interval"] == pytest.approx([1.4522, 5.5478], abs=1e-4)
    assert found["avg_no_interval"] is None


def test_k_samples_are_one_answer(tmp_path: Path) -> None:
    scores: dict[int, list[float | str]] = {row: [1.0] * (3 + row % 2) + [0.0] * (5 - row % 2) for row in range(16)}
    found = summary_of(read_results(write_evaluation(tmp_path, scores)))
    # The rows' pass@4 are nearly alike. Of 128 samples there are 32 choices of four that share none; t = 2.1314.
    assert found["pass"]["4"] == pytest.approx((1 - 5 / 70 + 1 - 1 / 70) / 2)
    assert found["pass_interval"]["4"] == pytest.approx(wilson(found["pass"]["4"], 32, 2.13145), abs=1e-5)
    assert found["pass_interval"]["8"] == pytest.approx(wilson(1.0, 16, 2.13145), abs=1e-5)


def test_few_rewards_beyond_one_have_no_interval(tmp_path: Path) -> None:
    results = read_results(write_evaluation(tmp_path, {0: [2.0, -1.0], 1: [3.0, 3.0], 2: [1.0, 1.0]}))
    found, why = summary_of(results), "rows that differ: 3; an interval of rewards outside [0, 1] needs 8"
    assert (found["avg"], found["avg_interval"], found["avg_no_interval"]) == (1.5, None, why)
    assert found["pass"] == {"1": pytest.approx(5 / 6, abs=1e-6), "2": 1.0}
    lines = printed(table_of(results))
    assert "1.500 [no interval]  1.000 [0.139 1.000]" in lines[2]
    assert lines[3] == f"sums: no interval: {why}"
    point = point_of(results, 4)
    assert (point.state, point.interval, point.why) == ("evaluated", None, f"no interval: {why}")


def test_rewards_too_large_for_a_square_have_no_interval(tmp_path: Path) -> None:
    found = summary_of(read_results(write_evaluation(tmp_path, {row: [row * 1e200] for row in range(9)})))
    assert (found["avg_interval"], found["avg_no_interval"]) == (None, "the rewards are too large for a float's square")


def test_nothing_that_a_terminal_obeys_is_printed(tmp_path: Path) -> None:
    rows = [data_row(number, data_source="a\x1b[31m\u202e[bold]") for number in range(2)]
    results = read_results(write_evaluation(tmp_path, {0: [1.0, 0.0], 1: [0.0, 1.0]}, rows=rows))
    for table in (table_of(results), probe_table(results, probe(results)), comparison_table(compare(results, results))):
        assert not any("\x1b" in line for line in printed(table))
    assert any(line.startswith("a\\x1b[31m\\u202e[bold]") for line in printed(table_of(results)))


def test_prices() -> None:
    assert Price.parse("0.5,1.5") == (0.5, 1.5)
    for text in ("", "1", "a,b", "-1,2", "nan,1", "1,2,3"):
        with pytest.raises(ConfigError, match="expected the prices of a million prompt and sampled tokens"):
            Price.parse(text)
