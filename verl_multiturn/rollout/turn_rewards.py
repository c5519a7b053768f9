"""The turns of a conversation in its response, and the positions to which rewards belong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from verl_multiturn.rollout.outcome import Outcome

Scores = list[tuple[int, float]]
"""Rewards of a row, each with its position in the response. Every position is a sampled token. Example: `[(11, 0.5)]`.
"""


class Span(NamedTuple):
    """The sampled tokens of a turn."""

    row: int
    """Index of the row of the conversation."""
    start: int
    """Position of the first token in the row's response."""
    end: int
    """Position after the last token."""


def tool_scores(outcome: Outcome, weight: float = 1.0) -> list[Scores]:
    """Return the tools' rewards for each row of a conversation, weighted.

    A step reward goes to the last token of the turn that made the call. The sum of the tools' `calc_reward` goes to the
    last sampled token. Rewards of zero are left out. An invalid conversation has no rewards.

    Args:
        outcome: A conversation that is over.
        weight: Factor of every reward.
    """
    steps = [(turn, call.reward) for turn, call in zip(outcome.call_turns, outcome.calls, strict=True)]
    return _placed(outcome, steps, sum(outcome.calc_rewards.values()), weight)


def interaction_scores(outcome: Outcome, weight: float = 1.0) -> list[Scores]:
    """Return the interaction's rewards for each row of a conversation, weighted.

    The reward of a turn goes to the turn's last token, the score of the conversation to the last sampled token. Rewards
    of zero are left out. An invalid conversation has no rewards.

    Args:
        outcome: A conversation that is over.
        weight: Factor of every reward.
    """
    steps = [(reply.turn, reply.reward or 0.0) for reply in outcome.replies]
    return _placed(outcome, steps, outcome.score, weight)


def _placed(outcome: Outcome, steps: list[tuple[int, float]], last: float, weight: float) -> list[Scores]:
    placed: list[Scores] = [[] for _ in outcome.rows]
    rewards = [(turn, reward) for turn, reward in steps if reward]
    if not outcome.valid or not (rewards or last):
        return placed
    spans = turn_spans(outcome)
    for turn, reward in [*rewards, *([(max(spans), last)] if last else [])]:
        placed[spans[turn].row].append((spans[turn].end - 1, weight * reward))
    return placed


def turn_spans(outcome: Outcome) -> dict[int, Span]:
    """Return the sampled tokens of each assistant turn of a conversation, by the turn's number."""
    spans: dict[int, Span] = {}
    for index, row in enumerate(outcome.rows):
        written = row.trajectory
        for position, (turn, sampled) in enumerate(zip(written.turn_ids, written.mask, strict=True)):
            if sampled:
                number, place = row.number(turn), position - written.prompt_length
                spans[number] = Span(index, spans[number].start if number in spans else place, place + 1)
    return spans


def turns_of(outcome: Outcome) -> list[list[dict[str, Any]]]:
    """Return for each row what estimators of advantages need to know of its assistant turns, in plain types.

    Returns:
        A dictionary for each turn of each row: `turn` (its number in the conversation), `parent` (number of the turn
        that it continues; None where it begins anew), `start` and `end` (its sampled tokens in the row's response, half
        open), `after` (how many turns come after it in the row; in a
        session, in the longest row that holds it), `reward` (its own, that of its calls and of the
        interaction's answer together; None without any), and `state` (digest of the state in which the model acted in
        this turn; None for a summary, and where the environment did not say).
    """
    rewards: dict[int, float] = {}
    steps = [(turn, call.reward) for turn, call in zip(outcome.call_turns, outcome.calls, strict=True) if call.reward]
    steps += [(reply.turn, reply.reward) for reply in outcome.replies if reply.reward is not None]
    steps += outcome.completion_rewards.items()
    for turn, reward in steps:
        rewards[turn] = rewards.get(turn, 0.0) + reward
    states = {0: outcome.first_state}
    for reply in outcome.replies:
        following = reply.turn + 1
        states[following + 1 if following in outcome.summaries else following] = reply.state
    turns: list[list[dict[str, Any]]] = [[] for _ in outcome.rows]
    for turn, (row, start, end) in turn_spans(outcome).items():
        parent = outcome.parents[turn] if outcome.parents else turn - 1 if turn else None
        known = {"reward": rewards.get(turn), "state": states.get(turn)}
        turns[row].append({"turn": turn, "parent": parent, "start": start, "end": end, **known})
    for own in turns:
        own.sort(key=lambda turn: turn["start"])
    longest = _longest_ways(outcome.parents, [own[-1]["turn"] for own in turns if own])
    for own in turns:
        for place, each in enumerate(own):
            each["after"] = longest[each["turn"]] if outcome.parents else len(own) - 1 - place
    return turns


def _longest_ways(parents: Sequence[int | None], ends: Iterable[int]) -> dict[int, int]:
    """Return for each completion of a session how many follow it in the longest row that holds it.

    The row in which it is trained says less: which of two branches comes first follows from the order of arrival.

    Args:
        parents: For each completion the number of the one that it continues; empty for a conversation.
        ends: Numbers of the completions with which rows end.
    """
    longest: dict[int, int] = {}
    for end in ends if parents else ():
        steps, at = 0, parents[end]
        longest.setdefault(end, 0)
        while at is not None:
            steps += 1
            longest[at] = max(longest.get(at, 0), steps)
            at = parents[at]
    return longest
