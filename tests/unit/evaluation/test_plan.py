"""Questions of an evaluation, and the remaining ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.plan import (
    DataRow,
    EvaluationProgress,
    Plan,
    SampleId,
    begin,
    end,
    numbered,
    only_source,
)

ROWS = (DataRow(0, "aa", "sums", 0), DataRow(1, "bb", "words", 1), DataRow(4, "cc", "sums", 2))
TOLD: dict[str, Any] = {
    "recipe": "quickstart", "variant": [], "overrides": [], "model": {"path": "m", "hash": "00ff"}, "only": None,
    "samples": 2, "temperature": 0.0, "engine": "ids", "rows_digest": "d", "reward_digest": "r",
    "settings_digest": "s", "started": 1.0, "ended": None,
}  # fmt: skip


def test_what_is_left_is_what_is_not_done_in_the_rows_order() -> None:
    plan = Plan(ROWS, 2)
    left = plan.left({SampleId(0, 1), SampleId(4, 0), SampleId(3, 0)})
    assert [(row.number, sample) for row, sample in left] == [(0, 0), (1, 0), (1, 1), (4, 1)]
    assert SampleId(4, 1).name == "4-1"


def test_rows_are_numbered_as_in_their_file() -> None:
    # The data set has dropped the second row; two rows are equal.
    assert numbered(["a", "b", "a", "c"], ["a", "a", "c"]) == [0, 2, 3]
    with pytest.raises(ConfigError, match="a row that its file has not"):
        numbered(["a"], ["a", "a"])


def test_rows_of_one_data_source() -> None:
    assert only_source(ROWS, None) == ROWS
    assert [row.number for row in only_source(ROWS, "sums")] == [0, 4]
    with pytest.raises(ConfigError, match=r"--only 'sum': there is no such row; .* are sums, words"):
        only_source(ROWS, "sum")


def test_other_rows_have_another_digest() -> None:
    assert Plan(ROWS, 2).digest == Plan(ROWS, 1).digest
    assert len({Plan(ROWS, 2).digest, Plan(ROWS[:2], 2).digest, Plan((ROWS[0], ROWS[2]), 2).digest}) == 3


def test_progress_shows_no_score() -> None:
    progress = EvaluationProgress(Plan(ROWS, 2), {SampleId(1, 0): 1.0, SampleId(1, 1): 1.0, SampleId(0, 0): 0.0})
    assert progress.line() == "rows 1 of 3 whole, 3 of 6 conversations"
    progress.scores[SampleId(0, 1)] = 1.0
    progress.invalid, progress.failed = 3, 1
    text = "rows 2 of 3 whole, 4 of 6 conversations, 3 invalid, 1 failed"
    assert progress.line() == text


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", {"path": "m", "hash": "ff00"}), ("rows_digest", "e"), ("temperature", 1.0), ("settings_digest", "t")],
)
def test_a_folder_belongs_to_one_question(tmp_path: Path, name: str, value: Any) -> None:
    begin(tmp_path, TOLD)
    assert begin(tmp_path, {**TOLD, "started": 2.0})["started"] == 1.0
    assert begin(tmp_path, {**TOLD, "model": {"path": "elsewhere", "hash": "00ff"}})["model"]["path"] == "m"
    with pytest.raises(ConfigError, match=f"holds an evaluation with {name} .*; name another folder with --out"):
        begin(tmp_path, {**TOLD, name: value})
    end(tmp_path, 3.0)
    assert json.loads((tmp_path / "evaluation.json").read_text())["ended"] == 3.0


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text('{"recipe": "qu')
    with pytest.raises(ConfigError, match="cannot be read"):
        begin(tmp_path, TOLD)
