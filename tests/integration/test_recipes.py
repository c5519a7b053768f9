"""Recipes as users run them: `run.sh --smoke`, on verl's trainer and SGLang; and every GPU configuration."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import composed, run_script
from tests.support.warm_python import of_run
from verl_multiturn.observe.metric_files import read_metrics

pytestmark = pytest.mark.stack


def smoke_run(recipe: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Run a recipe's script; its processes are forks of one that the runs of all recipes share."""
    variables, words = of_run()
    return run_script(ROOT / "recipes" / recipe / "run.sh", "--smoke", "--out", str(out), *words, **variables)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "tools"),
    # `mixed` has the rows, the tools and the rewards of gsm8k_multiturn, search_r1 and text2sql, too.
    [("torl", []), ("mixed", ["calc_gsm8k_reward", "search", "sql", "python"])],
)
def test_a_smoke_run_trains_with_the_recipes_tools(tmp_path: Path, recipe: str, tools: list[str]) -> None:
    ran = smoke_run(recipe, tmp_path / recipe)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["recipe"] == recipe
    assert found["steps"] == 2
    assert found["certificate_rows"] == 32
    assert found["certificate_violations"] == 0
    assert found["tool_calls"] > 0
    assert found["reward"] > 0
    assert found["prob_diff_mean"] < 1e-4
    metrics = [entry["data"] for entry in read_metrics(tmp_path / recipe)]
    for tool in tools:
        assert sum(data.get(f"rollout/tools/{tool}/calls", 0) for data in metrics) > 0, tool


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_smoke_run_trains_in_a_world(tmp_path: Path) -> None:
    """The other recipes with users and worlds take minutes each, so their smoke runs are run by hand."""
    ran = smoke_run("alfworld", tmp_path / "alfworld")
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["steps"] == 2
    assert found["certificate_violations"] == 0
    assert found["environment_error"] == 0
    assert found["prob_diff_mean"] < 1e-4
    assert found["certificate_rows"] > 2 * 16 * 2  # a row for each turn
    assert found["reward"] > 0
    metrics = [entry["data"] for entry in read_metrics(tmp_path / "alfworld")]
    assert all(data["rollout/interaction/replies/mean"] > 0 for data in metrics if "training/global_step" in data)


def test_torls_prompt_without_turns_can_be_trained_on() -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import examine_model
    from verl_multiturn.verl_bridge.model.loading import load_model

    template = composed("torl").actor_rollout_ref.model.custom_chat_template
    model = {"path": str(ROOT / "recipes" / "common" / "model"), "custom_chat_template": template}
    found = {rule.name: rule for rule in examine_model(load_model(model, ""), "tir")}
    assert {str(rule.verdict) for rule in found.values()} == {"kept", "known"}
    assert "in text mode the model alone ends its message" in found["a turn ends with an end token"].found


@pytest.mark.parametrize(
    ("recipe", "variants", "change", "said"),
    [
        ("retool", [], "trainer.total_epochs=1", "33 steps, and its README's curve takes 400; "),
        ("retool", ["ppo"], "trainer.total_epochs=1", "16 steps, and its warm-up takes 20; "),
        ("search_r1", [], "trainer.total_training_steps=500", "500 steps, and its README's curve takes 1005; "),
        ("search_r1", ["ppo"], "critic.optim.lr_warmup_steps=1005", "1005 steps, and its warm-up takes 1005; "),
        ("mixed", [], "data.train_batch_size=1024", "30 steps, and its README's curve takes 50; "),
        ("text2sql", [], "trainer.total_epochs=31", "its README does not say that it trains for 62 steps; "),
    ],
)
def test_a_recipe_that_is_over_too_soon_is_refused(recipe: str, variants: list[str], change: str, said: str) -> None:
    from tests.long.training.recipe_steps import count_steps

    readme = (ROOT / "recipes" / recipe / "README.md").read_text()
    changed = composed(recipe, *variants, overrides=[change])
    assert count_steps(composed(recipe, *variants), recipe, variants).complaint(readme) == ""
    assert count_steps(changed, recipe, variants).complaint(readme).startswith(said)
