"""`prefix_tree` chooses the training engine by a variable of the workers' environment, or is refused by name."""

from typing import Any

import pytest

from tests.integration.test_refusals import composed
from verl_multiturn.errors import ConfigError

pytestmark = pytest.mark.stack

TREE = "actor_rollout_ref.rollout.custom.multiturn.prefix_tree"
VARIABLE = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR"


def vendor_of(config: Any) -> Any:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.startup.setting_changes import choose_engine
    from verl_multiturn.verl_bridge.startup.view import RunView

    choose_engine(RunView(config))
    return OmegaConf.select(config, VARIABLE)


def refuse(config: Any) -> None:
    from verl_multiturn.verl_bridge.startup.refusals.prefix_tree import PREFIX_TREE, is_on
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    check(RunView(config), [Section("", PREFIX_TREE, is_on)])


@pytest.mark.parametrize(
    ("mode", "vendor"),
    [
        ("auto", "verl_multiturn"),
        ("on", "verl_multiturn_strict"),
        ("off", None),
        ("False", None),
        ("True", "verl_multiturn_strict"),
    ],
)
def test_the_setting_chooses_the_engine(mode: str, vendor: str | None) -> None:
    assert vendor_of(composed(**{f"+{TREE}": mode})) == vendor


@pytest.mark.parametrize(
    ("section", "mode"),
    [
        ({}, "auto"),
        ({"++actor_rollout_ref.rollout.custom": "{multiturn: {cache: {lead_ms: 0}}}"}, "auto"),
        ({"++actor_rollout_ref.rollout.custom": "null"}, "auto"),
        ({"++actor_rollout_ref.rollout.custom": "{multiturn: null}"}, "auto"),
        ({f"+{TREE}": "null"}, "auto"),
        ({f"+{TREE}": "off"}, "off"),
        ({f"+{TREE}": "False"}, False),
        ({f"+{TREE}": "on"}, "on"),
    ],
)
def test_on_a_cpu_common_prefixes_are_computed_once_unless_the_user_says(section: dict[str, str], mode: object) -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.cpu.defaults import fill_in

    config = composed(**section)
    fill_in(config, 64)
    assert OmegaConf.select(config, TREE) == mode


@pytest.mark.parametrize("section", ["words", "{multiturn: words}"])
def test_a_section_that_is_no_mapping_is_left_to_its_refusal(section: str) -> None:
    from verl_multiturn.cpu.defaults import fill_in
    from verl_multiturn.verl_bridge.settings import settings_of

    config = composed(**{"++actor_rollout_ref.rollout.custom": section})
    fill_in(config, 64)
    with pytest.raises(ConfigError, match="mapping"):
        settings_of(config.actor_rollout_ref.rollout)


def test_a_run_without_our_loop_keeps_verls_engine_unless_asked() -> None:
    other = {"actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent"}
    assert vendor_of(composed(**other, **{f"+{TREE}": "auto"})) is None
    assert vendor_of(composed(**other, **{f"+{TREE}": "on"})) == "verl_multiturn_strict"


def test_a_strategy_without_its_section_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="common prefixes are computed once in verl's FSDP engine alone"):
        refuse(composed(**{"actor_rollout_ref.actor.strategy": "megatron", f"+{TREE}": "on"}))


def test_the_users_own_vendor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "metax")
    assert vendor_of(composed(**{f"+{TREE}": "auto"})) is None
    with pytest.raises(ConfigError, match="VERL_ENGINE_VENDOR chooses another training engine, 'metax'; unset"):
        refuse(composed(**{f"+{TREE}": "on"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "2"),
        ("actor_rollout_ref.model.use_fused_kernels", "True"),
        ("actor_rollout_ref.model.use_liger", "True"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "kl_cov"),
    ],
)
def test_on_is_refused_by_name_and_auto_is_not(key: str, value: str) -> None:
    refuse(composed(**{key: value, f"+{TREE}": "auto"}))
    with pytest.raises(
        ConfigError, match=f"prefix_tree='on' with {key}='?{value}'?: .*; set .*prefix_tree=auto, or {key}="
    ):
        refuse(composed(**{key: value, f"+{TREE}": "on"}))
