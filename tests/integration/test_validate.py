"""`verl-multiturn validate --model` with prompts that do not fit; the schemas of their tools count."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli.main import app

pytestmark = pytest.mark.stack

TOOLS = str(ROOT / "tool_configs" / "calculator.yaml")
MODEL = str(ROOT / "recipes" / "quickstart" / "model")


def validate(rows: Path, prompt_length: int, model: str = MODEL, *more: str, tools: str = TOOLS) -> tuple[int, str]:
    command = ["validate", tools, "--dataset", str(rows), "--model", model, "--prompt-length", str(prompt_length)]
    done = CliRunner().invoke(app, [*command, "--no-scores", *more])
    return done.exit_code, done.output


def test_a_prompt_that_does_not_fit_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    prompts = ["1 + 1 = ?", "word " * 400, "2 + 2 = ?"]
    rows.write_text("\n".join(json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in prompts))
    code, said = validate(rows, 1000)
    assert code == 1
    assert "row 1: the prompt has" in said
    assert "1 of 3 rows cannot work" in said
    assert validate(rows, 5000)[0] == 0
    # Not even the schemas fit.
    assert "3 of 3 rows cannot work" in validate(rows, 60)[1]


def test_rows_that_name_their_interaction_are_measured(tmp_path: Path) -> None:
    world, rows = tmp_path / "world.yaml", tmp_path / "rows.jsonl"
    scripted = "verl_multiturn.interactions.scripted_user.ScriptedUser"
    world.write_text(f"interaction: [{{name: user, class_name: {scripted}}}]")
    user, row = {"user": {"turns": ["Well?"]}}, {"prompt": [{"role": "user", "content": "1 + 1 = ?"}]}
    named = [{**row, "interaction_kwargs": user}, {**row, "extra_info": {"interaction_kwargs": user}}]
    rows.write_text("\n".join(map(json.dumps, named)))
    with_world = (rows, 1000, MODEL, "--interactions", str(world))
    assert validate(*with_world)[0] == 0, validate(*with_world)[1]
    assert "2 of 2 rows cannot work" in validate(rows, 60, MODEL, "--interactions", str(world))[1]
    rows.write_text(json.dumps({**row, "interaction_kwargs": {"usher": {}}}))
    code, said = validate(*with_world)
    assert code == 1
    assert "names 'usher', which is no interaction of the YAML; did you mean 'user'?" in said


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "x"}]}))
    code, said = validate(rows, 100, model=str(tmp_path))
    assert code == 2
    assert "no tokenizer and config.json" in said


def test_text_mode_shows_no_schemas(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1 + 1 = ?"}]}))
    python = str(ROOT / "tool_configs" / "python.yaml")
    assert validate(rows, 60, tools=python)[0] == 1
    assert validate(rows, 60, MODEL, "--format", "tir", tools=python)[0] == 0
    code, said = validate(rows, 60, MODEL, "--format", "tyr", tools=python)
    assert code == 2
    assert "tyr" in said
