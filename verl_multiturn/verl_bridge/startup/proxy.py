"""The part of the start-up check about agents behind an endpoint: the agent loop `proxy_agent`."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.chat.tir import TIR
from verl_multiturn.config import PATH, MultiTurnSettings, ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.proxy.agents.runners import check_agent
from verl_multiturn.proxy.http.server import check_host
from verl_multiturn.proxy.sessions.rows import load_select
from verl_multiturn.verl_bridge.names import AGENT_LOOP, ESTIMATORS, PROXY_LOOP
from verl_multiturn.verl_bridge.settings import estimator_of, wall_clock_s
from verl_multiturn.verl_bridge.startup.our_trainer import require_our_trainer
from verl_multiturn.verl_bridge.startup.scores import colocated_reward_model

_KEY = f"{PATH}.proxy"


def check_proxy(config: DictConfig, settings: MultiTurnSettings, loops: Collection[str]) -> None:
    """Check the settings of agents behind an endpoint, and let the engine stop at their stop texts.

    Args:
        config: verl's whole configuration.
        settings: our settings in it.
        loops: the agent loops of the run.

    Raises:
        ConfigError: the agent or a setting cannot work, or a setting would have no effect.
    """
    proxy = settings.proxy
    if PROXY_LOOP not in loops:
        if given := proxy.model_dump(exclude_defaults=True):
            key, value = next(iter(given.items()))
            raise ConfigError(
                f"{_KEY}.{key}={value!r} has no effect, since no row is known to use the agent loop {PROXY_LOOP}; set "
                f"actor_rollout_ref.rollout.agent.default_agent_loop={PROXY_LOOP}, or leave it out"
            )
        return
    check_agent(proxy)
    wall_clock_s(settings)
    check_host(proxy.host)
    load_select(proxy.select, f"{_KEY}.select")
    _check_credit(config, proxy)
    if section := colocated_reward_model(config):
        raise ConfigError(
            f"the agent loop {PROXY_LOOP}: the scores of {section} without a resource pool of its own replace what the "
            f"agent gives; set {section}.enable_resource_pool=True, or use the agent loop {AGENT_LOOP}"
        )
    filtered = OmegaConf.select(config, "algorithm.filter_groups") or {}
    if filtered.get("enable") and filtered.get("metric") != "reward":
        raise ConfigError(
            f"algorithm.filter_groups.metric={filtered.get('metric')!r}: a session whose agent failed has no such "
            "number, at which verl would end the run; set enable to False, or the metric to reward and "
            f"{_KEY}.max_rows to 1"
        )
    _check_others(config, settings, only_agents=AGENT_LOOP not in loops)
    with open_dict(config):
        config.actor_rollout_ref.rollout.skip_tokenizer_init = False  # SGLang needs a tokenizer to stop at a text


def _check_credit(config: DictConfig, proxy: ProxySettings) -> None:
    estimator = estimator_of(config)
    if estimator in ESTIMATORS and estimator != "mt_grpo":
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} with the agent loop {PROXY_LOOP}: it compares turns by their order, "
            f"and the branches of a session have none; set it to mt_grpo, with {_KEY}.credit"
        )
    if estimator not in ESTIMATORS and proxy.max_rows > 1:
        raise ConfigError(
            f"{_KEY}.max_rows={proxy.max_rows}: sessions have several rows, and algorithm.adv_estimator={estimator} "
            f"counts each row as a session; set the estimator to mt_grpo, or {_KEY}.max_rows=1"
        )
    if estimator not in ESTIMATORS and proxy.credit != "session":
        raise ConfigError(
            f"{_KEY}.credit={proxy.credit} has no effect with algorithm.adv_estimator={estimator}; set the estimator "
            "to mt_grpo, or the credit to session"
        )
    if proxy.credit == "session" and proxy.gamma != 1.0:
        raise ConfigError(
            f"{_KEY}.gamma={proxy.gamma!r} has no effect with {_KEY}.credit=session; set the credit to discounted or "
            "completion, or leave gamma out"
        )
    if proxy.max_rows > 1:
        given = f"{_KEY}.max_rows={proxy.max_rows}"
        require_our_trainer(config, given, f"set {_KEY}.max_rows=1")
        if OmegaConf.select(config, "critic.enable"):
            raise ConfigError(
                f"{given} with critic.enable=True: {estimator} uses no critic, and its updates would be counted in "
                "rows; set critic.enable=False"
            )


def _check_others(config: DictConfig, settings: MultiTurnSettings, only_agents: bool) -> None:
    """Refuse settings of conversations that would do harm in sessions, or do nothing."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.multi_turn.format == TIR:
        raise ConfigError(
            f"rollout.multi_turn.format={TIR} with the agent loop {PROXY_LOOP}: in text mode a conversation is one "
            "text without messages; use another format"
        )
    harmful = {
        "otc.form": (settings.otc.form, "none", "sessions have no tool calls of ours"),
        "void_turn_pattern": (settings.void_turn_pattern, None, "not every completion of a session acts or answers"),
    }
    tools, turns = "the tools are the agent's own", "the loop is the agent's own"
    idle = {
        "tool_reward.mode": (settings.tool_reward.mode, "none", tools),
        "tool_config_path": (settings.tool_config_path, None, tools),
        "max_tool_calls": (settings.max_tool_calls, None, tools),
        "observation_length": (settings.observation_length, None, tools),
        "interaction_reward.mode": (settings.interaction_reward.mode, "none", "the agent is the environment"),
        "interaction_config_path": (settings.interaction_config_path, None, "the agent is the environment"),
        "context.mode": (settings.context.mode, "append", "the agent decides what the model is shown"),
    }
    checked = {f"{PATH}.{name}": found for name, found in (harmful | idle if only_agents else harmful).items()}
    if only_agents:
        reasons = {"tool_config_path": tools, "function_tool_path": tools, "max_assistant_turns": turns}
        for name, reason in reasons.items():
            value = OmegaConf.select(rollout.multi_turn, name)
            checked[f"actor_rollout_ref.rollout.multi_turn.{name}"] = (value, None, reason)
    for key, (value, default, reason) in checked.items():
        if value != default:
            raise ConfigError(
                f"{key}={value!r} with the agent loop {PROXY_LOOP}: {reason}; leave it out, or use the agent "
                f"loop {AGENT_LOOP}"
            )
