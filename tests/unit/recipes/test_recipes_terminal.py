"""The recipe terminal, and the variant harbor of the recipe swe: their rows, tasks and settings."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipe_scripts import RECIPES, composed, prepared, script
from tests.unit.task_sets.test_swe_images import ROWS
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.tasks.folder import read_folder
from verl_multiturn.harnesses.harbor.trials.runner import task_of
from verl_multiturn.verdicts.task import read_task

pytestmark = pytest.mark.slow
TOOLS = str(RECIPES / "terminal" / "tools.yaml")


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(RECIPES / "terminal"), *sys.path])
    monkeypatch.delitem(sys.modules, "made_tasks", raising=False)


def test_the_rows_of_checked_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = prepared("terminal", tmp_path, "--smoke", "--tools", TOOLS)
    assert {split: len(found) for split, found in rows.items()} == {"train": 6, "test": 2}
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"tasks": 8, "left_out": 0, "reads files only": 8}
    row = rows["train"][0]
    folder = read_folder(Path(row["extra_info"]["harbor"]))
    task = read_task(json.loads(row["extra_info"]["tools_kwargs"]["bash"]["create_kwargs"]["task"]), "row")
    assert task == folder.task.model_copy(update={"verdict": task.verdict})
    assert task.guard == "reads files only"
    assert [message["content"] for message in row["prompt"]][1] == folder.instruction
    assert not any(name.startswith("expected") for name in task.tree()[0])


def test_tasks_that_need_an_image_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = importlib.import_module("made_tasks")
    folders = made.write_tasks(tmp_path / "mine", made.draw_tasks(3, 1))
    with (folders[1] / "environment" / "Dockerfile").open("a") as dockerfile:
        dockerfile.write("RUN apt-get install -y vim\n")
    words = ("--source", str(tmp_path / "mine"), "--test-count", "1")
    rows = prepared("terminal", tmp_path / "rows", *words, "--tools", TOOLS)
    assert len(rows["train"]) + len(rows["test"]) == 2
    said = capsys.readouterr().out
    assert "left out task-00001: the task " in said
    assert "its Dockerfile says 'RUN apt-get install -y vim'; run it behind Harbor, with `--variant harbor`" in said
    rows = prepared("terminal", tmp_path / "all", *words, "--harbor")
    found = [row for split in rows.values() for row in split]
    assert {task_of(row)["path"] for row in found} == {str(folder) for folder in folders}
    assert not any("tools_kwargs" in row["extra_info"] for row in found)
    with pytest.raises(ConfigError, match="--test-count 3: expected 1 or more, and less than all 3 tasks"):
        script("terminal").split_rows(found, 3, 0)


def test_a_smoke_run_is_not_harbors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a smoke run plays its tasks in workspaces"):
        prepared("terminal", tmp_path, "--smoke", "--harbor")


def test_made_tasks_are_drawn_by_seed() -> None:
    draw = importlib.import_module("made_tasks").draw_tasks
    assert draw(12, 1) == draw(12, 1) != draw(12, 2)
    assert len({(made.ask, tuple(made.files.items())) for made in draw(300, 3)}) == 300


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_rows_of_swe_data_sets(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows.jsonl"
    named: list[dict[str, Any]] = [
        {**ROWS[kind], "instance_id": f"org__calc-{n}", "commit_hash": f"{n}{'0' * 20}"} for n in range(3)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in named))
    out = tmp_path / "out"
    words = ["--out", str(out), "--data-set", kind, "--source", str(source), "--count", "1"]
    monkeypatch.setattr(sys, "argv", ["prepare_harbor.py", *words])
    script("swe", "prepare_harbor").main()
    assert sorted(path.name for path in out.iterdir()) == ["tasks", "test.parquet", "train.parquet"]
    folders = list((out / "tasks").iterdir())
    assert len(folders) == 2
    assert {path.name for path in folders[0].iterdir()} >= {"task.toml", "instruction.md", "environment", "tests"}
    script("swe", "prepare_harbor").main()  # a second time, in the same place
    source.write_text(json.dumps({"instance_id": "x", "problem_statement": "y"}) + "\n" + source.read_text())
    with pytest.raises(ConfigError, match=r"train row \d: it has no "):
        script("swe", "prepare_harbor").main()


def test_a_swe_row_that_cannot_be_used_is_left_out_and_one_name_is_one_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = script("swe", "prepare_harbor").write_tasks
    good = [{**ROWS["swe_rebench"], "instance_id": f"org__calc-{n}"} for n in range(2)]
    strange = {**good[0], "install_config": {**good[0]["install_config"], "log_parser": "parse_log_c"}}
    other = {**good[0], "test_patch": "+++ b/tests/case.txt\n"}
    names: set[str] = set()
    rows = write(tmp_path, "swe_rebench", [good[0], strange, other], "train", names)
    assert [Path(row["extra_info"]["harbor"]).name for row in rows] == ["org__calc-0"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("left out swe_rebench, train row 1: its log parser is 'parse_log_c', expected one of ")
    assert said[1].startswith("left out swe_rebench, train row 2: its test_patch changes no Python file; ")
    assert json.loads(said[2]) == {"split": "train", "tasks": 1, "left_out": 2}
    assert len(write(tmp_path, "swe_rebench", good[1:], "test", names)) == 1
    with pytest.raises(ConfigError, match="swe_rebench, test row 0: an earlier row is 'org__calc-0', too"):
        write(tmp_path, "swe_rebench", good[:1], "test", names)
    with pytest.raises(ConfigError, match="swe_rebench, test: no task can be made of any of 1 rows"):
        write(tmp_path, "swe_rebench", [strange], "test", names)


@pytest.mark.stack
def test_another_harness_takes_arguments_of_its_own() -> None:
    key = "actor_rollout_ref.rollout.custom.multiturn.proxy.harbor.harness_kwargs"
    value = f"{key}={{record_terminal_session: False}}"
    words = ["'~….proxy.harbor.harness_kwargs'", "'+….proxy.harbor.harness_kwargs={record_terminal_session: False}'"]
    assert " ".join(words) in " ".join((RECIPES / "terminal" / "README.md").read_text(encoding="utf-8").split())
    config = composed("terminal", "harbor", overrides=[f"~{key}", f"+{value}"])
    harbor = config.actor_rollout_ref.rollout.custom.multiturn.proxy.harbor
    assert harbor.harness_kwargs == {"record_terminal_session": False}
    with pytest.raises(ConfigError, match=re.escape(f"no such keys; to replace it, write '~{key}' '+{key}={{…}}'")):
        composed("terminal", "harbor", overrides=[value])


@pytest.mark.stack
def test_the_variants_settings() -> None:
    plain, harbor = composed("terminal"), composed("terminal", "harbor")
    tool = plain.actor_rollout_ref.rollout.custom.multiturn.tool_reward
    assert (plain.recipe.prepare, tool.mode) == ({}, "replace")
    limits = yaml.safe_load(Path(TOOLS).read_text())["tools"][0]["limits"]
    assert plain.actor_rollout_ref.rollout.multi_turn.max_tool_response_length == limits["response_characters"]
    proxy = harbor.actor_rollout_ref.rollout.custom.multiturn.proxy
    assert (harbor.recipe.prepare, harbor.recipe.tools, proxy.agent) == ({"harbor": True}, None, "harbor")
    assert harbor.trainer.v1.trainer_mode == "separate_async"
    for variants, turns in ((["harbor"], 20), (["deepswe", "harbor"], 50), (["rebench", "harbor"], 200)):
        config = composed("swe", *variants)
        harness = config.actor_rollout_ref.rollout.custom.multiturn.proxy.harbor
        assert harness.harness_kwargs == {"command_s": 180, "step_limit": turns}
        assert {key: value for key, value in config.recipe.prepare.items() if value} == {"data-set": "swe_gym"}
