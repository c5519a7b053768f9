"""`values_of_turns`: the parts of a reward that lie on turns; `ends_of`: where the turns' texts end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl_multiturn.errors import RewardContractError
from verl_multiturn.rewards.score import TURN_VALUES, turn_values_of
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.transcript import spoken_turns


class TurnEnd(NamedTuple):
    """The end of a turn in a conversation's rows."""

    row: int
    """Number of the row that has it."""
    position: int
    """Its last token, in the row's response."""
    role: str | None
    """The speaker; None where there are no roles."""


def ends_of(outcome: Outcome) -> list[TurnEnd | None]:
    """Return where each of the `assistant_texts` ends; None: no row that is trained has its tokens.

    Args:
        outcome: A conversation that is over.
    """
    return [
        TurnEnd(turn.place, turn.end - 1, turn.role)
        if outcome.valid and turn.sampled and isinstance(turn.place, int)
        else None
        for turn in spoken_turns(outcome)
    ]


def values_of_turns(
    report: Mapping[str, Any], ends: Sequence[TurnEnd | None], role: str | None
) -> list[tuple[TurnEnd, float]]:
    """Return the parts of a conversation's reward that lie on turns of a role, and not on the last token of all.

    Args:
        report: The report of the reward function.
        ends: Those of the conversation, from `ends_of`.
        role: The role; None where there are no roles.

    Raises:
        RewardContractError: The report has turn values, and not one for each text.
    """
    values = turn_values_of(report)
    if values is None:
        return []
    if len(values) != len(ends):
        raise RewardContractError(
            f"the reward function returned {TURN_VALUES} {report[TURN_VALUES]!r}; expected a number for each of the "
            f"{len(ends)} assistant_texts"
        )
    found = zip(ends, values, strict=True)
    return [(end, value) for end, value in found if end is not None and end.role == role and value]
