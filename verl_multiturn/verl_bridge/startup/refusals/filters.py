"""Refusals about the filter of groups without signal."""

from __future__ import annotations

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.settings import why_rows_stay
from verl_multiturn.verl_bridge.startup.needs import FILTER
from verl_multiturn.verl_bridge.startup.table import RefusalRow, needs_our_trainer
from verl_multiturn.verl_bridge.startup.view import RunView

_FILTER = f"{PATH}.filter"
_SAMPLER = "trainer.v1.sampler.custom_sampler"
BY_REWARD = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "mt_grpo")
"""Estimators that give a group whose rewards are all equal advantages of 0, and look at no other group."""


def filters(run: RunView) -> bool:
    """Return whether the rows apply to a run: it filters groups without signal."""
    return run.settings.filter != "off"


FILTERS = [
    needs_our_trainer(_FILTER, filters, "set the filter to off"),
    RefusalRow(
        (_FILTER, "algorithm.filter_groups.enable"),
        when=lambda run: run.filter_metric is not None,
        why="both would leave out groups",
        remedy="leave out one of the two; {PATH}.filter=refill is algorithm.filter_groups with the metric reward, and "
        "submits one prompt for each group that leaves",
    ),
    RefusalRow(
        (_FILTER, f"{_SAMPLER}.name"),
        when=lambda run: run.value(f"{_SAMPLER}.path") and run.value(f"{_SAMPLER}.name"),
        why="a sampler of your own chooses the groups",
        remedy="leave out one of the two",
    ),
    RefusalRow(
        (_FILTER, "actor_rollout_ref.rollout.n"),
        when=lambda run: run.rollout.n < 2,
        why="it compares conversations of one prompt, and there is only one",
        remedy="set rollout.n to 2 or more, or the filter to off",
    ),
    RefusalRow(
        (_FILTER, "algorithm.adv_estimator"),
        when=lambda run: (
            run.estimator not in BY_REWARD and not (run.has_own_estimator and run.settings.filter == "refill")
        ),
        why="a group of equal rewards may have advantages other than 0 there",
        remedy=f"set the estimator to one of {', '.join(BY_REWARD)}, or the filter to off; a function of your own may "
        "have refill, if it learns nothing from such groups",
    ),
    RefusalRow(
        (_FILTER, f"{PATH}.proxy.credit"),
        when=lambda run: run.has_agents and run.settings.proxy.credit == "completion",
        why="completions of sessions with equal rewards learn from different ones",
        remedy="set the credit to session or discounted, or the filter to off",
    ),
    RefusalRow(
        (_FILTER, f"{PATH}.otc.form"),
        when=lambda run: run.settings.otc.form != "none",
        why="it scales rewards after groups were judged, so that equal ones become different",
        remedy="set the form to none, or the filter to off",
    ),
    RefusalRow(
        (_FILTER, "algorithm.use_kl_in_reward"),
        when=lambda run: run.value("algorithm.use_kl_in_reward"),
        why="a KL penalty makes equal rewards different",
        remedy="set use_kl_in_reward=False, or the filter to off",
    ),
    RefusalRow(
        _FILTER,
        when=lambda run: run.colocated_reward_model,
        why="the scores of {found} without a resource pool of its own are not known yet when groups are judged",
        remedy="set {found}.enable_resource_pool=True, or the filter to off",
    ),
    RefusalRow(
        (_FILTER, "critic.enable"),
        when=lambda run: run.has_critic,
        why="a critic learns from groups without signal, too",
        remedy="set critic.enable=False, or the filter to off",
    ),
    RefusalRow(
        (_FILTER, "skip.rollout_tq.enable"),
        when=lambda run: run.value("skip.rollout_tq.enable"),
        why="cached rollouts come without a draw",
        remedy="set skip.rollout_tq.enable=False, or the filter to off",
    ),
    RefusalRow(
        _FILTER,
        when=lambda run: run.settings.filter == "skip" and why_rows_stay(run.config),
        why="with {found} a row whose advantages are all 0 changes the update",
        remedy="set the filter to refill or difficulty, which train such rows as before, or change that setting",
    ),
    RefusalRow(
        (_FILTER, "algorithm.rollout_correction.rollout_is_batch_normalize"),
        when=lambda run: (
            run.settings.filter in ("skip", "difficulty")
            and run.value("algorithm.rollout_correction.rollout_is_batch_normalize")
        ),
        why="the weights of trained rows would depend on those of rows whose probabilities are not computed",
        remedy="set rollout_is_batch_normalize=False, or the filter to refill",
    ),
    *FILTER.rows(),
]
