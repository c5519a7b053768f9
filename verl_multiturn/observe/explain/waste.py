"""Work that was done and not trained on: tokens that were too old or in no row, groups thrown away, rows never used."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from verl_multiturn.observe.explain.courses import FEWEST, course
from verl_multiturn.observe.explain.facts import ConversationFacts, Facts, optional
from verl_multiturn.observe.explain.finding import Finding, examples, level, percent
from verl_multiturn.records.schema import SPARED

_NOTE, _ALARM = 0.01, 0.1
_REROLLED = 0.2
_AGE_NOTE, _AGE_ALARM = 2.0, 8.0
_ROWS = 16
_WANTED = ("too_old", "not_selected", "not_trained_role")
"""Causes of tokens in no row that are nobody's loss here: `not_selected` answers, and those of roles that are context,
were not to be trained; those that are too old are in `stale`."""
_IN_FLIGHT = 2
"""Conversations that began in so many last steps may yet be trained in an asynchronous run."""


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the losses."""
    if not facts.training:
        return
    yield from _stale(facts)
    yield from _groups(facts)
    yield from _in_no_row(facts)
    yield from _rows(facts)


def _stale(facts: Facts) -> Iterator[Finding]:
    if not any(talk.joined for talk in facts.training):
        if facts.mode != "sync":
            yield Finding("stale", "unknown", "no join was recorded, so it is not known which tokens were too old")
        return
    found = course(facts.training, lambda talk: (talk.too_old, talk.sampled))
    ages = _metric(facts, "rollout/async/age/mean")
    mean_age = sum(ages) / len(ages) if ages else 0.0
    by_share = found.kind(_NOTE, _ALARM, is_service=True)
    kind = by_share if by_share == "alarm" else level(mean_age, _AGE_NOTE, _AGE_ALARM) or by_share
    if kind is None:
        return
    yield Finding(
        "stale",
        kind,
        f"{percent(found.total)} of the sampled tokens were left out because their weights were too old"
        + (f"; trained tokens are {mean_age:.1f} weight versions old on average" if ages else ""),
        "a larger max_staleness, fewer prompts under way, or shorter conversations: slow ones grow old",
        {
            "too_old_share": round(found.total, 4),
            "share_by_window": found.shares,
            "age_mean": round(mean_age, 3),
            "age_max": max(_metric(facts, "rollout/async/age/max"), default=0.0),
        },
        examples(talk.request_id for talk in sorted(facts.training, key=lambda talk: -talk.too_old) if talk.too_old),
        max(found.total, found.last),
    )


def _groups(facts: Facts) -> Iterator[Finding]:
    """Yield groups that were begun anew, thrown away or failed, of those that the steps took or threw away."""
    if not facts.steps:
        if facts.mode != "sync":
            for symptom in ("rerolled", "evicted", "groups_failed"):
                yield Finding(
                    symptom, "unknown", "steps.jsonl was not recorded, so it is not known which groups were lost"
                )
        return
    trained = facts.trained_groups
    ids: dict[str, list[str]] = defaultdict(list)
    for talk in facts.training:
        ids[talk.uid].append(talk.request_id)
    for symptom, entry, alarm, said, remedy in (
        (
            "rerolled",
            "rerolled",
            _REROLLED,
            "were cancelled and begun anew for their age",
            "a larger max_staleness, or the strategy `mask`; look at what makes these conversations slow",
        ),
        (
            "evicted",
            "evicted",
            _ALARM,
            "were thrown away for their age: their prompts are lost",
            "the strategy `wait`, `mask` or `reroll` in the place of dropping, or a larger max_staleness",
        ),
        (
            "groups_failed",
            "failed",
            _ALARM,
            "failed",
            "search train.log for Error: a conversation of each raised, which is a mistake of an author",
        ),
    ):
        lost = list(dict.fromkeys(uid for step in facts.steps for uid in step.get(entry) or ()))
        share = len(lost) / max(1, len(lost) + trained)
        kind = level(share, _NOTE, alarm) if len(lost) + trained >= FEWEST else None
        if kind is None:
            continue
        by_step = {str(step["step"]): len(step.get(entry) or ()) for step in facts.steps if step.get(entry)}
        yield Finding(
            symptom,
            kind,
            f"{len(lost)} groups, {percent(share)}, {said}",
            remedy,
            {"groups": len(lost), "trained_groups": trained, "share": round(share, 4), "by_step": by_step},
            examples(request_id for uid in lost for request_id in ids.get(uid, [])[:1]) or examples(lost),
            share,
        )


