"""Messages of the start-up check about agents behind an endpoint."""

from collections.abc import Collection
from typing import Any

import pytest

from tests.integration.test_refusals import RIGHT, ROLLOUT
from tests.trainer_config import compose_config
from verl_multiturn import ConfigError
from verl_multiturn.verl_bridge.startup.configuration import prepare_config

pytestmark = pytest.mark.stack

OURS = f"+{ROLLOUT}.custom.multiturn"
AGENT = {
    f"{ROLLOUT}.agent.default_agent_loop": "proxy_agent",
    f"{ROLLOUT}.multi_turn.tool_config_path": "null",
    f"{ROLLOUT}.n": "4",
    f"{OURS}.proxy.agent": "'tests.endpoint_agents:chat'",
    f"{OURS}.request_timeout_s": "60",
    "algorithm.adv_estimator": "mt_grpo",
    "ray_kwargs.ray_init.num_cpus": "64",
}


def keep_all(views: Collection[Any]) -> list[str]:
    return [view.id for view in views]


def prepared(**changes: str | None) -> Any:
    settings = {**RIGHT, **AGENT, **changes}
    config = compose_config([f"{key}={value}" for key, value in settings.items() if value is not None])
    prepare_config(config)
    return config


def test_a_run_of_an_agent() -> None:
    config = prepared(**{f"{OURS}.proxy.select": f"'{__name__}:keep_all'"})
    assert config.trainer.v1.trainer_mode == "multiturn_sync"
    assert config.actor_rollout_ref.rollout.skip_tokenizer_init is False
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class.endswith(".MultiTurnManager")


def test_a_history_as_it_was_sampled_is_accepted_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    prepared(**{f"{OURS}.proxy.history": "sampled"})
    assert "custom.multiturn.proxy.history=sampled: sessions know no other history" in capsys.readouterr().err


def test_with_one_row_verls_estimators_serve() -> None:
    prepared(**{"algorithm.adv_estimator": "grpo", f"{OURS}.proxy.max_rows": "1"})
    filtered = {"algorithm.filter_groups.enable": "True", f"{OURS}.proxy.max_rows": "1"}
    prepared(**filtered)
    prepared(**filtered, **{"algorithm.filter_groups.metric": "acc"})
    prepared(**{"distillation.enabled": "True"})
    prepared(**{f"{OURS}.proxy.credit": "completion", f"{OURS}.proxy.gamma": "0.9"})
    one_role = {f"{OURS}.proxy.roles": "[white,black]", f"{OURS}.proxy.train": "[white]"}
    prepared(**{"algorithm.adv_estimator": "grpo", f"{OURS}.proxy.max_rows": "1"}, **one_role)


