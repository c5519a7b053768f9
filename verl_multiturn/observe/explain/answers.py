"""Behaviour of a model that does not solve its tasks: one answer for many rows, and guess after guess."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from verl_multiturn.observe.explain.courses import FEWEST, windows
from verl_multiturn.observe.explain.facts import ConversationFacts, Facts
from verl_multiturn.observe.explain.finding import Finding, examples, percent

_ROWS = 8
"""Fewest data rows for which an answer is evidence."""
_ALARM, _NOTE = 0.5, 0.3
_BEYOND_ALARM, _BEYOND_NOTE = 0.25, 0.15
"""How much more frequent an answer is than the most frequent ground truth: a task may have two right answers."""
_ANSWERS = 0.01
"""Share of answers that equal their ground truth, from which on last lines count as answers."""
_GUESSES, _AGAIN = 4, 3
_GUESSING, _GROWN = 0.3, 0.2


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the findings from the answers and the attempts."""
    yield from _one_answer(facts)
    yield from _guesses(facts)


def _one_answer(facts: Facts) -> Iterator[Finding]:
    talks = [talk for talk in facts.played if talk.answer and not talk.has_interaction and talk.agent_end is None]
    if not talks:
        return
    if not any(talk.truth for talk in talks):
        yield Finding(
            "one_answer", "unknown", "no ground truths were recorded, so answers cannot be compared with them"
        )
        return
    with_truth = [talk for talk in talks if talk.truth]
    if sum(talk.answer == talk.truth for talk in with_truth) < _ANSWERS * len(with_truth):
        with_truth = [talk for talk in with_truth if talk.marked]
    last = windows(with_truth)[-1] if with_truth else []
    by_row: dict[str, list[ConversationFacts]] = defaultdict(list)
    for talk in last:
        by_row[talk.row].append(talk)
    if len(by_row) < _ROWS:
        return
    answers: Counter[str] = Counter()
    for row in by_row.values():
        for answer, count in Counter(talk.answer for talk in row).items():
            answers[answer] += count / len(row)  # type: ignore[assignment]
    answer, rows = answers.most_common(1)[0]
    share = rows / len(by_row)
    truth = Counter(row[0].truth for row in by_row.values()).most_common(1)[0][1] / len(by_row)
    if share >= _ALARM and share - truth >= _BEYOND_ALARM:
        kind = "alarm"
    elif share >= _NOTE and share - truth >= _BEYOND_NOTE:
        kind = "note"
    else:
        return
    yield Finding(
        "one_answer",
        "alarm" if kind == "alarm" else "note",
        f"{answer!r} is the answer to {percent(share)} of {len(by_row)} rows at the end of the run, and is right for "
        f"at most {percent(truth)}",
        "look at the reward of these conversations: something pays for the answer, or nothing pays for another one; "
        "more temperature, a KL term, or a reward that refuses it",
        {
            "answer": answer,
            "share": round(share, 4),
            "share_of_most_frequent_truth": round(truth, 4),
            "rows": len(by_row),
        },
        examples(talk.request_id for talk in reversed(last) if talk.answer == answer),
        share,
    )


def _guesses(facts: Facts) -> Iterator[Finding]:
    parts = windows(facts.played)
    if not parts or min(map(len, parts)) < FEWEST:
        return
    guessed = [_share(part, guesses=True) for part in parts]
    again = [_share(part, guesses=False) for part in parts]
    last, growth = guessed[-1], guessed[-1] - min(guessed)
    if last < _GUESSING and again[-1] < _GUESSING:
        return
    alarm = (last >= _GUESSING and growth >= _GROWN) or (again[-1] >= _GUESSING)
    hit = [talk for talk in reversed(parts[-1]) if talk.attempts >= _GUESSES or talk.identical >= _AGAIN]
    what = (
        f"make {_AGAIN} or more calls that are the same"
        if again[-1] > last
        else f"make {_GUESSES} or more attempts that differ in nothing but numbers"
    )
    yield Finding(
        "guesses",
        "alarm" if alarm else "note",
        f"{percent(max(last, again[-1]))} of the conversations at the end of the run {what}",
        "a try must cost something: fewer calls (max_tool_calls) or turns, a reward that falls with each, or a tool "
        "that does not say whether a guess is right",
        {
            "share_by_window": guessed,
            "share_of_repeated_calls_by_window": again,
            "most_attempts": max((talk.attempts for talk in hit), default=0),
        },
        examples(talk.request_id for talk in hit),
        max(last, again[-1]),
    )


def _share(talks: Sequence[ConversationFacts], guesses: bool) -> float:
    hits = sum(talk.attempts >= _GUESSES if guesses else talk.identical >= _AGAIN for talk in talks)
    return round(hits / len(talks), 4)
