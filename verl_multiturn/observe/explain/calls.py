"""Calls that could not be read, that failed, came late, waited, or were no longer made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from verl_multiturn.config import PATH
from verl_multiturn.observe.explain.courses import FEWEST, course, windows
from verl_multiturn.observe.explain.facts import ConversationFacts, Facts, setting
from verl_multiturn.observe.explain.finding import Finding, examples, percent
from verl_multiturn.tools.running.results import CallStatus

_NOTE, _ALARM = 0.02, 0.1
_WAITS = 0.25
"""Share of its time that a conversation waited for slots, from which on it counts as waiting."""
_VANISHED, _FEWER = 0.25, 0.5
_OFTEN = 0.3


@dataclass(frozen=True)
class _Bad:
    symptom: str
    statuses: tuple[CallStatus, ...]
    said: str
    remedy: str
    is_service: bool


_KINDS = (
    _Bad(
        "calls_malformed",
        (CallStatus.MALFORMED,),
        "could not be read",
        "compare multi_turn.format with the model's own (`verl-multiturn doctor --model`), or warm-start the model "
        "with calls",
        is_service=False,
    ),
    _Bad(
        "calls_unknown",
        (CallStatus.UNKNOWN_TOOL,),
        "named a tool that the conversation did not have",
        "name the tools in the prompt as the YAML does, or give the row the tool that it asks for",
        is_service=False,
    ),
    _Bad(
        "calls_fail",
        (CallStatus.ERROR,),
        "failed in the tool",
        "read the answers of the examples: the tool or its service is ill; `verl-multiturn check-tool`",
        is_service=True,
    ),
    _Bad(
        "calls_late",
        (CallStatus.TIMEOUT,),
        "were not answered in time",
        "a faster tool, or a longer limits.timeout_s",
        is_service=True,
    ),
    _Bad(
        "calls_refused",
        (CallStatus.BAD_ARGUMENTS, CallStatus.OVER_LIMIT),
        "were refused: their arguments do not fit the schema, or they are beyond a limit",
        "say in the schema's descriptions what an argument looks like, or raise max_parallel_calls and max_tool_calls",
        is_service=False,
    ),
)


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the findings from the calls."""
    if not any(talk.has_tools for talk in facts.played):
        return
    for bad in _KINDS:
        yield from _bad(facts, bad)
    yield from _waiting(facts)
    yield from _vanishing(facts)


def _bad(facts: Facts, bad: _Bad) -> Iterator[Finding]:
    def count(talk: ConversationFacts) -> tuple[int, int]:
        return sum(call.status in bad.statuses for call in talk.calls), len(talk.calls)

    found = course(facts.played, count)
    kind = found.kind(_NOTE, _ALARM, bad.is_service)
    if kind is None:
        return
    hit = [talk for talk in facts.played if count(talk)[0]]
    tools = Counter(call.tool for talk in hit for call in talk.calls if call.status in bad.statuses)
    yield Finding(
        bad.symptom,
        kind,
        f"{percent(found.last)} of the calls at the end of the run ({percent(found.total)} of all) {bad.said}",
        bad.remedy,
        {
            "share": round(found.total, 4),
            "share_by_window": found.shares,
            "calls": sum(found.of),
            "by_tool": dict(tools.most_common(5)),
        },
        examples(talk.request_id for talk in reversed(hit)),
        max(found.last, found.total),
    )


def _waiting(facts: Facts) -> Iterator[Finding]:
    def count(talk: ConversationFacts) -> tuple[int, int]:
        waited = max((call.queue_s for call in talk.calls), default=0.0)
        overloaded = any(call.status == CallStatus.OVERLOADED for call in talk.calls)
        return int(overloaded or waited > _WAITS * max(talk.ended - talk.began, 1e-3)), int(bool(talk.calls))

    found = course(facts.played, count)
    kind = found.kind(_ALARM, _OFTEN, is_service=True)
    if kind is None:
        return
    hit = [talk for talk in facts.played if count(talk)[0]]
    waits: Counter[str] = Counter()
    for talk in hit:
        for call in talk.calls:
            waits[call.tool] += call.queue_s  # type: ignore[assignment]
    name, seconds = waits.most_common(1)[0]
    yield Finding(
        "calls_wait",
        kind,
        f"{percent(found.total)} of the conversations with calls wait for a slot for a quarter of their time or more, "
        f"most for {name!r}",
        f"more slots for {name!r} (limits.concurrency of its YAML entry), or a faster service",
        {
            "share": round(found.total, 4),
            "share_by_window": found.shares,
            "tool": name,
            "waited_s": round(seconds, 3),
            "overloaded": sum(call.status == CallStatus.OVERLOADED for talk in hit for call in talk.calls),
        },
        examples(talk.request_id for talk in sorted(hit, key=lambda talk: -sum(call.queue_s for call in talk.calls))),
        found.total,
    )


def _vanishing(facts: Facts) -> Iterator[Finding]:
    parts = windows(talk for talk in facts.training if talk.has_tools and talk.agent_end is None)
    if len(parts) < 2 or min(map(len, parts)) < FEWEST:
        return
    shares = [sum(bool(talk.calls) for talk in part) / len(part) for part in parts]
    before, last = max(shares[:-1]), shares[-1]
    if before < _OFTEN or last >= _FEWER * before:
        return
    wanted = setting(facts.settings, f"{PATH}.otc.form") not in (None, "none")
    yield Finding(
        "calls_vanish",
        "alarm" if last < _VANISHED * before and not wanted else "note",
        f"conversations that call a tool fell from {percent(before)} to {percent(last)}",
        "the model does without the tool, which happens where only the answer pays: harder rows, or a bonus for use; "
        "compare with a run without tools",
        {"share_by_window": [round(share, 4) for share in shares]},
        examples(talk.request_id for talk in reversed(parts[-1]) if not talk.calls),
        before - last,
    )
