"""The quickstart's summary of a run in which no token was trained."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.conftest import ROOT
from tests.recipe_scripts import script

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
