"""Two evaluations of the same rows."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.evaluation_samples import OPEN, OTHER, data_row, write_evaluation
from tests.unit.evaluation.test_tables import printed
from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.compare import Comparison, compare, comparison_summary, comparison_table
from verl_multiturn.evaluation.results import read_results

FIRST = {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 1.0], 3: [1.0, 1.0]}
SECOND = {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [0.0, 1.0], 3: [0.0, 0.0]}


def compared(tmp_path: Path, first: dict, second: dict, **changes: object) -> Comparison:  # type: ignore[type-arg]
    folders = write_evaluation(tmp_path / "a", first), write_evaluation(tmp_path / "b", second, model=OTHER, **changes)
    return compare(*map(read_results, folders))


def test_rows_are_compared_one_by_one(tmp_path: Path) -> None:
    found = compared(tmp_path, FIRST, SECOND)
    assert [pair.difference for pair in found.pairs] == [1.0, -0.5, 0.0, -1.0]
    assert [pair.flip for pair in found.pairs] == [1, 0, 0, -1]
    gained, lost = found.flipped
    assert [sample.request_id for sample in gained.shown] == ["0-0-9f3c2a", "0-0-9f3c2a"]
    assert [sample.right for sample in lost.shown] == [True, False]
    assert comparison_summary(found) == {
        "first": "1dd3c9151dcf78eb",
        "second": "5c66446dffffffff",
        "rows": 4,
        "asked": 4,
        "difference": -0.125,
        # Standard error 0.8539 / 2, t 3.1824; SciPy's ttest_rel has p 0.7888.
        "interval": [-1.0, 1.0],
        "no_interval": None,
        "p": 0.7888,
        "differ": 3,
        "better": 1,
        "worse": 2,
        "gained": [0],
        "lost": [3],
        "other_settings": {},
    }


def test_other_settings_are_told(tmp_path: Path) -> None:
    found = compared(tmp_path, FIRST, SECOND, settings_digest="ab", overrides=["a=1"])
    told = {"overrides": [None, ["a=1"]], "settings_digest": [None, "ab"]}
    assert comparison_summary(found)["other_settings"] == told
    assert printed(comparison_table(found))[2:4] == ["overrides: None and ['a=1']", "settings_digest: None and 'ab'"]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_finite_number_makes_no_figure(tmp_path: Path, score: float) -> None:
    found = compared(tmp_path, FIRST, {**SECOND, 0: [score, 1.0]})
    assert [pair.first.number for pair in found.pairs] == [1, 2, 3]
    assert found.second.count("failed") == 1
    json.dumps(comparison_summary(found), allow_nan=False)


def test_the_table_of_a_comparison(tmp_path: Path) -> None:
    lines = printed(comparison_table(compared(tmp_path, FIRST, SECOND, temperature=0.5)))
    assert lines[2] == "temperature: 1.0 and 0.5"
    assert [line.split() for line in lines[3:5]] == [
        ["data_source", "rows", "first", "second", "difference", "p", "better", "worse", "gained", "lost"],
        ["sums", "4", "0.625", "0.500", "-0.125", "[-1.000", "1.000]", "0.79", "1", "2", "1", "1"],
    ]
    assert lines[6].split() == ["0", "sums", "0", "of", "2", "2", "of", "2", "0-0-9f3c2a", "0-0-9f3c2a"]
    assert lines[7].split()[:8] == ["3", "sums", "2", "of", "2", "0", "of", "2"]


def test_few_rows_that_nearly_agree_prove_nothing(tmp_path: Path) -> None:
    first = {row: [0.0] for row in range(5)}
    shares = comparison_summary(compared(tmp_path / "s", first, {**{row: [1.0] for row in range(4)}, 4: [0.99]}))
    assert (shares["p"], shares["interval"], shares["differ"]) == (0.0625, [0.391433, 1.0], 5)
    found = compared(tmp_path / "r", first, {**{row: [9.0] for row in range(4)}, 4: [8.99]})
    others = comparison_summary(found)
    why = "rows that differ: 2; an interval of rewards outside [0, 1] needs 8"
    assert (others["p"], others["interval"], others["no_interval"]) == (0.0625, None, why)
    lines = printed(comparison_table(found))
    assert "+8.998 [no interval]  0.062" in lines[3]
    assert lines[4] == f"sums: no interval: {why}"


def test_what_differs_by_rounding_alone_is_neither_better_nor_worse(tmp_path: Path) -> None:
    found = comparison_summary(compared(tmp_path, {0: [0.1, 0.2], 1: [0.3]}, {0: [0.2, 0.1], 1: [0.1 + 0.2]}))
    assert (found["better"], found["worse"], found["differ"], found["p"]) == (0, 0, 0, 1.0)


def test_rows_count_that_both_may_show(tmp_path: Path) -> None:
    times = {(0, 0): (0.0, 5.0), (1, 0): (50.0, 5.0)}
    found = compared(tmp_path, {0: [1.0], 1: [0.0]}, {0: [0.0], 1: [OPEN]}, times=times)
    assert [pair.first.number for pair in found.pairs] == [0]


def test_other_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"row 1 is \w{16} in one and \w{16} in the other; evaluate both models on the"
    ):
        compared(tmp_path, {0: [1.0], 1: [1.0]}, {0: [1.0], 1: [1.0]}, rows=[data_row(0), data_row(9)])


def test_a_part_of_the_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"are of other rows, 2 \(00\) and 1 \(22\); evaluate both models on the same"
    ):
        compared(tmp_path, {0: [1.0], 1: [1.0]}, {0: [1.0]}, rows_digest="22")


def test_another_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have other reward functions, '11' and '33'"):
        compared(tmp_path, {0: [1.0]}, {0: [1.0]}, reward_digest="33")


def test_no_row_in_common_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have no whole row in common yet; let both go on"):
        compared(tmp_path, {0: [1.0]}, {0: [OPEN]})


def test_the_command(tmp_path: Path) -> None:
    folders = [
        str(write_evaluation(tmp_path / "a", FIRST)),
        str(write_evaluation(tmp_path / "b", SECOND, model=OTHER)),
        str(write_evaluation(tmp_path / "c", FIRST, model=OTHER)),
    ]
    done = CliRunner().invoke(app, ["compare", *folders])
    assert done.exit_code == 0
    last = json.loads(done.stdout.splitlines()[-1])
    assert [each["difference"] for each in last["comparisons"]] == [-0.125, 0.0]
    alone = CliRunner().invoke(app, ["compare", folders[0]])
    assert alone.exit_code == 2
    assert "alone cannot be compared" in alone.stderr