def _in_no_row(facts: Facts) -> Iterator[Finding]:
    valid = [talk for talk in facts.training if talk.valid]
    causes: Counter[str] = Counter()
    for talk in valid:
        causes.update(talk.unplaced)
    # Those that are too old are in `stale`.
    lost = {cause: count for cause, count in causes.items() if cause != "too_old"}

    def unwanted(talk: ConversationFacts) -> int:
        return sum(count for cause, count in talk.unplaced.items() if cause not in _WANTED)

    found = course(valid, lambda talk: (unwanted(talk), talk.generated))
    kind = found.kind(0.02, _ALARM, is_service=False)
    if kind is None and sum(lost.values()) >= _ALARM * max(1, sum(found.of)):
        kind = "note"
    if kind is None:
        return
    most = max(lost, key=lambda cause: lost[cause])
    share = sum(lost.values()) / max(1, sum(found.of))
    yield Finding(
        "in_no_row",
        kind,
        f"{percent(share)} of the tokens that the engine returned are in no row and are not trained on, most of them "
        f"{most}",
        {
            "undelivered": "the agent's client gave up before the answer came: longer timeouts in the agent, no "
            "retries",
            "dropped_row": "the agent's prompts do not continue each other: a larger proxy.max_rows, or an agent that "
            "appends to its messages; with a trained user, a larger data.max_prompt_length",
            "not_selected": "nothing, if proxy.select leaves them out on purpose",
            "not_trained_role": "nothing, if proxy.train leaves their role out on purpose",
        }.get(most, "look at the generations of the examples"),
        {"tokens": dict(lost), "share": round(share, 4), "share_by_window": found.shares},
        examples(talk.request_id for talk in sorted(valid, key=unwanted, reverse=True) if sum(talk.unplaced.values())),
        share,
    )


def _rows(facts: Facts) -> Iterator[Finding]:
    if not any(talk.joined for talk in facts.training):
        yield Finding(
            "rows_unused", "unknown", "no join was recorded, so it is not known which data rows were trained on"
        )
        return
    left_out = {
        uid for step in facts.steps for key in ("evicted", "rerolled", "filtered", "failed", "discarded")
        for uid in step.get(key) or ()
    }  # fmt: skip
    last = max(talk.step for talk in facts.training if talk.joined)
    by_row: dict[str, list[ConversationFacts]] = defaultdict(list)
    for talk in facts.training:
        in_flight = not talk.joined and talk.began_step > last - _IN_FLIGHT and facts.mode != "sync"
        if talk.uid not in left_out and not in_flight and talk.untrained not in SPARED:
            by_row[talk.row].append(talk)
    unused = {row: talks for row, talks in by_row.items() if not any(talk.trained for talk in talks)}
    share = len(unused) / max(1, len(by_row))
    kind = level(share, 0.02, _ALARM) if len(by_row) >= _ROWS and len(unused) > 1 else None
    if kind is None:
        return
    causes = Counter(_cause(talks) for talks in unused.values())
    yield Finding(
        "rows_unused",
        kind,
        f"{len(unused)} of {len(by_row)} data rows ({percent(share)}) were played and never trained on, most because "
        f"they were {causes.most_common(1)[0][0]}",
        "look at these rows: a prompt that is too long, a tool that never answers it, or a void_turn_pattern that fits "
        "all answers",
        {
            "rows": len(by_row),
            "unused": len(unused),
            "share": round(share, 4),
            "by_cause": dict(causes),
            "names": sorted(unused)[:10],
        },
        examples(talks[-1].request_id for talks in unused.values()),
        share,
    )


def _cause(talks: Sequence[ConversationFacts]) -> str:
    causes = Counter(
        talk.untrained
        or ("not joined" if not talk.joined else "invalid" if not talk.valid else "without a trained token")
        for talk in talks
    )
    return causes.most_common(1)[0][0]


def _metric(facts: Facts, name: str) -> list[float]:
    values = (optional((step.get("metrics") or {}).get(name)) for step in facts.steps)
    return [value for value in values if value is not None]
