"""The quickstart's rows and reward: its questions, and their scores."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import script

RECIPE = ROOT / "recipes" / "quickstart"


@pytest.mark.parametrize(("examples", "roles"), [(0, "su"), (2, "suatauatau")])
def test_rows(tmp_path: Path, examples: int, roles: str) -> None:
    sizes = ["--train-size", "3", "--test-size", "2", "--examples", str(examples)]
    subprocess.run([sys.executable, str(RECIPE / "prepare_data.py"), str(tmp_path), *sizes], check=True, timeout=250)
    rows = pd.read_parquet(tmp_path / "train.parquet").to_dict("records")
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


def command_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Return the trainer's command for a command line of the quickstart."""
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    run = script("quickstart", "run")
    command: list[str] = run.trainer_command(run.parse_arguments())
    return command


def test_overrides_are_those_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["trainer.nnodes=2", "+a.b=1", "++a.c={x: 1}", "~trainer.project_name", "~a.d=1"]
    assert command_of(monkeypatch, "--steps", "3", *words)[-5:] == words


@pytest.mark.parametrize("word", ["trainer.nnodes", "--stepz=3", "--stepz", "-x=1"])
def test_what_is_no_override_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        command_of(monkeypatch, word)
    assert refused.value.code == 2
    assert f"unknown argument {word!r}; expected" in capsys.readouterr().err
