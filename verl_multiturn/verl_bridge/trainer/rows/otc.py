"""The score of a correct answer is scaled by its tool calls: `custom.multiturn.otc`.

Invariants:
- only the part of the score that `compute_score` gave a correct answer changes. The tools' own rewards in the score
  (`tool_reward.mode=add`) stay, and so do the scores of wrong answers, invalid conversations, rows of other agent loops
  and padding rows;
- it happens only in training, after verl has chosen a batch and before it computes the advantages. Each update of a
  step has its own batch, made of whole groups, and each row is in one batch.
"""

from __future__ import annotations

from collections import defaultdict

from verl_multiturn.advantages.otc import r_tools
from verl_multiturn.config import OtcSettings
from verl_multiturn.observe.metrics import executed_calls, is_correct
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.compat.row_store import get_columns, nested, put_columns
from verl_multiturn.verl_bridge.trainer.report import PREFIX
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows


class OtcScores:
    """The scores of correct answers, as Optimal Tool Calls scale them.

    Their metric is `rollout/otc/r_tool/mean`, the mean over the correct answers of a step.
    """

    def __init__(self, settings: OtcSettings) -> None:
        self._settings = settings
        self._r_tools: list[float] = []
        self.factors: dict[RowKey, float] = {}
        """Factors of the scores of the last batch's correct answers."""

    def begin_step(self) -> None:
        """Forget the step before."""
        self._r_tools = []

    def metrics(self) -> dict[str, float]:
        """Return the step's metric; nothing for a step without a scaled score."""
        return {f"{PREFIX}otc/r_tool/mean": sum(self._r_tools) / len(self._r_tools)} if self._r_tools else {}

    def scale(self, rows: BatchRows) -> None:
        """Scale the scores of a batch's correct answers (column `rm_scores`); with the form `none` do nothing.

        Args:
            rows: Those of verl's batch.
        """
        settings, self.factors = self._settings, {}
        if settings.form == "none":
            return
        correct = {key: stats for key, stats in rows.stats.items() if is_correct(stats)}
        if not correct:
            return
        keys, where = list(correct), rows.partition_id
        data = get_columns(keys, where, ["uid", "rm_scores"])
        groups: dict[str, list[int]] = defaultdict(list)
        for i, uid in enumerate(data.get("uid").tolist()):
            groups[str(uid)].append(i)
        calls = [executed_calls(stats) for stats in correct.values()]
        r_tool_of: dict[int, float] = {}
        for group in groups.values():
            r_tool_of.update(zip(group, r_tools([calls[i] for i in group], settings.form, settings.c), strict=True))
        self.factors = {key: settings.alpha * r_tool_of[i] for i, key in enumerate(keys)}
        scores = [row.clone() for row in data.get("rm_scores").unbind()]
        for row, (key, stats) in zip(scores, correct.items(), strict=True):
            # verl puts the score of `compute_score` on the last token.
            row[-1] += (self.factors[key] - 1) * stats["score"]
        put_columns(keys, where, rm_scores=nested(scores))
        self._r_tools += r_tool_of.values()
