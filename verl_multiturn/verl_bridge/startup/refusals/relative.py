"""Refusals about rewards that are ranks among siblings (`rubric.relative`)."""

from __future__ import annotations

from typing import Any

from verl_multiturn.verl_bridge.startup.refusals.criteria import rubric_options, rubric_rows, validates
from verl_multiturn.verl_bridge.startup.refusals.rewards import scales
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, needs_our_trainer
from verl_multiturn.verl_bridge.startup.view import RunView

_RELATIVE = "reward.custom_reward_function.reward_kwargs.rubric.relative"
_CRITERIA = "reward.custom_reward_function.reward_kwargs.rubric.criteria"
_MANAGER = "reward.reward_manager.name"
_AGENT = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_N = "actor_rollout_ref.rollout.n"
_FILTER = "actor_rollout_ref.rollout.custom.multiturn.filter"
_HANDING_ON = ("naive", "rate_limited", "remote")
"""verl's reward managers that hand the fields of a conversation over to the reward function."""


def ranks(run: RunView) -> bool:
    """Return whether the rows of `RELATIVE` apply to a run."""
    return bool(rubric_options(run).get("relative"))


def _manager_that_keeps(run: RunView) -> Any:
    """Return the reward manager, if it hands no verdict over to the reward function; None otherwise."""
    name = run.value("reward_model.reward_manager") or run.value(_MANAGER)
    source = run.value("reward_model.reward_loop_source") or run.value("reward.reward_manager.source")
    return None if source in (None, "register") and name in (None, *_HANDING_ON) else name


def _mode_that_replaces(run: RunView) -> str:
    settings = run.settings
    modes = {"tool_reward": settings.tool_reward.mode, "interaction_reward": settings.interaction_reward.mode}
    return next((name for name, mode in modes.items() if mode == "replace"), "")


def _row_without_criteria(run: RunView) -> str:
    """Return the first row of a validation that `rubric` scores and that has no criteria; "" without one."""
    if not validates(run) or rubric_options(run).get("criteria"):
        return ""
    return next((row.place for row in rubric_rows(run, "data.val_files") if not row.criteria), "")


RELATIVE: list[Check] = [
    needs_our_trainer(_RELATIVE, ranks, "set relative=False"),
    RefusalRow(
        (_RELATIVE, _AGENT),
        when=lambda run: run.own_manager,
        why="the siblings of a group are ranked in our workers",
        remedy="leave the manager out, or set relative=False",
    ),
    RefusalRow(
        (_RELATIVE, _N),
        when=lambda run: run.rollout.n == 1,
        why="it compares the conversations of one prompt, and there is one",
        remedy="set n to 2 or more, or relative=False",
    ),
    RefusalRow(
        (_RELATIVE, _MANAGER),
        when=_manager_that_keeps,
        why=f"verl's {', '.join(_HANDING_ON)} alone hand a conversation's fields, its rank among them, over to the "
        "reward function",
        remedy="set one of them, or relative=False",
    ),
    RefusalRow(
        _RELATIVE,
        when=lambda run: run.colocated_reward_model,
        why="the scores of {found} without a resource pool of its own replace the ranks",
        remedy="set {found}.enable_resource_pool=True, or relative=False",
    ),
    RefusalRow(
        _RELATIVE,
        when=_mode_that_replaces,
        why="{found}.mode=replace does not call compute_score, which makes the rank a score",
        remedy="set the mode to add or none, or relative=False",
    ),
    RefusalRow(
        _RELATIVE,
        when=scales,
        why="{PATH}.otc.form={run.settings.otc.form!r} compares right answers, and a rank does not say who is right",
        remedy="leave otc out, or set relative=False",
    ),
    RefusalRow(
        (_RELATIVE, _FILTER),
        when=lambda run: run.settings.filter == "difficulty",
        why="it counts right answers, and a rank does not say who is right",
        remedy="set the filter to skip or refill, or relative=False",
    ),
    RefusalRow(
        (_RELATIVE, "algorithm.filter_groups.metric"),
        when=lambda run: run.filter_metric == "acc",
        why="a rank does not say who is right, so that it is 0 for all",
        remedy="set the metric to reward, or relative=False",
    ),
    RefusalRow(
        (_RELATIVE, "algorithm.adv_estimator"),
        when=lambda run: run.estimator == "remax",
        why="its greedy answer has no siblings, and no rank",
        remedy="set another estimator, or relative=False",
    ),
    RefusalRow(
        (_RELATIVE, _CRITERIA),
        when=_row_without_criteria,
        why="a validation ranks nothing and scores by the criteria alone, and {found} has none either",
        remedy="write criteria, or validate nothing (trainer.test_freq=-1, trainer.val_before_train=False)",
    ),
]
