"""Conversations that a limit cut, invalid ones, those that raised, and those that left no record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from verl_multiturn.observe.explain.courses import course
from verl_multiturn.observe.explain.facts import Facts
from verl_multiturn.observe.explain.finding import Finding, examples, percent
from verl_multiturn.rollout.limits import StopReason

_CUT = {
    StopReason.RESPONSE_LENGTH: "a longer data.max_response_length, or shorter answers of tools (observation_length)",
    StopReason.TURN_LENGTH: "a longer turn_length",
    StopReason.MAX_ASSISTANT_TURNS: "more turns (max_assistant_turns), or turns_reminder",
    StopReason.MAX_USER_TURNS: "more turns (max_user_turns), or turns_reminder",
    StopReason.MAX_TOOL_CALLS: "more calls (max_tool_calls), or turns_reminder and a prompt that names the limit",
    StopReason.WALL_CLOCK: "faster tools, or a longer request_timeout_s",
}
_OF_TURNS = (StopReason.MAX_ASSISTANT_TURNS, StopReason.MAX_USER_TURNS, StopReason.MAX_TOOL_CALLS)
_NOTE, _ALARM = 0.02, 0.1
_ALARM_TURNS = 0.25
"""An episode may end with its turns. So more of them have to."""
_RAISED = 0.01
_INVALID = {
    StopReason.PROMPT_TOO_LONG: "a longer data.max_prompt_length, or leave such rows out (`verl-multiturn validate`)",
    StopReason.ENGINE_ERROR: "the engine's log in train.log, and its memory",
    StopReason.ENVIRONMENT_ERROR: "the interaction's errors in the records; `verl-multiturn check-interaction`",
    StopReason.OUTAGE: "the service that the records name under `outages`",
    StopReason.UNJUDGED: "`problem` in the sessions: a grader that was lost, an image that is missing, a wrong row",
}


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the findings from limits and invalid conversations."""
    yield from _cuts(facts)
    yield from _invalid(facts)
    yield from _raised(facts)
    yield from _unrecorded(facts)


def _cuts(facts: Facts) -> Iterator[Finding]:
    for reason, remedy in _CUT.items():
        found = course(facts.played, lambda talk, reason=reason: (int(talk.stop == reason), 1))  # type: ignore[misc]
        kind = found.kind(_NOTE, _ALARM_TURNS if reason in _OF_TURNS else _ALARM, is_service=False)
        if kind is None:
            continue
        cut = [talk for talk in facts.played if talk.stop == reason]
        scores = [talk.score for talk in cut if talk.score is not None]
        others = [talk.score for talk in facts.played if talk.stop != reason and talk.score is not None]
        evidence = {"reason": str(reason), "share": round(found.total, 4), "share_by_window": found.shares}
        if scores and others:
            evidence |= {
                "score_mean": round(sum(scores) / len(scores), 4),
                "score_mean_others": round(sum(others) / len(others), 4),
            }
        yield Finding(
            "cut",
            kind,
            f"{percent(found.last)} of the conversations at the end of the run ({percent(found.total)} of all) were "
            f"cut by {reason}",
            remedy,
            evidence,
            examples(talk.request_id for talk in reversed(cut)),
            found.last,
        )


def _invalid(facts: Facts) -> Iterator[Finding]:
    talks = [talk for talk in facts.played if talk.agent_end is None]  # those of agents are in agents.py
    found = course(talks, lambda talk: (int(not talk.valid), 1))
    kind = found.kind(_NOTE, _ALARM, is_service=True)
    if kind is None:
        return
    invalid = [talk for talk in talks if not talk.valid]
    reasons = Counter(talk.stop for talk in invalid)
    most = reasons.most_common(1)[0][0]
    yield Finding(
        "invalid",
        kind,
        f"{percent(found.total)} of the conversations are invalid and were not trained on, most by {most}",
        next((remedy for reason, remedy in _INVALID.items() if reason == most), "read their `error` in the records"),
        {"share": round(found.total, 4), "share_by_window": found.shares, "by_reason": dict(reasons)},
        examples(talk.request_id for talk in reversed(invalid) if talk.stop == most),
        found.total,
    )


def _raised(facts: Facts) -> Iterator[Finding]:
    raised = list(dict.fromkeys(facts.ends.get("raise") or ()))
    # One whose reward function raised has ended before: it counts once.
    over = {each for event in ("raise", "end", "drop") for each in facts.ends.get(event) or ()}
    share = len(raised) / max(1, len(over))
    if not raised:
        return
    yield Finding(
        "raised",
        "alarm" if share >= _RAISED else "note",
        f"{len(raised)} conversations ({percent(share)}) raised, and are in no batch",
        "search train.log for Error: it is a mistake of an author, in a tool, a reward function, an agent or a setting",
        {"raised": len(raised), "share": round(share, 4)},
        examples(raised),
        share,
    )


def _unrecorded(facts: Facts) -> Iterator[Finding]:
    dropped, ended = len(facts.ends.get("drop") or ()), len(facts.ends.get("end") or ())
    if dropped:
        yield Finding(
            "unrecorded",
            "unknown",
            f"{dropped} of {dropped + ended} conversations left no record (disk full or too slow): all shares are of "
            "the others",
            "a faster or larger disk for record_dir, or record_share",
            {"dropped": dropped, "recorded": ended},
            examples(facts.ends["drop"]),
            dropped / (dropped + ended),
        )
