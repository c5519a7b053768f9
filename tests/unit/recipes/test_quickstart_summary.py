"""The quickstart's summary of a run in which no token was trained."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.conftest import ROOT
from tests.recipe_scripts import script
from tests.support.sample_records import sample_run

RECIPE = ROOT / "recipes" / "quickstart"


def test_a_run_without_a_trained_token_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    summary = script("quickstart", "report")

    (tmp_path / "records").mkdir()
    data = {"critic/score/mean": 0.0, "timing_s/step": 2.0, "rollout/certificate/rows": 8}
    logged = {"step": 1, "data": {**data, summary.PROB_DIFF_MEAN: None, summary.PROB_DIFF_MAX: None}}
    summary.summarize(tmp_path, [logged], 0, 0.0, {"checks": 1.0}, Console(file=io.StringIO()))
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["prob_diff_mean"], found["prob_diff_max"], found["certificate_rows"]) == (None, None, 8)
    assert (found["joined_trained"], found["record_bytes_per_token"], found["join_score_diff"]) == (0, None, None)


def test_a_run_without_records_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    summary = script("quickstart", "report")
    logged = {"step": 1, "data": {"critic/score/mean": 0.5, "timing_s/step": 2.0}}
    summary.summarize(tmp_path, [logged], 0, 0.0, {"checks": 1.0}, Console(file=io.StringIO()))
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["reward_first_10"], found["tool_calls_per_trajectory"], found["tool_error_rate"]) == (0.5, None, None)
    assert "joined_trained" not in found


def test_what_the_join_says_is_compared_with_verls_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    summary = script("quickstart", "report")
    sample_run(tmp_path / "records", steps=2, groups=2, size=4)
    advantages = {"critic/advantages/mean": 0.0, "critic/advantages/min": -0.5, "critic/advantages/max": 1.25}
    costs = {"timing_s/step": 10.0, "rollout/records/join_seconds": 0.05}
    logged = [
        {"step": step, "data": {"critic/score/mean": score, **advantages, **costs}}
        for step, score in ((1, 0.25), (2, 0.26))
    ]
    summary.summarize(tmp_path, logged, 0, 0.0, {"checks": 1.0}, Console(file=io.StringIO()))
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["joined_trained"], found["joined_validated"]) == (16, 2)
    assert found["join_score_diff"] == pytest.approx(0.01)
    assert found["join_advantage_diff"] == pytest.approx(0.25)
    # 18 records of 16 tokens.
    files = [*(tmp_path / "records").glob("*.jsonl.gz"), *(tmp_path / "records" / "join").iterdir()]
    size = sum(path.stat().st_size for path in files)
    assert found["record_bytes_per_token"] == pytest.approx(size / (18 * 16))
    assert found["record_share_of_step"] == pytest.approx(0.1 / 20)
    assert found["fates"] == {"trained": 16, "validated": 2, "cut": 1, "raised": 1}
