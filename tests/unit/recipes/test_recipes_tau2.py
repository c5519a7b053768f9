"""The recipe tau2: its rows, and the conversations that the tiny model of its smoke run has learned."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import RECIPES, composed, prepared, script
from verl_multiturn import load_interactions, load_tools
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.scripted_chat import scripted_rollout
from verl_multiturn.task_sets.tau2.package import GREETING, agent_prompt
from verl_multiturn.task_sets.tau2.worlds import close_worlds

pytestmark = pytest.mark.slow

TAU2 = RECIPES / "tau2"


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folders that a run has: that of the recipe's scripts, and the root for classes in YAML files."""
    monkeypatch.setattr(sys, "path", [str(ROOT), str(TAU2), *sys.path])
    for module in ("scripted", "by_heart", "prepare_data"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_a_missing_package_is_named_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--domain: τ² needs the package 'tau2', which is not installed"):
        prepared("tau2", tmp_path, "--smoke")


def test_the_conversations_that_the_tiny_model_knows_earn(tmp_path: Path) -> None:
    rows = prepared("tau2", tmp_path, "--smoke")
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 4, "test": 2}
    preparing, row = script("tau2"), rows["train"][0]
    task = row["extra_info"]["task"]
    assert row["extra_info"]["interaction_kwargs"] == {"tau2": {"do_nothing": 0.0, "task": task}}
    assert row["extra_info"]["tool_selection"] == preparing.own_tools("airline", task)
    assert [each["content"] for each in row["prompt"]][1:] == [GREETING]
    turns = [
        each["content"]
        for each in asyncio.run(preparing.solutions("airline", [task]))[0][2:]
        if each["role"] == "assistant"
    ]

    async def play(turns: list[str]) -> Outcome:
        user = load_interactions(TAU2 / "scripted_user.yaml")["tau2"]
        try:
            return await scripted_rollout(
                load_tools(TAU2 / "airline_tools.yaml"),
                turns,
                row["prompt"],
                interaction=user,
                interaction_kwargs=row["extra_info"]["interaction_kwargs"]["tau2"],
                limits=Limits(prompt_length=10**5, response_length=10**5, max_tool_response_length=10**5),
            )
        finally:
            await close_worlds("airline")

    solved = asyncio.run(play(turns))
    assert solved.stop_reason is StopReason.ENVIRONMENT_DONE
    assert solved.score == 1.0
    assert all(call.status == "ok" for call in solved.calls)
    assert asyncio.run(play(turns[-1:])).score == 0.0


def test_each_domain_has_its_tools_its_customers_and_its_policy() -> None:
    for domain, config in [("airline", composed("tau2")), ("retail", composed("tau2", "retail"))]:
        assert config.recipe.prepare.domain == domain
        tools = Path(config.recipe.tools).read_text()
        users = Path(config.actor_rollout_ref.rollout.custom.multiturn.interaction_config_path)
        assert f"config: {{domain: {domain}}}" in tools
        assert load_interactions(users)["tau2"].config["domain"] == domain
        row = script("tau2").row(domain, "3", 0.0)
        assert row["prompt"][0] == {"role": "system", "content": agent_prompt(domain)}
        assert "tool_selection" not in row["extra_info"]
        assert json.dumps(row)
