"""Refusals about the policy loss `mt_gspo`, and about ratios of whole conversations.

A loss sees the rows of one micro-batch, without ids. So a ratio of a conversation is to be had where it is one row.
"""

from __future__ import annotations

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.names import RECORDED_LOOP, ROW_LOSS, TURN_LOSS
from verl_multiturn.verl_bridge.settings import may_have_several_rows
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow, set_beside
from verl_multiturn.verl_bridge.startup.view import RunView

_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
_LEVEL = f"{PATH}.ratio_level"
_REJECTION = "algorithm.rollout_correction.rollout_rs"


def _has_row_ratios(run: RunView) -> bool:
    """Return whether the ratio of the run's policy loss is to be that of a whole conversation."""
    return run.settings.ratio_level == "conversation"


def _rejects_tokens(run: RunView) -> bool:
    """Return whether verl's rejection takes single tokens out of the mask; it may have several kinds."""
    kinds = str(run.value(_REJECTION) or "").split(",")
    return run.policy_loss == TURN_LOSS and any(kind.strip().startswith("token_") for kind in kinds)


POLICY_LOSSES: list[Check] = [
    *set_beside(
        [_LEVEL],
        when=lambda run: run.policy_loss not in (TURN_LOSS, ROW_LOSS),
        why=f"it has no effect with {_LOSS}={{run.policy_loss!r}}",
        remedy=f"set that to {TURN_LOSS}, or leave it out",
    ),
    RefusalRow(
        (_LEVEL, _LOSS),
        when=lambda run: _has_row_ratios(run) and RECORDED_LOOP in run.loops,
        why=f"a recorded conversation or session may have several rows, and the agent loop {RECORDED_LOOP} takes them "
        "as they are",
        remedy=f"leave the first out with {_LOSS}={TURN_LOSS}, which has a ratio for each turn",
    ),
    RefusalRow(
        (_LEVEL, _LOSS),
        when=lambda run: _has_row_ratios(run) and may_have_several_rows(run.config, run.settings),
        why="conversations have several rows here, and a policy loss sees the rows of one micro-batch without knowing "
        "whose they are",
        remedy=f"leave the first out with {_LOSS}={TURN_LOSS}, which has a ratio for each turn, or set "
        "{PATH}.context.mode=append, train the assistant alone and, with the agent loop {PROXY_LOOP}, set "
        "{PATH}.proxy.max_rows=1",
    ),
    RefusalRow(
        (_LOSS, _REJECTION),
        when=_rejects_tokens,
        why="rejected tokens would cut a turn into parts with ratios of their own",
        remedy="reject whole rows (seq_mean_k1 and others), or leave the second out",
    ),
]
