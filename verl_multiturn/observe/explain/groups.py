"""Groups whose conversations all earned the same: they teach nothing, since their advantages are 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl_multiturn.observe.explain.facts import ConversationFacts, Facts
from verl_multiturn.observe.explain.finding import Finding, Kind, percent
from verl_multiturn.rows.reward_numbers import have_signal

_FEWEST = 8
_ALARM = 0.5
_NOTE = 0.2


@dataclass(frozen=True)
class _GroupFacts:
    step: int
    talks: Sequence[ConversationFacts]
    equal: bool
    right: bool

    @property
    def wrong(self) -> bool:
        return self.equal and not self.right


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the findings from groups that are all wrong or all right."""
    scored = [talk for talk in facts.training if talk.score is not None and talk.valid]
    if not scored:
        if facts.training:
            for symptom in ("groups_wrong", "groups_right"):
                yield Finding(symptom, "unknown", "no scores were recorded, so it is not known whether groups differ")
        return
    groups = groups_of(scored)
    if len(groups) < _FEWEST:
        return
    steps = sorted({group.step for group in groups})
    late = [group for group in groups if group.step >= steps[len(steps) // 2]]
    yield from _wrong(groups, late)
    early, end = _first(groups, steps), [group for group in groups if group.step >= steps[len(steps) * 3 // 4]]
    resumed = bool(facts.runs and facts.runs[0].get("resumed_from"))
    yield from _right(groups, early, end, resumed)


def groups_of(talks: Sequence[ConversationFacts]) -> list[_GroupFacts]:
    """Return the groups of two or more scored conversations; one is right where each of them is."""
    by_uid: dict[str, list[ConversationFacts]] = defaultdict(list)
    for talk in talks:
        by_uid[talk.uid].append(talk)
    found = []
    for group in by_uid.values():
        own = [talk.by_role for talk in group if talk.score is not None]
        if len(own) < 2:
            continue
        right = all(talk.right for talk in group)
        found.append(_GroupFacts(max(talk.step for talk in group), group, not have_signal(own), right))
    return found


def _first(groups: Sequence[_GroupFacts], steps: Sequence[int]) -> list[_GroupFacts]:
    """Return the groups of the run's first tenth, and of so many steps that there are enough."""
    for count in range(max(1, len(steps) // 10), len(steps) + 1):
        found = [group for group in groups if group.step <= steps[count - 1]]
        if len(found) >= _FEWEST:
            return found
    return list(groups)


def _wrong(groups: Sequence[_GroupFacts], late: Sequence[_GroupFacts]) -> Iterator[Finding]:
    share, all_of = _share(late, "wrong"), _share(groups, "wrong")
    kind: Kind | None = "alarm" if share >= _ALARM else "note" if max(share, all_of) >= _NOTE else None
    if kind is None:
        return
    wrong = [group for group in groups if group.wrong]
    yield Finding(
        "groups_wrong",
        kind,
        f"{percent(share)} of the groups in the second half of the run ({percent(all_of)} of all) are all wrong, so "
        "that nothing is learned from them",
        "give the model tasks that it solves sometimes: easier rows, more samples a prompt (rollout.n), a warm start, "
        "or a reward for a part of the way; algorithm.filter_groups.enable draws others in their place",
        {"share_second_half": round(share, 4), "share": round(all_of, 4), "groups": len(groups), "equal": len(wrong)},
        tuple(group.talks[0].request_id for group in wrong[-3:]),
        share,
    )


def _right(
    groups: Sequence[_GroupFacts], early: Sequence[_GroupFacts], end: Sequence[_GroupFacts], resumed: bool
) -> Iterator[Finding]:
    begin, share = _share(early, "equal_right"), _share(end, "equal_right")
    if begin >= _ALARM and not resumed:
        kind: Kind = "alarm"
        said = f"{percent(begin)} of the groups are all right from the first steps on: there was nothing to learn"
    elif max(share, begin) >= _NOTE:
        kind = "note"
        said = f"{percent(share)} of the groups in the last quarter of the run are all right: little is left to learn"
    else:
        return
    right = [group for group in groups if group.equal and group.right]
    yield Finding(
        "groups_right",
        kind,
        said,
        "take harder rows, or end the run here; algorithm.filter_groups.enable draws others in the place of such "
        "groups",
        {
            "share_first_steps": round(begin, 4),
            "share_last_quarter": round(share, 4),
            "groups": len(groups),
            "equal": len(right),
        },
        tuple(group.talks[0].request_id for group in right[-3:]),
        max(begin, share),
    )


def _share(groups: Sequence[_GroupFacts], what: str) -> float:
    hits = sum(group.equal and group.right == (what == "equal_right") for group in groups)
    return hits / max(1, len(groups))
