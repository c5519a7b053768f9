"""Whose a folder is, and the message of a command that refuses it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verl_multiturn import recipes
from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.plan import chosen_outputs, plan_run
from verl_multiturn.trust import rule
from verl_multiturn.trust.rule import is_own, own_outputs, require_trust

CONFIG = Path("hydra") / ".hydra" / "config.yaml"


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the user's own runs."""
    monkeypatch.setattr(rule, "own_outputs", lambda: tmp_path / "outputs")
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs"


def run_in(folder: Path) -> Path:
    """Make the folder of a run."""
    (folder / CONFIG).parent.mkdir(parents=True)
    (folder / CONFIG).write_text("a: 1\n")
    (folder / "records").mkdir()
    (folder / "records" / "run-1.json").write_text("{}")
    (folder / "checkpoints" / "global_step_1").mkdir(parents=True)
    return folder


def test_a_run_below_the_own_outputs_is_the_users(outputs: Path) -> None:
    run = run_in(outputs / "group" / "quickstart")
    assert is_own(run)
    assert is_own(run / "records")
    assert is_own(run / "checkpoints" / "global_step_1")
    assert not is_own(outputs)
    assert not is_own(outputs / "nothing")


def test_a_link_makes_no_run_ones_own(outputs: Path, tmp_path: Path) -> None:
    strange = run_in(tmp_path / "strange")
    (outputs / "link").symlink_to(strange)
    assert not is_own(outputs / "link")
    assert not is_own(outputs / "link" / "records")
    assert not is_own(outputs / ".." / "strange")
    run = run_in(outputs / "run")
    (run / CONFIG).unlink()
    (run / CONFIG).symlink_to(strange / CONFIG)
    assert not is_own(run)
    assert not is_own(run / "checkpoints")
    (outputs / "circle").symlink_to(outputs / "circle")
    assert not is_own(outputs / "circle")


def test_a_link_to_an_own_run_is_one(outputs: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(run_in(outputs / "run"))
    assert is_own(tmp_path / "short")


@pytest.mark.parametrize("place", [".", str(CONFIG), "records/run-1.json"])
def test_what_belongs_to_another_user_is_not_ones_own(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = run_in(outputs / "run")
    stat = Path.stat

    def of_another(path: Path, **kwargs: Any) -> os.stat_result:
        found = stat(path, **kwargs)
        if path != (run / place).resolve():
            return found
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])

    monkeypatch.setattr(Path, "stat", of_another)
    assert not is_own(run)


def test_outputs_that_are_a_link_are_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs").symlink_to(tmp_path / "elsewhere")
    run_in(tmp_path / "elsewhere" / "run")
    monkeypatch.setattr(rule, "own_outputs", lambda: tmp_path / "outputs")
    assert not is_own(tmp_path / "outputs" / "run")


def test_a_wheel_writes_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert own_outputs() != tmp_path / "outputs"
    monkeypatch.setattr(recipes, "is_in_wheel", lambda folder: True)
    assert own_outputs() == tmp_path / "outputs"


def test_the_refusal_is_one_sentence(outputs: Path, tmp_path: Path) -> None:
    strange = run_in(tmp_path / "a\nb")
    uses = ["the mcp {'command': 'sh'}", *(f"the class {number}" for number in range(9))]
    with pytest.raises(ConfigError, match=r"is not a run of yours below '.*outputs', and replay would use") as raised:
        require_trust(strange, "replay", uses, is_trusted=False)
    said = str(raised.value)
    assert "the mcp {'command': 'sh'}, the class 0" in said
    remedy = "say --trust if it is a run of your own that lies elsewhere, or if you would run a program of its author"
    assert f"and 4 more; look at these, and {remedy}" in said
    assert "\n" not in said
    require_trust(strange, "replay", uses, is_trusted=True)


def configured(folder: Path, **settings: Any) -> Path:
    run = run_in(folder)
    (run / CONFIG).write_text(json.dumps(settings))
    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return the folder of a recipe of the user's own, outside of this checkout."""
    folder = tmp_path / "my-recipes" / "recipes" / "my_task"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("recipe: {name: my_task}\nhydra: {searchpath: []}\n")
    return folder


