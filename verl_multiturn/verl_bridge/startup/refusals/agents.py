"""Refusals about agents behind an endpoint: the agent loop `proxy_agent`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.clients.chat_endpoint import check_address
from verl_multiturn.config import PATH, POLICY, ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.runners import check_agent
from verl_multiturn.models.location import find_model
from verl_multiturn.proxy.http.server import check_host
from verl_multiturn.proxy.opponents.draw import is_address
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.proxy.sessions.rows import load_select
from verl_multiturn.verl_bridge.names import AGENT_LOOP, RECORDED_LOOP
from verl_multiturn.verl_bridge.settings import wall_clock_s
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, needs_our_trainer, set_beside
from verl_multiturn.verl_bridge.startup.view import RunView

_KEY = f"{PATH}.proxy"
_ESTIMATOR = "algorithm.adv_estimator"
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"

_OF_RECORDS = ("roles", "train")
"""Settings that hold for recorded sessions, too."""


def _without_agents(names: Collection[str], when: Callable[[RunView], Any]) -> list[RefusalRow]:
    return set_beside(
        [f"{_KEY}.{name}" for name in names],
        when=when,
        why="it has no effect, since no row is known to use the agent loop {PROXY_LOOP}",
        remedy="set actor_rollout_ref.rollout.agent.default_agent_loop={PROXY_LOOP}, or leave it out",
    )


NO_AGENTS = [
    *_without_agents([name for name in ProxySettings.model_fields if name not in _OF_RECORDS], lambda run: True),
    *_without_agents(_OF_RECORDS, lambda run: RECORDED_LOOP not in run.loops),
]


def check_agent_settings(run: RunView) -> None:
    """Refuse an agent or a function of `select` that is not there, a session without an end, and an unknown host."""
    wall_clock_s(run.settings)
    run.require_stack()  # the agent's code is imported
    check_agent(run.settings.proxy)
    check_host(run.settings.proxy.host)
    load_select(run.settings.proxy.select, f"{_KEY}.select")


def check_opponents(run: RunView) -> None:
    """Refuse an opponent that can never play: a step without a checkpoint, no model's folder, no address.

    Raises:
        ConfigError: There is one.
    """
    trainer = run.config.trainer
    for role, listed in run.settings.proxy.opponents.items():
        where = f"{_KEY}.opponents.{role}"
        for name in listed:
            if is_address(name):
                check_address(str(name).partition("#")[0], where)
            elif isinstance(name, str) and name != POLICY:
                find_model(Path(name))
            elif name == 0 and (adapter := run.value("actor_rollout_ref.model.lora_adapter_path")):
                raise ConfigError(
                    f"{where}: 0 is the model of actor_rollout_ref.model.path, and the run begins with the adapter "
                    f"{adapter!r} on it; merge the two with PEFT, and name the folder in the place of 0"
                )
            elif isinstance(name, int) and name > 0 and (trainer.save_freq <= 0 or name % trainer.save_freq):
                raise ConfigError(
                    f"{where}: step {name} has no checkpoint with trainer.save_freq={trainer.save_freq}; name steps "
                    "that it divides, or set another"
                )
            elif isinstance(name, int) and name >= (trainer.total_training_steps or name + 1):
                raise ConfigError(
                    f"{where}: step {name} is none before the last, trainer.total_training_steps="
                    f"{trainer.total_training_steps}; name an earlier one"
                )


def _trained(run: RunView) -> int:
    """Return the number of roles that are trained; 0 where there are no roles."""
    roles = Roles.of(run.settings.proxy)
    return 0 if roles is None else len(roles.trained)


def _has_rows(run: RunView) -> bool:
    return run.settings.proxy.max_rows > 1


def _unfit(names: Sequence[str], why: str, when: Callable[[RunView], Any] = lambda run: True) -> list[RefusalRow]:
    """Return the rows of settings of conversations that would do harm in sessions, or do nothing."""
    return set_beside(
        [name if name.startswith(_MULTI_TURN) else f"{PATH}.{name}" for name in names],
        when,
        f"with the agent loop {{PROXY_LOOP}} {why}",
        "leave it out, or use the agent loop {AGENT_LOOP}",
    )


def _idle(names: Sequence[str], why: str) -> list[RefusalRow]:
    return _unfit(names, why, lambda run: AGENT_LOOP not in run.loops)


_TOOLS, _ENVIRONMENT = "the tools are the agent's own", "the agent is the environment"

AGENTS: list[Check] = [
    check_agent_settings,
    check_opponents,
    RefusalRow(
        _ESTIMATOR,
        when=lambda run: run.estimator in ("mt_turns", "mt_gigpo"),
        why="it compares turns by their order, and with the agent loop {PROXY_LOOP} the branches of a session have "
        "none",
        remedy=f"set it to mt_grpo, with {_KEY}.credit, or to a function of your own",
    ),
    RefusalRow(
        f"{_KEY}.max_rows",
        when=lambda run: not run.counts_conversations and _has_rows(run),
        why="sessions have several rows, and algorithm.adv_estimator={run.estimator} counts each row as a session",
        remedy=f"set the estimator to mt_grpo or a function of your own, or {_KEY}.max_rows=1",
    ),
    RefusalRow(
        (f"{_KEY}.max_rows", f"{_KEY}.roles"),
        when=lambda run: _trained(run) > run.settings.proxy.max_rows and _trained(run),
        why="each role that is trained has rows of its own, and there are {found}",
        remedy=f"allow a session more rows, with algorithm.adv_estimator=mt_grpo, or train fewer roles ({_KEY}.train)",
    ),
    RefusalRow(
        f"{_KEY}.credit",
        when=lambda run: run.estimator != "mt_grpo" and run.settings.proxy.credit != "session",
        why="it has no effect with algorithm.adv_estimator={run.estimator}",
        remedy="set the estimator to mt_grpo, or the credit to session",
    ),
    RefusalRow(
        f"{_KEY}.gamma",
        when=lambda run: run.settings.proxy.credit == "session" and run.settings.proxy.gamma != 1.0,
        why=f"it has no effect with {_KEY}.credit=session",
        remedy="set the credit to discounted or completion, or leave gamma out",
    ),
    needs_our_trainer(f"{_KEY}.max_rows", _has_rows, f"set {_KEY}.max_rows=1"),
    RefusalRow(
        (f"{_KEY}.max_rows", "critic.enable"),
        when=lambda run: _has_rows(run) and run.asks_for_critic,
        why="{run.estimator} uses no critic, and its updates would be counted in rows",
        remedy="set critic.enable=False",
    ),
    RefusalRow(
        "reward.reward_model.enable",
        when=lambda run: run.colocated_reward_model,
        given="the agent loop {PROXY_LOOP}",
        why="the scores of {found} without a resource pool of its own replace what the agent gives",
        remedy="set {found}.enable_resource_pool=True, or use the agent loop {AGENT_LOOP}",
    ),
    RefusalRow(
        "algorithm.filter_groups.metric",
        when=lambda run: run.our_trainer is None and run.filter_metric not in (None, "reward"),
        why="a session whose agent failed has no such number, at which the trainer "
        "trainer.v1.trainer_mode={run.trainer_mode!r} would end the run",
        remedy="use one of verl's own V1 trainers, or set the metric to reward",
    ),
    RefusalRow(
        f"{_MULTI_TURN}.format",
        when=lambda run: run.is_text_mode,
        why="in text mode a conversation is one text without the messages that the agent loop {PROXY_LOOP} needs",
        remedy="use another format",
    ),
    *_unfit(["otc.form"], "sessions have no tool calls of ours"),
    *_unfit(["void_turn_pattern"], "not every completion of a session acts or answers"),
    *_idle(["tool_reward.mode", "max_tool_calls", "observation_length"], _TOOLS),
    *_idle(["interaction_reward.mode", "interaction_config_path", "train"], _ENVIRONMENT),
    *_idle(["context.mode"], "the agent decides what the model is shown"),
    *_idle([f"{_MULTI_TURN}.tool_config_path", f"{_MULTI_TURN}.function_tool_path"], _TOOLS),
    *_idle([f"{_MULTI_TURN}.max_assistant_turns"], "the loop is the agent's own"),
]
