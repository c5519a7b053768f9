"""The estimators that count conversations, as verl calls them: ours, and a function of the run's own.

`advantages/estimators.py` has them. verl gives a registered estimator rewards, masks and uids alone, so a hook first
notes the conversation and the turns of each row:

    known_rows(rows)  →  verl's _compute_advantage  →  rewards of each turn  →  advantages of each turn  →  its tokens

Invariants:
- verl's rewards between the first token of a turn and that of the next one in the row belong to the turn,
  also where a KL penalty was subtracted. So the settings of the rewards that count hold here, too;
- the advantage of a turn goes to the same tokens, if they are trained;
- verl's padding rows have advantages of 0. A row of another agent loop counts as one turn;
- the reward of a whole session lies on the last token of its last row, with roles on that of each role's last row. It
  is not a turn's own (`GroupMember.outcome`);
- a group is the conversations of one prompt in one role. A conversation is a member in each role of its rows, and
  invalid in all of them if it is in one;
- groups, their members and the turns of a member have an order that is the same in every run of the same data: that
  of the data rows (the step that began them, their `index`, their content) and of roles, of the conversations' numbers,
  of the turns' numbers. verl's uids are drawn anew in each run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import register_adv_est

from verl_multiturn.advantages.estimators import ESTIMATORS, Estimator, counts_conversations, load_estimator
from verl_multiturn.advantages.turns import GroupMember
from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.verl_bridge.settings import divides_by_deviation, estimator_of
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

_REST = sys.maxsize
"""The end of the last turn of a row, whose length is not known yet."""
_Place = tuple[int, str]


class _AdvantageRow(NamedTuple):
    uid: str
    conversation: str
    place: _Place
    """Place of the conversation among those of its prompt."""
    valid: bool
    turns: list[Turn]
    """Its turns, each with the response tokens that belong to it. Those of the last one go on to the row's end."""
    role: str | None
    """The speaker of all its turns; None where there are no roles."""
    sample: tuple[int, int, str] = (_REST, _REST, "")
    """Place of its data row, as `queue_rows.py` gives it; those of other agent loops come last."""
    outcome: float | None = None
    """Reward of the whole session for the role, in its last row of a session; None in any other."""
    foreign: float = 0.0
    """Reward on the tokens of the last turn that is not that turn's own."""


class _Known(NamedTuple):
    rows: list[_AdvantageRow | None]
    """Values in the order of the batch; None for padding."""
    estimator: Estimator


_KNOWN: ContextVar[_Known | None] = ContextVar("known_rows", default=None)


@contextmanager
def known_rows(rows: BatchRows, estimator: Estimator) -> Iterator[None]:
    """Let an estimator know the rows of a batch, while the context lasts.

    Args:
        rows: Those of verl's batch, in the order in which verl will hand it to the estimator.
        estimator: The run's estimator.
    """
    known = [None if key in rows.padding else _known_row(key, rows.stats.get(key, {})) for key in rows.keys]
    token = _KNOWN.set(_Known(known, estimator))
    try:
        yield
    finally:
        _KNOWN.reset(token)


def _known_row(key: RowKey, stats: dict[str, Any]) -> _AdvantageRow:
    turns = sorted(map(Turn.of_plain, stats.get("turns") or []), key=lambda turn: turn.start) or [Turn(key.number)]
    turns[0].start = 0
    for turn, following in pairwise(turns):
        turn.end = following.start
    turns[-1].end = _REST
    session = key.session or ""
    place = (int(session) if session.isdecimal() else _REST, session)
    row = _AdvantageRow(key.uid, key.conversation, place, stats.get("valid", True), turns, turns[0].role)
    if "sample" in stats:
        row = row._replace(sample=tuple(stats["sample"]))
    return _with_session(row, stats["session"]) if "session" in stats else row


def _with_session(row: _AdvantageRow, session: dict[str, Any]) -> _AdvantageRow:
    """Return a role's last row of a session with the data that belong to no token of the session.

    The completions that are in no row have no tokens. Their rewards, and the session's, lie on the row's last token.
    """
    role = session.get("role", row.role)
    outside = [Turn(each["turn"], each["reward"], parent=each["parent"], role=role) for each in session["outside"]]
    outcome = session["outcome"] or 0.0
    foreign = outcome + sum(each["reward"] for each in session["outside"])
    return row._replace(turns=[*row.turns, *outside], role=role, outcome=outcome, foreign=foreign)