ROLES = {f"{OURS}.proxy.roles": "[white,black]", "trainer.save_freq": "5", "trainer.total_training_steps": "20"}


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("[policy,0,5,15]", ""),
        ("['http://127.0.0.1:8000/v1#big']", ""),
        ("[4]", "opponents.black: step 4 has no checkpoint with trainer.save_freq=5"),
        ("[20]", "step 20 is none before the last, trainer.total_training_steps=20"),
        ("[no/such/model]", "'no/such/model' is no folder"),
        ("['http://user:word@host/v1']", "opponents.black: expected an address without a user"),
    ],
)
def test_opponents_that_can_never_play(listed: str, said: str) -> None:
    changes = {**ROLES, f"{OURS}.proxy.opponents": f"{{black: {listed}}}"}
    if not said:
        prepared(**changes)
        return
    with pytest.raises(ConfigError, match=said):
        prepared(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{OURS}.proxy.agent": None}, "'agent' or 'command' is the agent, and neither is set"),
        ({f"{OURS}.proxy.agent": "tests.no_such:run"}, "cannot import 'tests.no_such'"),
        ({f"{OURS}.proxy.agent": "tests.endpoint_agents:chet"}, "has no 'chet'; did you mean 'chat'"),
        (
            {f"{OURS}.proxy.agent": None, f"{OURS}.proxy.command": "[no-such-program]"},
            "is no program that can be started",
        ),
        ({f"{OURS}.request_timeout_s": None}, "request_timeout_s=null .* an agent that hangs would never end"),
        ({f"{OURS}.proxy.host": "0.0.0.0"}, "host='0.0.0.0'"),
        ({f"{OURS}.proxy.select": "tests.endpoint_agents"}, "write it as 'package.module:function'"),
        ({f"{OURS}.proxy.select": "'tests.endpoint_agents:chet'"}, "has no 'chet'"),
        ({f"{OURS}.proxy.max_row": "3"}, "unknown setting; did you mean 'max_rows'"),
        ({f"{OURS}.proxy.max_rows": "0"}, "greater than 0"),
        ({f"{OURS}.proxy.roles": "[]"}, "proxy.roles: expected the name of at least one role"),
        ({f"{OURS}.train": "[assistant,user]"}, "train=.* the agent is the environment"),
        ({f"{OURS}.proxy.train": "[user]"}, "train the text of PolicyUser by actor_rollout_ref"),
        (
            {f"{OURS}.proxy.roles": "[white,black]", f"{OURS}.proxy.max_rows": "1"},
            "max_rows=1 with .*roles=.*: each role that is trained has rows of its own, and there are 2; allow",
        ),
        ({"algorithm.adv_estimator": "grpo"}, "max_rows=16: sessions have several rows, and .*=grpo"),
        ({"algorithm.adv_estimator": "rloo"}, "=rloo counts each row"),
        ({"algorithm.adv_estimator": "mt_turns"}, "mt_turns': .* the branches of a session have none"),
        (
            {"algorithm.adv_estimator": "grpo", f"{OURS}.proxy.max_rows": "1", f"{OURS}.proxy.credit": "discounted"},
            "credit='discounted': it has no effect with .*grpo",
        ),
        ({f"{OURS}.proxy.gamma": "0.9"}, "gamma=0.9: it has no effect with .*credit=session"),
        ({"trainer.use_v1": "False"}, "max_rows=16: only verl's own V1 trainers take it"),
        ({"critic.enable": "True"}, "critic.enable=True: mt_grpo uses no critic"),
        (
            {"reward.reward_model.enable": "True"},
            "reward_model without a resource pool .* replace what the agent gives",
        ),
        (
            {
                "algorithm.adv_estimator": "grpo",
                "algorithm.filter_groups.enable": "True",
                "algorithm.filter_groups.metric": "acc",
                f"{OURS}.proxy.max_rows": "1",
                "trainer.use_v1": "False",
            },
            "metric='acc': a session whose agent failed has no such number",
        ),
        ({f"{ROLLOUT}.multi_turn.format": "tir"}, "in text mode a conversation is one text"),
        ({f"{OURS}.otc.form": "ppo"}, "otc.form='ppo': with the agent loop proxy_agent"),
        ({f"{OURS}.void_turn_pattern": "x"}, "void_turn_pattern='x': with the agent loop proxy_agent"),
        ({f"{OURS}.tool_reward.mode": "add"}, "tool_reward.mode='add': .* the tools are the agent's own"),
        ({f"{OURS}.context.mode": "window"}, "context.mode='window': .* the agent decides"),
        (
            {f"{ROLLOUT}.multi_turn.tool_config_path": "x.yaml"},
            r"^actor_rollout_ref\.rollout\.multi_turn\.tool_config_path='x.yaml': .* the tools are the agent's own",
        ),
        (
            {f"{ROLLOUT}.multi_turn.function_tool_path": "x.py"},
            r"^actor_rollout_ref\.rollout\.multi_turn\.function_tool_path='x.py': .* the tools are the agent's own",
        ),
        ({f"{ROLLOUT}.multi_turn.max_assistant_turns": "3"}, "max_assistant_turns=3: .* the loop is the agent's own"),
        ({f"{OURS}.proxy.history": "rendered"}, "proxy.history='rendered': earlier completions are shown as they were"),
        ({f"{OURS}.max_tool_calls": "3"}, "max_tool_calls=3: .* the tools are the agent's own"),
        ({f"{OURS}.observation_length": "9"}, "observation_length=9: .* the tools are the agent's own"),
        ({f"{OURS}.tool_config_path": "x.yaml"}, "tool_config_path='x.yaml': nothing reads it here"),
        (
            {f"{ROLLOUT}.agent.default_agent_loop": "multiturn_agent"},
            "agent='tests.endpoint_agents:chat': it has no",
        ),
        ({f"{ROLLOUT}.agent.default_agent_loop": "proxy_agents"}, "did you mean 'proxy_agent'"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, str | None], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepared(**changes)
