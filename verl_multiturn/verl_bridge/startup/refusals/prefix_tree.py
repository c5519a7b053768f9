"""Refusals of `prefix_tree: on` with settings under which common prefixes cannot be computed once.

With `auto` nothing is refused: the training engine computes row by row, and logs why
(`verl_bridge/prefix_tree/support.py`, which also finds the model's reasons).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.names import VENDOR_VARIABLE
from verl_multiturn.verl_bridge.settings import OF_ROWS
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

_KEY = f"{PATH}.prefix_tree"
_MODEL, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
_REMEDY = f"set {_KEY}=auto, or "


def _row(key: str, when: Callable[[RunView], Any], why: str, remedy: str) -> RefusalRow:
    return RefusalRow((_KEY, key), when, why, _REMEDY + remedy)


def is_on(run: RunView) -> bool:
    """Return whether the rows apply to a run: it ends where common prefixes cannot be computed once."""
    return run.settings.prefix_tree == "on"


def _splits(key: str) -> Callable[[RunView], bool]:
    return lambda run: (run.value(key) or 1) > 1


_SPLITS = [
    _row(key, _splits(key), "a common prefix cannot be split among ranks", f"{key}=1")
    for key in (f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
]

PREFIX_TREE: list[Check] = [
    _row(
        f"{_ACTOR}.strategy",
        lambda run: not run.is_fsdp,
        "common prefixes are computed once in verl's FSDP engine alone",
        f"{_ACTOR}.strategy=fsdp2",
    ),
    *_SPLITS,
    *(
        _row(
            f"{_MODEL}.{name}",
            lambda run, name=name: run.value(f"{_MODEL}.{name}"),  # type: ignore[misc]
            "these kernels take each row by itself",
            f"{_MODEL}.{name}=False",
        )
        for name in ("use_fused_kernels", "use_liger")
    ),
    _row(
        _LOSS,
        lambda run: run.policy_loss not in OF_ROWS,
        "such a loss may depend on the rows of a micro-batch, which are others then",
        f"{_LOSS}=vanilla",
    ),
    RefusalRow(
        _KEY,
        when=lambda run: run.engine_vendor,
        why=f"{VENDOR_VARIABLE} chooses another training engine, {{run.engine_vendor!r}}",
        remedy=f"unset {VENDOR_VARIABLE}, or set {_KEY}=off",
    ),
]
