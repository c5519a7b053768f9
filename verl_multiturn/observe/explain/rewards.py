"""Rewards that fail, rewards whose parts drown each other, and advantages that contradict the scores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from verl_multiturn.advantages.estimators import is_own_function
from verl_multiturn.observe.explain.facts import ConversationFacts, Facts, setting
from verl_multiturn.observe.explain.finding import Finding, Kind, examples, level, percent
from verl_multiturn.records.read.scores import has_failed, was_late
from verl_multiturn.rows.reward_numbers import are_equal

_OUTCOMES = ("acc", "accuracy", "correct", "compute_score")
"""Numbers that show whether the answer is right, the first that varies."""
_SAME = ("score", "reward", "r_tool")
_FEWEST = 64
_RULES, _DROWNED = 0.9, 0.3
_FAILED_NOTE, _FAILED_ALARM = 0.01, 0.1
_FEWEST_GROUPS = 8
_NOTE, _ALARM = 0.02, 0.1
_AGAINST = -0.1
_OF_CONVERSATIONS = ("gae",)
"""Estimators of verl that compare with a critic, and not with the group; a function of one's own may do so, too."""


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the findings from rewards and advantages."""
    yield from _failures(facts)
    if not facts.training:
        return
    yield from _drowned(facts)
    yield from _contradictions(facts)


def _failures(facts: Facts) -> Iterator[Finding]:
    """Yield the finding from scores of 0 that no answer earned: the reward function broke, or was late."""
    talks = [talk for talk in facts.played if talk.valid and talk.score is not None and talk.parts]
    broke = {talk.request_id: talk for talk in talks if has_failed(talk.parts)}
    late = {talk.request_id: talk for talk in talks if was_late(talk.parts)}
    either = {**broke, **late}
    share = len(either) / max(1, len(talks))
    if not (kind := level(share, _FAILED_NOTE, _FAILED_ALARM)):
        return
    sources = Counter(talk.source for talk in either.values())
    yield Finding(
        "rewards_fail",
        kind,
        f"the reward of {len(either)} conversations ({percent(share)}) broke ({len(broke)}) or was late ({len(late)}): "
        "each scores 0, whatever its answer",
        "find `failed with` or `ran out of time` in the log: the first case has its row, file and line; correct the "
        "function, or raise reward_kwargs.timeout_s, and score a conversation as examples/reward.py does",
        {
            "failed": len(broke),
            "timed_out": len(late),
            "conversations": len(talks),
            "share": round(share, 4),
            "by_source": dict(sources.most_common()),
        },
        examples(either),
        share,
    )


def _drowned(facts: Facts) -> Iterator[Finding]:
    talks = [talk for talk in facts.training if talk.valid and talk.score is not None and talk.parts]
    if not talks:
        yield Finding("reward_drowned", "unknown", "no parts of rewards were recorded, so they cannot be compared")
        return
    if len(talks) < _FEWEST:
        return
    names = [name for name in sorted({name for talk in talks for name in talk.parts}) if name not in _SAME]
    columns = {name: [talk.parts.get(name, 0.0) for talk in talks] for name in names}
    within = {name: _within_groups(talks, values) for name, values in columns.items()}
    scores = _within_groups(talks, [talk.score or 0.0 for talk in talks])
    varies = [name for name in names if within[name].std() > 1e-9]
    outcome = next((name for name in _OUTCOMES if name in varies), None)
    others = [name for name in varies if name != outcome and name not in _OUTCOMES]
    if outcome is None or not others or scores.std() <= 1e-9:
        return
    follows = {name: _correlation(scores, within[name]) for name in (outcome, *others)}
    ruler = max(others, key=lambda name: abs(follows[name]))
    if abs(follows[ruler]) < _RULES or follows[outcome] >= _DROWNED:
        return
    yield Finding(
        "reward_drowned",
        "alarm",
        f"within groups the score follows {ruler!r} (correlation {follows[ruler]:.2f}), and not {outcome!r} "
        f"({follows[outcome]:.2f}): that is what is learned",
        f"a smaller weight for {ruler!r}, or bounds for it, until a right answer is worth more than all of it",
        {
            "correlation_with_score": {name: round(value, 4) for name, value in follows.items()},
            "deviation_within_groups": {name: round(float(within[name].std()), 5) for name in follows},
        },
        examples(talk.request_id for talk in sorted(talks, key=lambda talk: -abs(talk.parts.get(ruler, 0.0)))),
        abs(follows[ruler]) - max(0.0, follows[outcome]),
    )


def _within_groups(talks: Sequence[ConversationFacts], values: Sequence[float]) -> np.ndarray:
    """Return values less their group's mean, the basis of advantages."""
    groups: dict[str, list[int]] = defaultdict(list)
    for at, talk in enumerate(talks):
        groups[talk.uid].append(at)
    found = np.array(values, float)
    for members in groups.values():
        found[members] -= found[members].mean()
    return found


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    scale = float(first.std() * second.std())
    return float((first * second).mean()) / scale if scale > 1e-12 else 0.0


def _contradictions(facts: Facts) -> Iterator[Finding]:
    talks = [talk for talk in facts.training if talk.valid and talk.trained and talk.score is not None]
    if not any(talk.advantage is not None for talk in talks):
        yield Finding(
            "advantages_contradict",
            "unknown",
            "no advantages were recorded, so they cannot be compared with the scores",
        )
        return
    groups: dict[tuple[str, str | None], list[ConversationFacts]] = defaultdict(list)
    for talk in talks:
        for role in talk.advantages.keys() & talk.by_role.keys():
            groups[talk.uid, role].append(talk)
    against: list[list[ConversationFacts]] = []
    compared = 0
    for (_, role), group in groups.items():
        scores = np.array([talk.by_role[role] for talk in group], float)
        if len(group) > 1 and not are_equal(scores.tolist()):
            compared += 1
            advantages = np.array([talk.advantages[role] for talk in group], float)
            if _correlation(scores - scores.mean(), advantages - advantages.mean()) < _AGAINST:
                against.append(group)
    share = len(against) / max(1, compared)
    kind: Kind | None = level(share, _NOTE, _ALARM) if compared >= _FEWEST_GROUPS and len(against) > 1 else None
    if kind is None:
        return
    estimator = str(setting(facts.settings, "algorithm.adv_estimator") or "")
    if estimator in _OF_CONVERSATIONS or is_own_function(estimator):
        kind = "note"
    yield Finding(
        "advantages_contradict",
        kind,
        f"in {len(against)} of {compared} groups ({percent(share)}) conversations with a higher score have a lower "
        "advantage",
        "the estimator gets other scores, other groups or another order than the rewards: look at uid, at code of your "
        "own that changes the batch, and at the estimator",
        {"groups": len(against), "compared": compared, "share": round(share, 4), "estimator": estimator},
        examples(max(group, key=lambda talk: talk.score or 0.0).request_id for group in against),
        share,
    )
