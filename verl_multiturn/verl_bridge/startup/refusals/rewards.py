"""Refusals about scores: settings that would silently drop a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_multiturn.clients.chat_endpoint import check_address
from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import STATELESS_MANAGERS
from verl_multiturn.verl_bridge.settings import is_our_reward
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, needs_our_trainer
from verl_multiturn.verl_bridge.startup.view import RunView

_REWARDS = ("tool_reward", "interaction_reward")
_OTC = f"{PATH}.otc.form"
_NEAR = f"{PATH}.near_rewards"
_MANAGER = "reward.reward_manager.name"
_SECTIONS = ("reward.custom_reward_function", "custom_reward_function")
"""Sections that name the reward function; where a value of the second one is set, verl takes that."""


def _rows_of(name: str) -> list[RefusalRow]:
    """Return the rows of rewards from outside `compute_score`."""
    key = f"{PATH}.{name}.mode"
    return [
        RefusalRow(
            key,
            when=lambda run: run.is_set(key) and not run.is_v1,
            why="only verl's V1 trainer takes it",
            remedy="set trainer.use_v1=True, or the mode to none",
        ),
        RefusalRow(
            key,
            when=lambda run: run.is_set(key) and run.colocated_reward_model,
            why="the scores of {found} without a resource pool of its own replace these rewards",
            remedy="set {found}.enable_resource_pool=True, or the mode to none",
        ),
        RefusalRow(
            key,
            when=lambda run: run.value(key) == "replace" and run.filter_metric not in (None, "reward"),
            why="compute_score is not called, so that algorithm.filter_groups.metric={run.filter_metric!r} does not "
            "exist",
            remedy="set it to reward",
        ),
    ]


def scales(run: RunView) -> bool:
    """Return whether the rows of `OTC` apply to a run."""
    return run.settings.otc.form != "none"


def _row_of_replaced(name: str) -> RefusalRow:
    return RefusalRow(
        _OTC,
        when=lambda run: run.value(f"{PATH}.{name}.mode") == "replace",
        why=f"it scales what compute_score gives, which {name}.mode=replace does not call",
        remedy="set the mode to add or none, or the form to none",
    )


def _judges_all_near(run: RunView) -> bool:
    return run.settings.near_rewards == "all"


def _manager_that_keeps(run: RunView) -> Any:
    """Return the reward manager, if `near_rewards=all` cannot have it; None otherwise."""
    if not _judges_all_near(run):
        return None
    # Where verl's older settings are set, verl takes them.
    name = run.value("reward_model.reward_manager") or run.value(_MANAGER)
    source = run.value("reward_model.reward_loop_source") or run.value("reward.reward_manager.source")
    return None if source == "register" and name in STATELESS_MANAGERS else name


NEAR = [
    RefusalRow(
        (_NEAR, _MANAGER),
        when=_manager_that_keeps,
        why=f"only {' and '.join(STATELESS_MANAGERS)} keep nothing from one row to the next",
        remedy="set one of them, or leave near_rewards out",
    ),
    RefusalRow(
        _NEAR,
        when=lambda run: (
            _judges_all_near(run) and (run.value("reward.reward_model.enable") or run.value("reward_model.enable"))
        ),
        why="only reward workers know the router of the reward model",
        remedy="leave near_rewards out",
    ),
]


def _our_functions(run: RunView) -> list[str]:
    """Return the sections that name our `compute_score`; where verl's older one is set, verl takes it."""
    return [section for section in _SECTIONS if is_our_reward(run.config, section)]


def check_options(run: RunView) -> None:
    """Refuse options of our `compute_score` that are unknown or have a value that does not fit."""
    from verl_multiturn.rewards.router import check_reward_kwargs  # takes a while to import

    for section in _our_functions(run):
        key = f"{section}.reward_kwargs"
        given = run.value(key)
        options: Any = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
        if not isinstance(options, dict | None):
            raise ConfigError(f"{key}={options!r}: expected a mapping; write each option under its own key")
        check_reward_kwargs(options or {}, key)


def check_judge(run: RunView) -> None:
    """Refuse a judge that the reward workers could not ask: its address is none, or needs a proxy that is none."""
    for section in _our_functions(run):
        for name in ("judge", "rubric"):
            key = f"{section}.reward_kwargs.{name}.url"
            if (url := run.value(key)) is not None:
                check_address(url, key)


def _options_of(run: RunView, section: str) -> Mapping[str, Any]:
    given = run.value(f"{section}.reward_kwargs")
    return given if isinstance(given, Mapping) or OmegaConf.is_dict(given) else {}  # `check_options` refuses others


def _without_function(section: str) -> RefusalRow:
    return RefusalRow(
        f"{section}.reward_kwargs",
        when=lambda run: run.value(f"{section}.reward_kwargs") and not run.value(f"{section}.path"),
        why=f"{section}.path is not set, and verl's own reward takes no options",
        remedy=f"set it to pkg://verl_multiturn.rewards and {section}.name to compute_score for ours, or leave the "
        "options out",
    )


def _routes_of_others(section: str) -> RefusalRow:
    """Return the row about our option beside a function of one's own: it may be there for ours, of a recipe."""
    return RefusalRow(
        f"{section}.reward_kwargs.routes",
        when=lambda run: (
            "routes" in _options_of(run, section)
            and run.value(f"{section}.path")
            and not is_our_reward(run.config, section)
            and f"{run.value(f'{section}.path')}:{run.value(f'{section}.name')}"
        ),
        why="it is an option of verl_multiturn.rewards.compute_score; {found} gets it as a keyword, and routes nothing "
        "unless it does so itself",
        remedy="leave it out where it does not",
        is_refusal=False,
    )


def _grades_turns(run: RunView, section: str) -> bool:
    criteria = run.value(f"{section}.reward_kwargs.rubric.criteria") or ()
    return any(OmegaConf.is_dict(each) and each.get("turns") == "each" for each in criteria)


def _values_of_turns(section: str) -> RefusalRow:
    return RefusalRow(
        f"{section}.reward_kwargs.rubric.criteria",
        when=lambda run: run.colocated_reward_model if _grades_turns(run, section) else None,
        why="a criterion is for each turn, and {found} without a resource pool of its own computes the rewards when no "
        "row knows its turns any more",
        remedy="set {found}.enable_resource_pool=True, or turns to last",
    )


REWARDS: list[Check] = [
    *map(_values_of_turns, _SECTIONS),
    *NEAR,
    *map(_without_function, _SECTIONS),
    *map(_routes_of_others, _SECTIONS),
    check_options,
    check_judge,
    *(row for name in _REWARDS for row in _rows_of(name)),
]

OTC = [
    needs_our_trainer(_OTC, scales, "set the form to none"),
    *map(_row_of_replaced, _REWARDS),
    RefusalRow(
        _OTC,
        when=lambda run: run.colocated_reward_model,
        why="it scales what compute_score gives, and the scores of {found} without a resource pool of its own replace "
        "that",
        remedy="set {found}.enable_resource_pool=True, or the form to none",
    ),
    RefusalRow(
        _OTC,
        when=lambda run: run.settings.otc.form == "grpo" and run.rollout.n == 1,
        why="it compares the answers to one question, and actor_rollout_ref.rollout.n=1",
        remedy="set n to 2 or more, or the form to ppo",
    ),
]
