"""pass@k of a validation: the share of prompts that k samples would solve (`evaluation.estimates.pass_at_k`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from verl_multiturn.evaluation.estimates import pass_at_k
from verl_multiturn.observe.metrics import Stats, earned
from verl_multiturn.rows.reward_numbers import ScoreRange

MOST_PROMPTS = 0.95
"""Share of the prompts that must have k valid conversations, so that pass@k is a figure of all of them."""


def passed_shares(stats: Sequence[Stats], scores: ScoreRange) -> dict[str, float]:
    """Return pass@k of a validation by name: `pass@1`, `pass@2`, `pass@4`, … and that of all samples of a prompt.

    Each is a mean over the prompts that have k valid conversations; an invalid one is not a sample. Long and hard
    conversations are the ones that an outage hits, so prompts that have k may be the easy ones: where fewer than
    `MOST_PROMPTS` of all have k, there is no `pass@k`. `pass@k/prompts` says how many have k, in any case. Where no
    prompt has more than one sample there is nothing.

    Args:
        stats: A dictionary for each conversation, with its `group`, as `observe.metrics.conversations` returns it.
        scores: The range of the rewards of the run's validations so far; those of this one are added.
    """
    scores.add(earned(each) for each in stats)
    groups: dict[str, list[bool | None]] = {}
    for each in stats:
        groups.setdefault(each["group"], []).append(_passes(each, scores))
    most = max(map(len, groups.values()), default=0)
    if most < 2:
        return {}
    valid = [[passed for passed in group if passed is not None] for group in groups.values()]
    shares: dict[str, float] = {}
    for k in sorted({most, *(1 << power for power in range(most.bit_length()))}):
        known = [pass_at_k(len(group), sum(group), k) for group in valid if len(group) >= k]
        if len(known) >= MOST_PROMPTS * len(valid):
            shares[f"pass@{k}"] = math.fsum(known) / len(known)
        shares[f"pass@{k}/prompts"] = len(known)
    return shares


def _passes(stats: Stats, scores: ScoreRange) -> bool | None:
    """Return whether a conversation solved its task; None: it is invalid."""
    score = earned(stats)
    return None if score is None else scores.is_right(score, stats.get("reported", {}).get("acc"))
