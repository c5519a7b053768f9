"""Steps that waited for one conversation: by how many seconds, in which part, and by which tool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from verl_multiturn.observe.explain.facts import ConversationFacts, Facts
from verl_multiturn.observe.explain.finding import Finding, Kind, examples, percent
from verl_multiturn.observe.explain.lateness import Straggler, late_of_step

_NOTE, _ALARM = 0.1, 0.25
"""Part of all steps' seconds."""
_ONE_STEP = 2.0
"""A single step alarms where it waited this many times the median step."""
_REMEDIES = {
    "engine": "the engine's log at that time, and its load; over-sampling leaves the slowest out "
    "(`docs/train/oversampling.md`)",
    "queue": "more slots (limits.concurrency of the tool's YAML entry), or a faster service",
    "opponent": "more devices for the opponents' servers (`proxy.opponent_devices`), smaller models, or fewer of them",
    "tool": "a shorter limits.timeout_s, a faster tool, or an asynchronous trainer (`docs/train/async.md`)",
    "interaction": "a faster user or environment, or a shorter timeout_s",
    "reward": "a faster reward function, or a time limit in it; more reward workers",
}


def find(facts: Facts) -> Iterator[Finding]:
    """Yield which parts made steps late."""
    if not facts.training:
        return
    if not facts.timeline:
        yield Finding("stragglers", "unknown", "no timelines were recorded, so it is not known what steps waited for")
        return
    by_step: dict[int, list[ConversationFacts]] = defaultdict(list)
    for talk in facts.training:
        by_step[talk.began_step].append(talk)
    late = [one for step, talks in sorted(by_step.items()) if (one := late_of_step(step, talks))]
    if not late:
        return
    recorded = {int(step["step"]): float(step["ended"]) - float(step["began"]) for step in facts.steps}
    steps_s = {
        step: recorded.get(step) or max(talk.ended for talk in talks) - min(talk.began for talk in talks)
        for step, talks in by_step.items()
    }
    by_part: dict[str, list[Straggler]] = defaultdict(list)
    for each in late:
        by_part[each.part].append(each)
    waits = facts.mode in ("", "sync")
    for part, found in by_part.items():
        if finding := _of_part(part, found, steps_s, waits):
            yield finding


def _of_part(part: str, found: list[Straggler], steps_s: dict[int, float], waits: bool) -> Finding | None:
    total = sum(steps_s.values())
    lost = sum(max(0.0, each.part_s) for each in found)
    slow = sum(max(0.0, each.part_s - each.by_length) for each in found)
    worst = max(found, key=lambda each: each.part_s - each.by_length)
    worst_slow = worst.part_s - worst.by_length
    usual = median(steps_s.values())
    kind: Kind | None = "note" if lost >= _NOTE * total or worst_slow >= usual else None
    if waits and (slow >= _ALARM * total or worst_slow >= _ONE_STEP * usual):
        kind = "alarm"
    if kind is None:
        return None
    said = f"{part} made {len(found)} steps late by {lost:.1f} s in all, {percent(lost / total)} of their time; "
    said += f"most in step {worst.step}, by {worst.part_s:.1f} s"
    remedy = _REMEDIES.get(
        part.split()[0], "look at the timeline of the examples (`verl-multiturn convert --perfetto`)"
    )
    if lost - slow > slow:
        said += "; mostly by longer answers"
        remedy = "the longest answers decide: a shorter max_response_length, over-sampling, or an asynchronous trainer"
    longest = sorted(found, key=lambda each: -each.part_s)
    return Finding(
        "stragglers",
        kind,
        said,
        remedy,
        {
            "part": part,
            "seconds": round(lost, 3),
            "seconds_by_length": round(lost - slow, 3),
            "share_of_steps": round(lost / total, 4),
            "steps": len(found),
            "worst": [
                {"step": each.step, "request": each.request_id, "seconds": round(each.part_s, 3)}
                for each in longest[:5]
            ],
        },
        examples(each.request_id for each in longest),
        min(1.0, slow / total),
    )
