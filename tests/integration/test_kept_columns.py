"""Which columns of a data row are written once its conversation is rewarded, and for whom all are."""

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

OURS = "pkg://verl_multiturn.verl_bridge.trainer.data_set"
FEW = ("uid", "raw_prompt", "data_source", "reward_model")


def make_config(**changes: Any) -> Any:
    from tests.integration.trainer_rows import make_config as usual

    return usual(**{"trainer__v1__trainer_mode": "sync", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer__v1__trainer_mode": "multiturn_separate_async"},
        {"algorithm__adv_estimator": "mt_gigpo"},
        {"algorithm__adv_estimator": "own.py:advantages"},  # which is given conversations, and no rows
        {"algorithm__adv_estimator": "tir_optimal_token_baseline"},
        {
            "data__custom_cls": {
                "path": "pkg://verl_multiturn.verl_bridge.trainer.data_set",
                "name": "NumberedRows",
            }
        },
        {"data__custom_cls": {"path": None}, "data__sampler": None, "skip": {"rollout_tq": {"enable": False}}},
        {"trainer__v1__sampler": {"custom_sampler": {"path": None, "name": None}}},
        {"actor_rollout_ref__rollout__agent__agent_loop_manager_class": None},
        {
            "actor_rollout_ref__rollout__agent__agent_loop_manager_class": (
                "verl_multiturn.verl_bridge.workers.manager.MultiTurnManager"
            )
        },
        # By the names of 0.1, which a run's configuration may have: `old_names.tsv`.
        {
            "data__custom_cls": {
                "path": "pkg://verl_multiturn.verl_bridge.trainer.numbered_rows",
                "name": "NumberedRows",
            }
        },
        {
            "actor_rollout_ref__rollout__agent__agent_loop_manager_class": (
                "verl_multiturn.verl_bridge.loops.manager.MultiTurnManager"
            )
        },
    ],
)
def test_verls_and_our_classes_need_few(changes: dict[str, Any]) -> None:
    from verl_multiturn.verl_bridge.workers.queue_rows import kept_columns, own_reader

    config = make_config(**changes)
    assert (own_reader(config), kept_columns(config)) == (None, FEW)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("algorithm.adv_estimator", "of_a_user"),
        ("trainer.v1.trainer_mode", "of_a_user"),
        ("trainer.v1.sampler.custom_sampler.path", "own.py"),
        ("data.custom_cls.path", "own.py"),
        ("data.sampler.class_path", "own.py"),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class", "own.Manager"),
        ("actor_rollout_ref.model.external_lib", "own"),
        ("skip.rollout_tq.enable", True),
    ],
)
def test_a_class_of_the_users_own_may_read_any(setting: str, value: Any) -> None:
    from verl_multiturn.verl_bridge.workers.queue_rows import kept_columns, own_reader

    config = make_config(**{setting.replace(".", "__"): value})
    assert (own_reader(config), kept_columns(config)) == (setting, None)


def test_another_plugin_of_verl_may_read_any(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.workers.queue_rows import kept_columns

    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "own")
    assert kept_columns(make_config()) is None


def test_what_is_not_known_to_be_verls_or_ours_may_read_any() -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.workers.queue_rows import kept_columns

    assert kept_columns(OmegaConf.create({})) is None


def test_verl_reads_no_other_column_of_a_row() -> None:
    """Each column that verl's trainers name in a request, or in a template of padding, is the output's or is kept."""
    import inspect

    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.trainer.ppo import metric_utils, padding_utils
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base, trainer_separate_async

    named: set[str] = set()
    for module in (trainer_base, replay_buffer, trainer_separate_async, padding_utils, metric_utils):
        source = inspect.getsource(module)
        for listed in re.findall(r"(?:select_fields|fields) ?= ?\[([^\]]*)\]", source):
            named |= set(re.findall(r'"(\w+)"', listed))
        for listed in re.findall(r"fields\.(?:append|extend)\(([^)]*)\)", source):
            named |= set(re.findall(r'"(\w+)"', listed))
    made = {"prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "routed_experts"}
    computed = {
        "old_log_probs", "ref_log_prob", "log_probs", "entropy", "values", "advantages", "returns",
        "token_level_rewards", "rollout_is_weights",
    }  # fmt: skip
    assert {"uid", "raw_prompt", "data_source", "reward_model", "num_turns", "extra_fields"} <= named
    assert named - made - computed - set(AgentLoopOutput.model_fields) == set(FEW)


@pytest.mark.parametrize("room", ["loops", "workers"])
def test_our_manager_is_ours_by_its_old_name_too(room: str) -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.settings import own_loops, own_manager

    manager = f"verl_multiturn.verl_bridge.{room}.manager.MultiTurnManager"
    agent = OmegaConf.create({"agent_loop_config_path": None, "agent_loop_manager_class": manager})
    assert own_manager(agent) is None
    assert not own_loops(agent)


@pytest.mark.parametrize("module", ["numbered_rows", "data_set"])
def test_the_loops_of_our_data_set_are_known_by_its_old_name_too(module: str) -> None:
    from verl_multiturn.verl_bridge.settings import agent_loops

    path = f"pkg://verl_multiturn.verl_bridge.trainer.{module}"
    config = make_config(data__custom_cls={"path": path}, data__train_files=[], data__val_files=[])
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "multiturn_agent"
    assert agent_loops(config) == ({"multiturn_agent"}, True)
