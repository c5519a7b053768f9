"""Refusals about values by themselves: their types, sizes below one, and names of unknown algorithms."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from verl_multiturn.advantages.estimators import ESTIMATORS, is_own_function
from verl_multiturn.advantages.function import GROUP
from verl_multiturn.calls.loading.entry_points import installed_entry, is_reference
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import TURN_LOSS
from verl_multiturn.verl_bridge.startup import verl_names
from verl_multiturn.verl_bridge.startup.own_code import LIBRARY
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow
from verl_multiturn.verl_bridge.startup.value_types import check_value_types
from verl_multiturn.verl_bridge.startup.view import RunView

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode"
_SIZES = (
    "data.train_batch_size", "data.gen_batch_size", "data.val_batch_size", "data.max_prompt_length",
    "data.max_response_length", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ACTOR}.ppo_epochs", "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu", "critic.ppo_epochs", f"{_ROLLOUT}.n", f"{_ROLLOUT}.val_kwargs.n",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.tensor_model_parallel_size", f"{_ROLLOUT}.data_parallel_size",
    f"{_ROLLOUT}.pipeline_model_parallel_size", f"{_ROLLOUT}.agent.num_workers", "reward.num_workers",
    "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs", "trainer.total_training_steps",
)  # fmt: skip
"""Settings that count something of which every run has one."""

_OF_ONES_OWN = (
    LIBRARY, "data.custom_cls.path", "trainer.v1.sampler.custom_sampler.path",
    "trainer.checkpoint_callback_class",
)  # fmt: skip
"""Settings that name code of the user's own in the trainer's process, which may register an estimator there."""


def _row_of_size(key: str) -> RefusalRow:
    return RefusalRow(
        key,
        when=lambda run: isinstance(value := run.value(key), int) and value < 1,
        why="expected a whole number of at least 1",
        remedy="write one, or leave it out",
    )


def _check_name(
    run: RunView, key: str, known: Collection[str], registered: Callable[[], Any], own: Collection[str]
) -> None:
    """Refuse a name that is not registered; one that is like none of verl's may be of the user's own code.

    `own` are the settings that name such code.
    """
    name = run.value(key)
    if name is None or (name := str(getattr(name, "value", name))) in known:
        return
    hint = did_you_mean(name, known)
    if not hint and (verl_names.has_other_plugins() or any(map(run.value, own))):
        return
    if verl_names.has_other_plugins():
        run.require_stack()
    if not run.is_early and name in registered():
        return
    raise ConfigError(f"{key}={name!r}: nobody has registered it; {hint or f'choose one of {sorted(known)}'}")


def check_estimator(run: RunView) -> None:
    """Refuse an `algorithm.adv_estimator` that is not registered."""

    def registered() -> Any:
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

        return ADV_ESTIMATOR_REGISTRY

    if is_reference(run.estimator):
        installed_entry(run.estimator, GROUP, _ESTIMATOR)
    elif not is_own_function(run.estimator):
        _check_name(run, _ESTIMATOR, {*verl_names.estimators(), *ESTIMATORS}, registered, _OF_ONES_OWN)


def check_policy_loss(run: RunView) -> None:
    """Refuse an `actor.policy_loss.loss_mode` that is not registered.

    Of the user's own modules only `model.external_lib` is imported in the actor's processes, which compute the loss.
    The check of own code looks whether it registers the name (`startup/own_code.py`).
    """
    if run.value(LIBRARY):
        return

    def registered() -> Any:
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        return POLICY_LOSS_REGISTRY

    _check_name(run, _LOSS, {*verl_names.policy_losses(), TURN_LOSS}, registered, ())


VALUES: list[Check] = [check_value_types, *map(_row_of_size, _SIZES), check_estimator, check_policy_loss]
