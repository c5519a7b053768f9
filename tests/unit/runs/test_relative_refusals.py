"""Refusals of rewards that are ranks among siblings, each by its words; and the run to which none applies."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.verl_bridge.startup.refusals.criteria import check_criteria
from verl_multiturn.verl_bridge.startup.refusals.relative import RELATIVE, ranks
from verl_multiturn.verl_bridge.startup.view import RunView

FUNCTION, ROLLOUT = "reward.custom_reward_function", "actor_rollout_ref.rollout"
CUSTOM = f"{ROLLOUT}.custom.multiturn"
CRITERION = {"name": "kind", "text": "It is kind."}


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the configuration of a run whose reward is a rank, with criteria and rows for its validation."""
    folder = tmp_path_factory.mktemp("relative")
    config = compose_run(plan_run("quickstart", out=folder / "out"))
    rubric = {"url": "http://127.0.0.1:9/v1", "model": "judge", "relative": True, "criteria": [CRITERION]}
    kwargs = {"rubric": rubric, "routes": {"letters": "rubric"}}
    function = {"path": "pkg://verl_multiturn.rewards", "name": "compute_score", "reward_kwargs": kwargs}
    OmegaConf.update(config, FUNCTION, function, force_add=True)
    OmegaConf.update(config, "trainer.test_freq", 5)
    rows = [
        {"data_source": "gsm8k", "extra_info": {"index": 0}},
        {"data_source": "letters", "extra_info": {"index": 1}},
    ]
    pd.DataFrame(rows).to_parquet(folder / "rows.parquet")
    own = [{**row, "extra_info": {"criteria": [CRITERION]}} for row in rows]
    pd.DataFrame(own).to_parquet(folder / "own.parquet")
    config.data.val_files = str(folder / "rows.parquet")
    return config


def refused(composed: Any, **changes: Any) -> str:
    config = copy.deepcopy(composed)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    run = RunView(config, is_early=True)
    assert ranks(run)
    for check in RELATIVE:
        try:
            check(run)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_run_that_can_rank_is_not_refused(composed: Any) -> None:
    assert refused(composed) == ""
    config = copy.deepcopy(composed)
    OmegaConf.update(config, f"{FUNCTION}.reward_kwargs.rubric.relative", False)
    assert not ranks(RunView(config))
    OmegaConf.update(config, f"{FUNCTION}.path", "own.py")
    OmegaConf.update(config, f"{FUNCTION}.reward_kwargs.rubric.relative", True)
    assert not ranks(RunView(config)), "a function of one's own ranks nobody"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer.use_v1": False}, "only verl's own V1 trainers take it"),
        ({f"{ROLLOUT}.agent.agent_loop_manager_class": "own.Manager"}, "are ranked in our workers"),
        ({f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n=1: it compares the conversations of one prompt, and there is one"),
        (
            {"reward.reward_manager.name": "dapo"},
            "reward.reward_manager.name='dapo': verl's naive, rate_limited, remote",
        ),
        ({"reward.reward_manager.source": "importlib"}, "hand a conversation's fields"),
        ({"reward.reward_model.enable": True}, "the scores of reward.reward_model without a resource pool"),
        ({f"{CUSTOM}.tool_reward": {"mode": "replace"}}, "tool_reward.mode=replace does not call compute_score"),
        ({f"{CUSTOM}.otc": {"form": "ppo"}}, "compares right answers, and a rank does not say who is right"),
        ({f"{CUSTOM}.filter": "difficulty"}, "it counts right answers"),
        ({"algorithm.filter_groups": {"enable": True, "metric": "acc"}}, "so that it is 0 for all"),
        ({"algorithm.adv_estimator": "remax"}, "its greedy answer has no siblings"),
        (
            {f"{FUNCTION}.reward_kwargs.rubric.criteria": []},
            "a validation ranks nothing and scores by the criteria alone, and ",
        ),
    ],
)
def test_what_cannot_rank_is_refused_by_name(composed: Any, changes: dict[str, Any], said: str) -> None:
    message = refused(composed, **changes)
    assert said in message
    assert message.startswith(f"{FUNCTION}.reward_kwargs.rubric.relative=True")


def test_criteria_of_the_rows_or_no_validation_will_do(composed: Any) -> None:
    none = {f"{FUNCTION}.reward_kwargs.rubric.criteria": []}
    rows = Path(composed.data.val_files)
    assert f"{rows}: row 1 has none either; write criteria" in refused(composed, **none)
    assert refused(composed, **none, **{"data.val_files": str(rows.with_name("own.parquet"))}) == ""
    off = {"trainer.test_freq": -1, "trainer.val_before_train": False}
    assert refused(composed, **none, **off) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"name": "kind", "text": "It is kind.", "weight": -1}], "extra_info.criteria[0].weight: Input should be"),
        ([{"name": "kind", "text": "a"}, {"name": "kind", "text": "b"}], "the name 'kind' is there twice"),
        ("be kind", "expected a list of criteria, got 'be kind'"),
        ([], "expected a list of criteria, got []"),
        (None, "there are no criteria"),
    ],
    ids=["weight", "twice", "text", "empty", "none"],
)
def test_criteria_of_rows_are_read_at_the_start(composed: Any, tmp_path: Path, given: Any, said: str) -> None:
    config = copy.deepcopy(composed)
    rows = tmp_path / "rows.json"
    own = [{"data_source": "letters", "extra_info": {"criteria": [CRITERION]}}]
    rows.write_text(json.dumps([*own, {"data_source": "letters", "extra_info": {"criteria": given}}]))
    config.data.train_files = str(rows)
    if given is None:  # the options have some
        check_criteria(RunView(config, is_early=True))
    OmegaConf.update(config, f"{FUNCTION}.reward_kwargs.rubric", {"criteria": [], "relative": False})
    with pytest.raises(ConfigError, match=re.escape(f"data.train_files: {rows}: row 1: ")) as refusal:
        check_criteria(RunView(config, is_early=True))
    assert said in str(refusal.value)
    config.reward.custom_reward_function.path = "own.py"
    check_criteria(RunView(config, is_early=True))
    config.reward.custom_reward_function.path = "pkg://verl_multiturn.rewards"
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "proxy_agent"
    if given is None:  # an agent may give the reward
        check_criteria(RunView(config, is_early=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.test_freq": -1, "trainer.val_before_train": False},
        {f"{CUSTOM}.tool_reward.mode": "replace"},
        {"reward.reward_manager.source": "importlib"},
    ],
    ids=["not_validated", "tools_score", "own_manager"],
)
def test_criteria_of_rows_that_no_rubric_scores_are_not_looked_at(
    composed: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = copy.deepcopy(composed)
    rows = tmp_path / "rows.parquet"
    pd.DataFrame([{"data_source": "letters", "extra_info": {"criteria": "be kind"}}]).to_parquet(rows)
    config.data.train_files, config.data.val_files = [], str(rows)
    with pytest.raises(ConfigError, match="expected a list of criteria, got 'be kind'"):
        check_criteria(RunView(config, is_early=True))
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    check_criteria(RunView(config, is_early=True))


def test_a_list_among_the_rows_is_none_of_rubrics(composed: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(composed)
    config.data.train_files = str(tmp_path / "rows.json")
    Path(config.data.train_files).write_text('[["letters"]]')
    check_criteria(RunView(config, is_early=True))
