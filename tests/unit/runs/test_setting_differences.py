"""An evaluation of a run names the run's settings that it leaves out, and how to take them over."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.unit.trainer.test_checkpoints import write
from verl_multiturn.cli import eval as eval_command
from verl_multiturn.cli.main import app
from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.location import Model
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.runs.setting_differences import setting_differences

OWN = ["recipe.out=/somewhere", "trainer.total_training_steps=2", "seed=given", "recipe.seed=1"]
"""Words that every run has, or that change its training alone."""
ADD = f"++{PATH}.tool_reward.mode=add"


def started(run: Path, *words: str) -> Model:
    """Make the folder of a run that was started with some words."""
    folder = run / "hydra" / ".hydra"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    (folder / "overrides.yaml").write_text(yaml.safe_dump([*OWN, *words]))
    source = {"provider": "main", "path": str(ROOT / "recipes" / "quickstart")}
    (folder / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"config_sources": [source]}}}))
    return Model(run, 0, run, run, is_trusted=True)


def said(model: Model, *words: str, recipe: str = "quickstart", given: tuple[str, ...] = (), **options: Any) -> str:
    plan = plan_run(recipe, out=Path("outputs/evaluation"), overrides=words, **options)
    return setting_differences(model, plan, given)


def test_settings_of_the_run_are_named_with_the_options_that_take_them_over(tmp_path: Path) -> None:
    model = started(tmp_path / "run", ADD, "data.max_response_length=77", "actor_rollout_ref.actor.optim.lr=1e-3")
    text = said(model)
    assert text.startswith("run was started with settings that this evaluation does not have")
    assert text.endswith("add: --set mt.tool_reward.mode=add --set data.max_response_length=77")
    assert said(model, "mt.tool_reward.mode=add").endswith("add: --set data.max_response_length=77")
    assert said(model, "mt.tool_reward.mode=add", "data.max_response_length=77") == ""
    assert said(model, "mt.tool_reward.mode=replace", "data.max_response_length=70") == "", "the user's own word wins"


def test_only_settings_of_rewards_and_conversations_are_named(tmp_path: Path) -> None:
    model = started(tmp_path / "run", f"++{PATH}.filter=skip", f"++{PATH}.record_share=0.5", "+own.key=1")
    assert said(model) == ""
    samples = started(tmp_path / "samples", "actor_rollout_ref.rollout.val_kwargs.n=4")
    assert said(samples).endswith("add: --set actor_rollout_ref.rollout.val_kwargs.n=4")
    assert said(samples, given=("n",)) == ""


def test_the_last_of_two_words_wins_and_a_word_of_another_recipe_is_none(tmp_path: Path) -> None:
    model = started(tmp_path / "run", "not.in.this.recipe=1", ADD, f"++{PATH}.tool_reward.mode=replace")
    assert said(model).endswith("add: --set mt.tool_reward.mode=replace")
    assert said(started(tmp_path / "default", ADD, f"++{PATH}.tool_reward.mode=none")) == "", "none is the default"


def test_a_variant_is_taken_over_as_the_word_that_it_was(tmp_path: Path) -> None:
    model = started(tmp_path / "run", "variant=[no_tool]")
    assert said(model, recipe="smollm2").endswith("add: --set 'variant=[no_tool]'")
    assert said(model, "variant=[no_tool]", recipe="smollm2") == ""
    assert said(model, recipe="smollm2", variants=["no_tool"]) == ""


def test_a_run_of_somebody_else_is_not_composed(tmp_path: Path) -> None:
    model = started(tmp_path / "run", ADD)
    assert setting_differences(Model(model.folder, 0, model.folder, model.run), plan_run("quickstart")) == ""
    assert said(Model(tmp_path, 0, tmp_path)) == "", "no run is known"


def test_words_that_are_not_known_are_said_to_be_so(tmp_path: Path) -> None:
    model = started(tmp_path / "run", ADD)
    (tmp_path / "run" / "hydra" / ".hydra" / "overrides.yaml").unlink()
    assert said(model).startswith("whether the run had other settings than this evaluation is not known: ")


def test_eval_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*words: Any) -> None:
        raise ConfigError("nothing is exported here")

    started(tmp_path / "run", ADD)
    write(tmp_path / "run" / "checkpoints", 2)
    monkeypatch.setattr(
        eval_command, "find_model", lambda path, is_trusted: Model(path, 1, path, path, 2, "", is_trusted)
    )
    monkeypatch.setattr(eval_command, "evaluated", stop)
    words = ["eval", str(tmp_path / "run"), "--recipe", "quickstart", "--trust", "--out", str(tmp_path / "out")]
    words += ["--rows", str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").write_text('{"prompt": []}\n')
    done = CliRunner().invoke(app, words)
    assert "nothing is exported here" in done.stderr, done.output
    assert done.stdout.splitlines() == [said(started(tmp_path / "again" / "run", ADD))]
