"""Agents behind the endpoint that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from verl_multiturn.observe.explain.courses import course
from verl_multiturn.observe.explain.facts import ConversationFacts, Facts
from verl_multiturn.observe.explain.finding import Finding, examples, percent
from verl_multiturn.rollout.limits import StopReason

_FAILED = frozenset({"raised", "timed_out", "stuck", "failed"})
_STOPS = (StopReason.AGENT_ERROR, StopReason.AGENT_FAILED, StopReason.NO_COMPLETION)
_REMEDY = (
    "`problem` in the sessions of the examples; `verl-multiturn serve --agent` plays the agent against a scripted model"
)
_OF_OPPONENTS = "let a trained role begin, or the game last longer: only opponents spoke in these sessions"
_NOTE, _ALARM = 0.02, 0.1


def find(facts: Facts) -> Iterator[Finding]:
    """Yield how agents failed."""
    sessions = [talk for talk in facts.played if talk.agent_end is not None]
    if not sessions:
        return
    found = course(sessions, lambda talk: (int(_failed(talk)), 1))
    kind = found.kind(_NOTE, _ALARM, is_service=True)
    if kind is None:
        return
    failed = [talk for talk in sessions if _failed(talk)]
    ends = Counter(talk.stop if talk.agent_end == "returned" else talk.agent_end or talk.stop for talk in failed)
    most = ends.most_common(1)[0][0]
    yield Finding(
        "agents_fail",
        kind,
        f"{percent(found.total)} of the agents' sessions failed, most: {most}",
        _OF_OPPONENTS if most == StopReason.NO_COMPLETION else _REMEDY,
        {"share": round(found.total, 4), "share_by_window": found.shares, "by_end": dict(ends)},
        examples(talk.request_id for talk in reversed(failed)),
        max(found.total, found.last),
    )


def _failed(talk: ConversationFacts) -> bool:
    return talk.agent_end in _FAILED or talk.stop in _STOPS
