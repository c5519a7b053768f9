"""Wrong answers that try to earn from the shaper `otc`, which scales the scores of right answers by their calls.

The rows go through our trainer's own `OtcScores`; only TransferQueue is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.long.rewards.hacks import Tried
from verl_multiturn.config import OtcSettings

NAN, INF = float("nan"), float("inf")
Row = tuple[float | None, float | None, int, bool]
"""Score, reported `acc` (None: not reported), executed calls, and whether the conversation is valid."""
# Form of the row of each wrong answer, by kind.
WRONG: dict[str, list[Row]] = {
    "no calls": [(0.0, 0.0, 0, True), (0.0, None, 0, True)],
    "many calls": [(0.0, 0.0, 50, True), (0.0, 0.0, 10**6, True)],
    "as few calls as a right answer": [(0.0, 0.0, 2, True)],
    "a score for the format": [(0.1, 0.0, 0, True), (0.25, 0.0, 1, True)],
    "a credit for calls": [(0.2, 0.0, 4, True), (0.2, 0.0, 1, True)],
    "a share of the tests": [(0.5, 0.0, 0, True), (0.99, 0.0, 3, True)],
    "a score below zero": [(-1.0, 0.0, 30, True), (-1.0, None, 30, True), (-0.25, 0.0, 9, True)],
    "an accuracy below zero": [(0.5, -1.0, 0, True), (0.5, -1e-9, 0, True)],
    "no number as accuracy": [(0.5, NAN, 0, True), (0.5, -INF, 1, True)],
    "an invalid conversation": [(1.0, 1.0, 0, False), (1.0, None, 0, False)],
    "no score": [(None, 1.0, 0, True), (None, None, 0, True)],
    "a score that is nearly nothing": [(1e-30, 0.0, 0, True), (1e-300, 0.0, 0, True)],
}
OK = "ok"


def _stats(row: Row) -> dict[str, Any]:
    from verl_multiturn.observe.metrics import CallStats

    score, acc, calls, valid = row
    call = [OK if name == "status" else 0 for name in CallStats._fields]
    reported = {} if acc is None else {"acc": acc}
    return {"score": score, "reported": reported, "calls": [call] * calls, "valid": valid}


def scaled(rows: Sequence[Row], **settings: Any) -> list[float]:
    """Return the scores of a group as `OtcScores` leaves them."""
    import torch

    from verl_multiturn.verl_bridge.trainer.rows import otc

    stats: dict[Any, Any] = {key: _stats(row) for key, row in enumerate(rows)}
    scores = {key: torch.tensor([0.0, row[0] or 0.0], dtype=torch.float64) for key, row in enumerate(rows)}

    def get(keys: Sequence[int], where: str, names: Sequence[str]) -> Mapping[str, Any]:
        nested = SimpleNamespace(unbind=lambda: [scores[key] for key in keys])
        return {"uid": SimpleNamespace(tolist=lambda: ["u"] * len(keys)), "rm_scores": nested}

    def put(keys: Sequence[int], where: str, rm_scores: Sequence[Any]) -> None:
        scores.update(zip(keys, rm_scores, strict=True))

    found: Any = SimpleNamespace(stats=stats, partition_id="train")
    with patch.multiple(otc, get_columns=get, put_columns=put, nested=list):
        otc.OtcScores(OtcSettings(**settings)).scale(found)
    return [float(scores[key].sum()) for key in range(len(rows))]


async def otc(quick: bool) -> AsyncIterator[Tried]:
    """Scale every wrong answer beside a right one with two calls, in both forms of the paper."""
    right: Row = (1.0, 1.0, 2, True)
    for form, alpha in (("ppo", 1.0), ("grpo", 1.0), ("grpo", 2.0)):
        for kind, rows in WRONG.items():
            for row in rows:
                earned, beside = scaled([row, right], form=form, alpha=alpha)
                case = f"{form}, alpha {alpha:g}: {row}"
                yield Tried("otc", kind, case, earned, row[0] or 0.0)
                yield Tried("otc", "control", f"{form}, alpha {alpha:g}: {right}", beside, control=True)
        fewer, more = scaled([(1.0, 1.0, 1, True), right], form=form, alpha=alpha)
        yield Tried("otc", "control", f"{form}, alpha {alpha:g}: fewer calls", fewer, more, control=True)