def _compute(
    name: str,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages of all tokens, `(B, R)`, twice: verl asks for returns, too.

    Args:
        name: Name of the estimator.
        token_level_rewards: Reward of each response token, `(B, R)`.
        response_mask: 1 for each trained token, `(B, R)`.
        others: verl's other arguments of estimators.
    """
    known = _KNOWN.get()
    if known is None or len(known.rows) != len(response_mask):
        raise ConfigError(
            f"algorithm.adv_estimator={name}: only verl's own V1 trainers with the agent loop multiturn_agent call it; "
            "use one of them, or an estimator of verl"
        )
    groups = dict(_groups(known.rows, token_level_rewards))
    shown = {
        label: [GroupMember([turn for _, turn in each.turns], each.valid, each.outcome, each.role) for each in members]
        for label, members in groups.items()
    }
    sessions = {label for label, members in groups.items() if any(member.is_session for member in members)}
    made = known.estimator.of_groups(shown, sessions)
    advantages = torch.zeros_like(response_mask, dtype=torch.float32)
    for label, members in groups.items():
        for member, own in zip(members, made[label], strict=True):
            for (i, turn), value in zip(member.turns, own, strict=True):
                advantages[i, turn.start : turn.end] = value
    advantages = advantages * response_mask
    return advantages, advantages


class _Participant(NamedTuple):
    """A conversation of a batch in one of its roles."""

    conversation: str
    role: str | None
    valid: bool
    outcome: float
    is_session: bool
    turns: list[tuple[int, Turn]]
    """Its turns in the order of their numbers, each with the index of its row."""


def _groups(rows: Sequence[_AdvantageRow | None], rewards: torch.Tensor) -> Iterator[tuple[str, list[_Participant]]]:
    """Yield the name and the conversations of each prompt and role, in the order of their data rows.

    Args:
        rows: The rows of the batch; None for padding.
        rewards: Reward of each response token, `(B, R)`.
    """
    groups: dict[tuple[Any, str, str], dict[_Place, list[tuple[int, _AdvantageRow]]]] = defaultdict(dict)
    broken = {row.conversation for row in rows if row is not None and not row.valid}
    samples: dict[str, Any] = {}
    for row in rows:
        if row is not None:  # one uid has one data row; a conversation of it without stats has no place
            samples[row.uid] = min(row.sample, samples.get(row.uid, row.sample))
    for i, row in enumerate(rows):
        if row is not None:
            groups[samples[row.uid], row.uid, row.role or ""].setdefault(row.place, []).append((i, row))
    for (_, uid, role), members in sorted(groups.items(), key=lambda each: each[0]):
        label = f"{uid} ({role})" if role else uid
        yield label, [_member(own, rewards, broken) for _, own in sorted(members.items())]


def _member(rows: list[tuple[int, _AdvantageRow]], rewards: torch.Tensor, broken: Collection[str]) -> _Participant:
    turns = [(i, turn) for i, row in rows for turn in _earning(row, rewards[i])]
    _, first = rows[0]
    outcomes = [row.outcome for _, row in rows if row.outcome is not None]
    return _Participant(
        first.conversation,
        first.role,
        first.conversation not in broken,
        outcomes[0] if outcomes else 0.0,
        bool(outcomes),
        sorted(turns, key=lambda each: each[1].number),
    )


def _earning(row: _AdvantageRow, rewards: torch.Tensor) -> list[Turn]:
    """Return the turns of a row with the rewards of their tokens; those without tokens keep their reward."""
    earned = [float(rewards[turn.start : turn.end].sum()) for turn in row.turns]
    return [
        replace(turn, reward=own - (row.foreign if turn.end == _REST else 0.0)) if turn.sampled else turn
        for turn, own in zip(row.turns, earned, strict=True)
    ]


def load_run_estimator(config: DictConfig, settings: MultiTurnSettings) -> Estimator | None:
    """Return the estimator of a run, and register it with verl in this process; None for one of verl's.

    `hooks.py` calls it once, in the process that trains.

    Args:
        config: verl's whole configuration.
        settings: Our settings.

    Raises:
        ConfigError: The run's own function cannot be imported, or does not take its options.
    """
    name = estimator_of(config)
    if not counts_conversations(name):
        return None
    _register(name)
    return load_estimator(name, settings, divides_by_deviation(config))


def register_estimators() -> None:
    """Register our estimators with verl in this process."""
    for name in ESTIMATORS:
        _register(name)


def _register(name: str) -> None:
    # One object for each name: verl refuses a second function under a name that it knows.
    register_adv_est(name)(_FUNCTIONS.setdefault(name, partial(_compute, name)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {}
