"""The rows of recipes/from_records."""

import json
from pathlib import Path

import pytest

from tests.recipe_scripts import RECIPES, script
from tests.support.sample_records import START, sample_run
from verl_multiturn import ConfigError


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES / "from_records"))


def chosen(tmp_path: Path, *words: str) -> list[dict[str, object]]:
    sample_run(tmp_path / "records")
    return prepared_train(tmp_path / "data", "--records", str(tmp_path), *words)


def prepared_train(folder: Path, *words: str) -> list[dict[str, object]]:
    import sys
    from unittest import mock

    import pyarrow.parquet

    with mock.patch.object(sys, "argv", ["prepare_data.py", "--out", str(folder), *words]):
        script("from_records").main()
    return pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()  # type: ignore[no-any-return]


def test_each_row_for_sft_names_a_record_and_its_lineage(tmp_path: Path) -> None:
    rows = chosen(tmp_path, "--min-score", "1", "--batch", "4")
    lines = [json.loads(line) for line in (tmp_path / "data" / "lineage.jsonl").read_text().splitlines()]
    assert [row["request_id"] for row in rows] == [f"{START}-t{step}-{group}-0" for step in (1, 2) for group in (0, 1)]
    assert [(line["row"], line["request_id"]) for line in lines] == [
        (number, row["request_id"]) for number, row in enumerate(rows)
    ]
    assert {key: lines[3][key] for key in ("index", "model", "reward", "uid", "step", "trained_tokens")} == {
        "index": 0, "model": None, "reward": 1.0, "uid": f"{START}-t2-1", "step": 2, "trained_tokens": 7,
    }  # fmt: skip
    assert lines[3]["file"] == rows[3]["path"]


def test_each_row_for_rl_is_a_group(tmp_path: Path) -> None:
    rows = chosen(tmp_path, "--group", "4")
    assert len(rows) == 4
    assert rows[0]["agent_name"] == "recorded_agent"
    assert rows[0]["prompt"] == [{"role": "user", "content": "547 + 292 ="}]
    records = rows[0]["extra_info"]["records"]  # type: ignore[index]
    assert [each["score"] for each in records] == [1.0, 0.0, 0.0, 0.0]
    assert [each["request_id"] for each in records] == [f"{START}-t1-0-{number}" for number in range(4)]
    lines = [json.loads(line) for line in (tmp_path / "data" / "lineage.jsonl").read_text().splitlines()]
    assert [(line["row"], line["index"]) for line in lines[:5]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_fewer_rows_than_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 rows were chosen, fewer than a batch \(data.train_batch_size=5\)"):
        chosen(tmp_path, "--min-score", "1", "--batch", "5")
    assert not (tmp_path / "data").exists()


def test_the_smoke_runs_own_records_can_be_learned_from(tmp_path: Path) -> None:
    rows = prepared_train(tmp_path, "--smoke", "--tokenizer", str(RECIPES / "common" / "model"), "--min-score", "1")
    assert len(rows) == 16
    lines = [json.loads(line) for line in (tmp_path / "lineage.jsonl").read_text().splitlines()]
    assert [(line["uid"], line["number"]) for line in lines[:3]] == [("group-0", 0), ("group-0", 1), ("group-1", 0)]
