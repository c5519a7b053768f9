"""The quickstart's rows and reward: its questions, and their scores."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import prepared

RECIPE = ROOT / "recipes" / "quickstart"


@pytest.mark.parametrize(("examples", "roles"), [(0, "su"), (2, "suatauatau")])
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: int, roles: str) -> None:
    monkeypatch.syspath_prepend(RECIPE)
    sizes = ["--train-size", "3", "--test-size", "2", "--examples", str(examples)]
    rows = prepared("quickstart", tmp_path, *sizes)["train"]
    assert len(rows) == 3
    assert "".join(message["role"][0] for message in rows[0]["prompt"]) == roles
    assert rows[0]["prompt"][-1]["content"].startswith("State the final answer")
    assert rows[0]["reward_model"]["ground_truth"] == rows[0]["extra_info"]["answer"]


@pytest.mark.parametrize(
    ("texts", "score", "answered"),
    [
        (["", "Answer: 42"], 1.0, 1.0),
        (["Answer: 42", "Answer: 41"], 0.0, 1.0),
        (["Answer: 42 or 41"], 0.0, 0.0),
        (["42"], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_reward(texts: list[str], score: float, answered: float) -> None:
    sys.path.insert(0, str(RECIPE))
    import reward  # type: ignore[import-not-found]  # verl loads it by its path

    extra: dict[str, Any] = {"assistant_texts": texts}
    # The tools' answers are in `solution_str`, and must not count.
    found = reward.compute_score("d", "<tool_response>Answer: 42</tool_response>", "42", extra)
    assert found == {"score": score, "acc": score, "answered": answered}
