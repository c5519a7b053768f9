"""`verl-multiturn recipe copy` and `recipe new`: the copied files, and that they work unchanged."""

import os
import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.support.warm_python import light_python
from verl_multiturn.cli.main import app
from verl_multiturn.recipes import copy_recipe, list_recipes
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import plan_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", sorted(list_recipes()))
def test_a_copy_has_every_file_that_its_configurations_name(recipe: str, tmp_path: Path) -> None:
    copied = copy_recipe(recipe, tmp_path)
    files = [path for path in (tmp_path / "recipes").rglob("*.yaml") if recipe in path.parts or "common" in path.parts]
    named = {
        place.replace("${recipe.name}", recipe)
        for path in files
        for place in re.findall(r"(?m)^[^#\n]*?\$\{recipe\.root\}/([\w./${}-]+)", path.read_text(encoding="utf-8"))
    }
    assert named
    # A checkout in which a recipe has run has `outputs`, where runs write; no copy has it.
    there = {place for place in named if (ROOT / place).exists() and place.partition("/")[0] != "outputs"}
    assert there
    assert [place for place in there if not (tmp_path / place).exists()] == []
    assert plan_run(str(copied)).root == tmp_path


def test_a_mixed_copy_has_the_recipes_whose_rows_it_makes(tmp_path: Path) -> None:
    copied = copy_recipe("mixed", tmp_path)
    made = subprocess.run(
        [light_python(), str(copied / "prepare_data.py"), "--out", str(tmp_path / "data"), "--smoke"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "data" / "train.parquet").is_file()


def test_a_new_recipe_works_as_it_is(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["recipe", "new", "my_task", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    made = tmp_path / "recipes" / "my_task"
    assert f"{made / 'README.md'} says more" in ran.output
    assert {path.name for path in made.iterdir()} == {
        "README.md", "config.yaml", "prepare_data.py", "reward.py", "run.sh", "test_recipe.py", "tool.py", "tools.yaml",
    }  # fmt: skip
    assert not any("NAME" in path.read_text() for path in made.iterdir())
    here = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    for command in (
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "recipes/my_task"],
        ["recipes/my_task/prepare_data.py", "--out", "data", "--tools", "recipes/my_task/tools.yaml"],
        ["-m", "verl_multiturn.cli", "validate", "recipes/my_task/tools.yaml", "--dataset", "data/train.parquet"],
    ):
        done = subprocess.run([light_python(), *command], cwd=tmp_path, env=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    drawn = {}
    for seed in ("0", "1"):
        words = ["recipes/my_task/prepare_data.py", "--out", seed, "--smoke", "--seed", seed]
        done = subprocess.run([light_python(), *words], cwd=tmp_path, env=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        drawn[seed] = [
            [row["reward_model"] for row in pq.read_table(tmp_path / seed / f"{split}.parquet").to_pylist()]
            for split in ("train", "test")
        ]
    assert drawn["0"][0] != drawn["1"][0]
    assert drawn["0"][1] == drawn["1"][1] != drawn["1"][0][:4]
    config = resolved(compose_run(plan_run(str(made), smoke=True)))
    assert config["recipe"]["tools"] == str(made / "tools.yaml")
    assert Path(config["actor_rollout_ref"]["model"]["path"]).is_dir()
    assert Path(config["recipe"]["report"]).is_file()


@pytest.mark.parametrize("name", ["quickstart", "common", "my-task", "MyTask", "class", "../x", "", "1st"])
def test_a_new_recipe_needs_a_name_of_its_own(name: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["recipe", "new", name, str(tmp_path)])
    assert ran.exit_code == 2
    assert "choose" in ran.output
    assert list(tmp_path.iterdir()) == []


def test_a_new_recipe_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "my_task").mkdir(parents=True)
    ran = CliRunner().invoke(app, ["recipe", "new", "my_task", str(tmp_path)])
    assert ran.exit_code == 2
    assert "exists already" in ran.output
