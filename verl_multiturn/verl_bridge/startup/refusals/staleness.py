"""Refusals about asynchronous training and over-sampling."""

from __future__ import annotations

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.names import ROLLOUT
from verl_multiturn.verl_bridge.startup import needs
from verl_multiturn.verl_bridge.startup.table import RefusalRow, needs_our_trainer
from verl_multiturn.verl_bridge.startup.view import TRAINERS, RunView

_ROLLOUT = "actor_rollout_ref.rollout"
_BACKEND = f"{_ROLLOUT}.checkpoint_engine.backend"
_ETA = f"{PATH}.max_staleness"
_STRATEGY = f"{PATH}.staleness_strategy"
_SAMPLER = "trainer.v1.sampler"
_RATE = f"{_ROLLOUT}.over_sample_rate"
_MOST_RATE = 0.5


def _is_apart(run: RunView) -> bool:
    return run.our_trainer == "separate_async"


def _is_bounded(run: RunView) -> bool:
    return run.settings.max_staleness is not None


def _row_of_warmup(mode: str) -> RefusalRow:
    """Return the row of a number of warm-up batches with which groups would be beyond the bound from the start."""
    key = f"trainer.v1.{mode}.num_warmup_batches"

    def found(run: RunView) -> bool:
        given = run.value(key)
        if run.our_trainer != mode or not needs.STALENESS.values(run) or needs.is_default_warmup(given):
            return False
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        return not is_number or not 0 <= given <= run.settings.max_staleness

    return RefusalRow(
        key,
        when=found,
        why="expected a number of batches from 0 to {PATH}.max_staleness={run.settings.max_staleness}, for example 0.5",
        remedy="leave it out: then it is max_staleness",
    )


SERVERS_APART = [
    RefusalRow(
        _BACKEND,
        when=lambda run: _is_apart(run) and run.value(_BACKEND) == "naive",
        why="it copies weights within one process, and trainer.v1.trainer_mode=separate_async has its engines apart",
        remedy=f"set {_BACKEND}=nccl",
    ),
]

IMPORTANCE = [
    RefusalRow(
        f"{PATH}.importance_weight",
        when=lambda run: (
            run.settings.importance_weight == "truncated" and not (_is_bounded(run) and run.is_asynchronous)
        ),
        why="expected an asynchronous trainer with {PATH}.max_staleness, got "
        "trainer.v1.trainer_mode={run.trainer_mode!r} and max_staleness={run.settings.max_staleness!r}",
        remedy="set both, or leave importance_weight out",
    ),
    *needs.WEIGHT.rows(),
]

STALENESS = [
    RefusalRow(
        _STRATEGY,
        when=lambda run: run.is_set(_STRATEGY) and not _is_bounded(run),
        why="it has no effect without {PATH}.max_staleness",
        remedy="set both, or leave it out",
    ),
    needs_our_trainer(_ETA, _is_bounded, "leave max_staleness out"),
    RefusalRow(
        _ETA,
        when=lambda run: run.our_trainer == "sync" and (run.settings.max_staleness or 0) > 0,
        why="the trainer 'sync' trains only tokens of the age 0",
        remedy="set trainer.v1.trainer_mode=separate_async or colocate_async, or leave max_staleness out",
    ),
    RefusalRow(
        _ETA,
        when=lambda run: _is_bounded(run) and not run.runs_our_server,
        why=f"{_ROLLOUT}.name={{run.rollout.name!r}} does not say under which weights each token was sampled",
        remedy=f"set {_ROLLOUT}.name={ROLLOUT}, or leave max_staleness out",
    ),
    RefusalRow(
        _ETA,
        when=lambda run: (
            _is_bounded(run)
            and run.value(f"{_SAMPLER}.custom_sampler.path")
            and run.value(f"{_SAMPLER}.custom_sampler.name")
        ),
        why=f"{_SAMPLER}.custom_sampler.name={{found!r}} chooses the groups itself, so that the bound would not hold",
        remedy="leave out one of the two",
    ),
    RefusalRow(
        _STRATEGY,
        when=lambda run: (
            needs.STALENESS.values(run) and run.settings.staleness_strategy == "reroll" and run.own_manager
        ),
        why=f"it cancels groups, which {_ROLLOUT}.agent.agent_loop_manager_class={{found!r}} need not be able to",
        remedy="leave the manager out, or set staleness_strategy=mask",
    ),
    *(_row_of_warmup(mode) for mode in TRAINERS if mode != "sync"),
    *needs.STALENESS.rows(),
]


def _is_no_rate(run: RunView) -> bool:
    rate = run.value(_RATE)
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    return rate is not None and not (is_number and 0 <= rate <= _MOST_RATE)


OVER_SAMPLING = [
    RefusalRow(
        _RATE,
        when=_is_no_rate,
        why=f"expected a number from 0 to {_MOST_RATE}, the share of the started samples that is cut",
        remedy="set 0.25, or leave it out",
    ),
    RefusalRow(
        _RATE,
        when=lambda run: run.value(_RATE) and not run.runs_our_server,
        why=f"with {_ROLLOUT}.name={{run.rollout.name!r}} single generations cannot be stopped",
        remedy=f"set it to {ROLLOUT}, or leave over_sample_rate out",
    ),
    needs_our_trainer(_RATE, lambda run: run.value(_RATE), "leave over_sample_rate out"),
    RefusalRow(
        _RATE,
        when=lambda run: run.value(_RATE) and run.own_manager,
        why=f"{_ROLLOUT}.agent.agent_loop_manager_class={{found!r}} does not cut samples",
        remedy="leave it out, or leave over_sample_rate out",
    ),
]
