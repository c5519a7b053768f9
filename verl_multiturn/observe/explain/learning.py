"""Whether what the training rewards is learned: the validation beside the score, and the entropy beside the gain."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from verl_multiturn.observe.explain.courses import windows
from verl_multiturn.observe.explain.facts import ConversationFacts, Facts, optional
from verl_multiturn.observe.explain.finding import Finding, examples, percent

_ROSE = 0.1
"""Part of the scores' range by which the training score has to have risen."""
_FOLLOWED = 0.4
"""Part of that rise by which a validation has to have risen, too."""
_BEHIND = 0.15
"""Part of the range by which it may stay behind the training all the same."""
_FELL = 0.3
"""The entropy fell if it is at most this part of its early mean,"""
_FELL_NATS = 0.02
"""and this much less."""
_GAINED = 0.05
_HIGH = 0.9


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the findings from validation and entropy."""
    if facts.training:
        yield from _validation(facts)
        yield from _entropy(facts)


def _validation(facts: Facts) -> Iterator[Finding]:
    validated: dict[int, list[ConversationFacts]] = defaultdict(list)
    for talk in facts.validation:
        if talk.score is not None:
            validated[talk.step].append(talk)
    trained = [talk for talk in facts.training if talk.score is not None and talk.valid]
    if len(validated) < 2 or not trained:
        yield Finding(
            "validation_behind",
            "unknown",
            f"{len(validated)} scored validations were recorded, two are needed to see whether they follow the score",
            "trainer.test_freq and trainer.val_before_train",
        )
        return
    sources = {talk.source for talk in trained} & {talk.source for talk in facts.validation}
    comparable = bool(sources)
    if comparable:
        trained = [talk for talk in trained if talk.source in sources]
        validated = {step: [talk for talk in talks if talk.source in sources] for step, talks in validated.items()}
    means = {step: _mean(talks) for step, talks in sorted(validated.items()) if talks}
    parts = windows(trained)
    if len(parts) < 2 or len(means) < 2:
        return
    scores = [talk.score for talk in [*trained, *facts.validation] if talk.score is not None]
    span = (max(scores) - min(scores)) or 1.0
    first, last = _mean(parts[0]), _mean(parts[-1])
    rise = last - first
    noise = 2 * math.hypot(_error(parts[0]), _error(parts[-1]))
    begin, *_, end = means.values()
    best = max(means.values())
    uncertain = 2 * _error(validated[max(means)], single=True)
    stayed = comparable and end - begin + uncertain < _FOLLOWED * rise and end < last - _BEHIND * span
    fell = best - end - uncertain > _ROSE * span
    if rise < max(noise, _ROSE * span) or not (stayed or fell):
        return
    steps = sorted(means)
    yield Finding(
        "validation_behind",
        "alarm",
        f"the training score rose from {first:.3f} to {last:.3f}, and the validation's went from {begin:.3f} to "
        f"{end:.3f} (best {best:.3f})",
        "read conversations of the last validation beside trained ones: the reward is being gamed, the training rows "
        "are learned by heart, or the validation samples otherwise than the training",
        {
            "score_by_window": [round(_mean(part), 4) for part in parts],
            "validation": {str(step): round(value, 4) for step, value in means.items()},
        },
        examples(talk.request_id for talk in sorted(validated[steps[-1]], key=lambda talk: talk.score or 0.0)),
        min(1.0, (last - end) / span) if comparable else (best - end) / span,
    )


def _entropy(facts: Facts) -> Iterator[Finding]:
    by_step = {step: sums.absolute / sums.count for step, sums in facts.entropy.items() if sums.count}
    if not by_step:
        metrics = ((step.get("step"), (step.get("metrics") or {}).get("actor/entropy")) for step in facts.steps)
        by_step = {
            int(step): value for step, raw in metrics if step is not None and (value := optional(raw)) is not None
        }
    if len(by_step) < 2:
        yield Finding(
            "entropy",
            "unknown",
            "no entropies of two steps were recorded: verl computes them with old_log_probs, which bypass mode leaves "
            "out",
        )
        return
    steps = sorted(by_step)
    quarter = max(1, len(steps) // 4)
    first = sum(by_step[step] for step in steps[:quarter]) / quarter
    last = sum(by_step[step] for step in steps[-quarter:]) / quarter
    if last > _FELL * first or first - last < _FELL_NATS:
        return
    scored = [talk for talk in facts.training if talk.score is not None and talk.valid]
    parts = windows(scored)
    if len(parts) < 2:
        said = f"the entropy fell from {first:.3f} to {last:.3f}; without scores of two steps the gain is unknown"
        yield Finding("entropy", "unknown", said)
        return
    scores = [talk.score for talk in scored if talk.score is not None]
    low, span = min(scores), (max(scores) - min(scores)) or 1.0
    means = [_mean(part) for part in parts]
    gained = max(means) - means[0]
    noise = 2.5 * math.hypot(_error(parts[0]), _error(parts[-1]))  # the best of three windows is high by chance
    is_high = (means[-1] - low) / span >= _HIGH and max(scores) > low
    alarm = gained < max(noise, _GAINED * span) and not is_high
    fall = 1 - last / first
    yield Finding(
        "entropy",
        "alarm" if alarm else "note",
        f"the entropy fell from {by_step[steps[0]]:.3f} to {by_step[steps[-1]]:.3f} nats a token, while the score went "
        f"from {means[0]:.3f} to {means[-1]:.3f}",
        "the policy narrows without learning: a lower learning rate, a KL or entropy term, a higher clip_ratio_high, "
        "more temperature"
        if alarm
        else "nothing, as long as the score rises; more temperature where it stands still",
        {
            "entropy_first": round(first, 5),
            "entropy_last": round(last, 5),
            "fell": percent(fall),
            "score_by_window": [round(mean, 4) for mean in means],
        },
        examples(talk.request_id for talk in reversed(parts[-1])),
        fall,
    )


def _mean(talks: Sequence[ConversationFacts]) -> float:
    scores = [talk.score for talk in talks if talk.score is not None]
    return math.fsum(scores) / max(1, len(scores))


def _error(talks: Sequence[ConversationFacts], single: bool = False) -> float:
    """Return the standard error of the mean score; conversations of one group count as one, unless `single`."""
    groups: dict[str, list[float]] = defaultdict(list)
    for talk in talks:
        if talk.score is not None:
            groups[talk.request_id if single else talk.uid].append(talk.score)
    means = [sum(group) / len(group) for group in groups.values()]
    if len(means) < 2:
        return math.inf
    middle = sum(means) / len(means)
    return math.sqrt(sum((mean - middle) ** 2 for mean in means) / (len(means) - 1) / len(means))
