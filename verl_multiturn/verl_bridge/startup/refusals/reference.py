"""Refusals of `reference_reset` in runs whose reference cannot get the actor's parameters."""

from __future__ import annotations

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.settings import ADAPTER_RANKS
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, needs_our_trainer
from verl_multiturn.verl_bridge.startup.view import RunView

_KEY = f"{PATH}.reference_reset"
_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"
_STRATEGY = f"{_ACTOR}.strategy"
_APART = "actor_rollout_ref.hybrid_engine"


def is_on(run: RunView) -> bool:
    """Return whether the rows apply to a run: it resets its reference."""
    return run.settings.reference_reset.is_on


_SAME = "a rank of a run with reference_reset would hold other parts of the reference than of the actor"


def _differ(actor: str, reference: str) -> RefusalRow:
    """Return the row of a setting that decides how parameters are divided, and differs between actor and reference."""
    return RefusalRow(
        (actor, reference),
        when=lambda run: run.value(actor) != run.value(reference),
        why=_SAME,
        remedy="give both one value, or leave out reference_reset",
    )


def _round(actor: str, reference: str) -> RefusalRow:
    """Return the warning of a precision that differs between actor and reference."""
    return RefusalRow(
        (actor, reference),
        when=lambda run: run.value(actor) != run.value(reference),
        why="after a reset (reference_reset) the divergence is not 0, but that of rounding",
        remedy="give both one value",
        is_refusal=False,
    )


def _adapter(key: str) -> RefusalRow:
    return RefusalRow(
        key,
        when=lambda run: run.value(key),
        why="reference_reset has no parameters to set: the reference of an adapter is the model without it",
        remedy="train without an adapter, or leave out reference_reset",
    )


def _both(name: str) -> tuple[str, str]:
    return f"{_ACTOR}.fsdp_config.{name}", f"{_REF}.fsdp_config.{name}"


REFERENCE: list[Check] = [
    RefusalRow(
        _KEY,
        when=lambda run: not run.has_reference,
        why="the run compares the actor with no reference",
        remedy=f"set {_ACTOR}.use_kl_loss=True or algorithm.use_kl_in_reward=True, or leave it out",
        given=_KEY,
    ),
    needs_our_trainer(_KEY, lambda run: True, "leave it out"),
    RefusalRow(
        _STRATEGY,
        when=lambda run: run.value(_STRATEGY) not in ("fsdp", "fsdp2"),
        why="reference_reset is for FSDP, whose ranks hold the same parts of actor and reference",
        remedy=f"set {_STRATEGY}=fsdp2, or leave out reference_reset",
    ),
    _differ(_STRATEGY, f"{_REF}.strategy"),
    *map(_adapter, (*ADAPTER_RANKS, f"{_MODEL}.lora_adapter_path")),
    RefusalRow(
        _APART,
        when=lambda run: run.our_trainer == "separate_async" and run.value(_APART) is False,
        why="reference_reset needs actor and reference in one worker, and the reference then has its own",
        remedy=f"set {_APART}=True, or leave out reference_reset",
    ),
    *(_differ(*_both(name)) for name in ("fsdp_size", "wrap_policy", "use_orig_params")),
    *(_round(*_both(name)) for name in ("model_dtype", "mixed_precision", "dtype")),
]