def test_runs_of_a_recipe_are_ones_own_where_run_puts_them_by_itself(tmp_path: Path, recipe: Path) -> None:
    plan = plan_run(str(recipe))
    assert chosen_outputs(str(recipe)) == plan.outputs == tmp_path / "my-recipes" / "outputs"
    run = run_in(plan.out)
    assert is_own(run, plan.outputs)
    assert is_own(run / "checkpoints" / "global_step_1", plan.outputs)
    assert not is_own(run)
    assert not is_own(run_in(tmp_path / "strange"), plan.outputs)
    (plan.outputs / "link").symlink_to(tmp_path / "strange")
    assert not is_own(plan.outputs / "link", plan.outputs)


@pytest.mark.parametrize("command", ["eval", "probe"])
def test_a_run_of_the_named_recipe_is_evaluated_where_run_put_it(tmp_path: Path, recipe: Path, command: str) -> None:
    run = configured(tmp_path / "my-recipes" / "outputs" / "my_task", data={"val_files": ["/mine.parquet"]})
    done = CliRunner().invoke(app, [command, str(run), "--recipe", str(recipe)])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert f"'{run}/checkpoints/global_step_1' is half a checkpoint" in done.stderr
    # Another recipe does not make it one's own, and this one makes no other folder one's own.
    strange = configured(tmp_path / "strange", data={"val_files": ["/theirs.parquet"]})
    for folder, named in ((run, "quickstart"), (strange, str(recipe))):
        done = CliRunner().invoke(app, [command, str(folder), "--recipe", named])
        assert f"{str(folder)!r} is not a run of yours below" in done.stderr
    places = f"below {str(own_outputs())!r} or {str(tmp_path / 'my-recipes' / 'outputs')!r}, and {command} would use"
    assert places in done.stderr


@pytest.mark.parametrize("command", ["eval", "probe"])
@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/global_step_1", "checkpoints/global_step_1/actor"])
def test_a_strangers_run_is_not_evaluated(tmp_path: Path, command: str, place: str) -> None:
    (tmp_path / "run" / "checkpoints" / "global_step_1" / "actor").mkdir(parents=True)
    (tmp_path / "run" / CONFIG).parent.mkdir(parents=True)
    settings = {
        "data": {"val_files": ["/theirs.parquet"]},
        "actor_rollout_ref": {"model": {"trust_remote_code": True, "path": "their/base"}},
    }
    (tmp_path / "run" / CONFIG).write_text(json.dumps(settings))
    done = CliRunner().invoke(app, [command, str(tmp_path / "run" / place), "--recipe", "quickstart"])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    uses = "the rows '/theirs.parquet', the model's own Python files, its base 'their/base'"
    assert f"and {command} would use what it names: {uses}; look at these, and say --trust" in done.stderr


def test_a_folder_without_records_names_nothing_to_trust(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert done.exit_code == 2
    assert f"'{tmp_path}' holds no records; name a run's folder or its record_dir" in done.output


def test_a_strangers_records_are_not_replayed(tmp_path: Path) -> None:
    told = {
        "schema": 2, "start": "1", "began": 1.0, "host": "h", "versions": {},
        "settings": {"actor_rollout_ref": {"model": {"path": "their/model"}},
                     "reward": {"custom_reward_function": {"path": "theirs.py"}}},
        "tools": {"tools": [{"mcp": {"command": "sh"}}, {"class_name": "theirs.Tool"}, 5]},
        "interactions": {"interaction": [{"class_name": "theirs.User"}]},
    }  # fmt: skip
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "run-1.json").write_text(json.dumps(told))
    for folder in (tmp_path, tmp_path / "records"):
        done = CliRunner().invoke(app, ["replay", str(folder)])
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
        for used in ("the mcp {'command': 'sh'}", "'theirs.Tool'", "'theirs.User'", "'theirs.py'", "'their/model'"):
            assert used in done.stderr
        assert "say --trust" in done.stderr


def test_the_help_says_what_the_flag_allows() -> None:
    for command in ("replay", "eval", "probe"):
        told = " ".join(CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).stdout.split())
        assert "import its code, start its commands" in told
    for command in ("show", "view", "explain", "compare", "convert", "verify"):
        assert "--trust" not in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).stdout
