"""Drift: how far the trainer's log-probabilities are from the engine's, turn by turn.

Only sampled tokens have both. Tokens of older weights differ because the policy has moved, which is not a fault: where
a step has tokens of several weight versions, those of the newest count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from verl_multiturn.observe.explain.facts import Drift, Facts
from verl_multiturn.observe.explain.finding import Finding, Kind, examples

_FEWEST = 64
"""Fewest tokens of a turn."""
_NOTE, _ALARM = 0.02, 0.1
"""Mean |difference| in nats a token. In bfloat16 about 0.005 to 0.02 is usual, in float32 1e-6."""
_TIMES = 5.0
"""A later turn alarms from `_NOTE` on where it differs so many times as much as the first."""


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the findings from the differences by turn."""
    if not facts.training:
        return
    if not facts.drift:
        yield Finding(
            "drift",
            "unknown",
            "no old_log_probs were recorded (bypass mode, or no join), so the trainer cannot be compared with the "
            "engine",
        )
        return
    if not any(sums.absolute for sums in facts.drift.values()):
        yield Finding(
            "drift",
            "unknown",
            "the trainer's log-probabilities are the engine's own (bypass mode), so they cannot be compared",
        )
        return
    newest: dict[int, int] = {}
    for step, _turn, version in facts.drift:
        newest[step] = max(version, newest.get(step, version))
    by_turn: dict[int, Drift] = defaultdict(Drift)
    by_step: dict[int, Drift] = defaultdict(Drift)
    for (step, turn, version), sums in facts.drift.items():
        if version == newest[step]:
            for total in (by_turn[turn], by_step[step]):
                total.count += sums.count
                total.absolute += sums.absolute
                total.signed += sums.signed
    means = {turn: sums.absolute / sums.count for turn, sums in sorted(by_turn.items()) if sums.count >= _FEWEST}
    if not means:
        return
    first, worst = means[min(means)], max(means, key=lambda turn: means[turn])
    kind: Kind | None = "note" if means[worst] >= _NOTE else None
    if means[worst] >= _ALARM or (kind and means[worst] >= _TIMES * first):
        kind = "alarm"
    if kind is None:
        return
    where = "in all turns" if first >= means[worst] / 2 else f"from turn {_since(means)} on"
    yield Finding(
        "drift",
        kind,
        f"trainer and engine differ by {means[worst]:.3g} nats a token in turn {worst} (turn {min(means)}: "
        f"{first:.3g}), {where}",
        "the trainer computes another model, or other tokens, than the engine: the same dtype and attention on both "
        "sides, weights that arrive (`verl-multiturn doctor --gpu`), and the template (`verl-multiturn verify`)",
        {
            "mean_abs_by_turn": {str(turn): round(mean, 8) for turn, mean in means.items()},
            "mean_by_turn": {str(turn): round(by_turn[turn].signed / by_turn[turn].count, 8) for turn in means},
            "mean_abs_by_step": {
                str(step): round(sums.absolute / sums.count, 8) for step, sums in sorted(by_step.items()) if sums.count
            },
        },
        examples(talk.request_id for talk in sorted(facts.training, key=lambda talk: -talk.drift)),
        min(1.0, means[worst]),
    )


def _since(means: dict[int, float]) -> int:
    """Return the first turn with at least half of the worst turn's difference."""
    return next(turn for turn in sorted(means) if means[turn] >= max(means.values()) / 2)
