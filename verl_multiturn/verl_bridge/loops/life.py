"""`follow`: begins the life of the conversation of verl's row (`rollout/life.py`).

Our worker does so. A loop that runs without our worker does so itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_multiturn.observe.metrics import numbers_of
from verl_multiturn.rewards.score import verdicts_of
from verl_multiturn.rollout.life import Life, LifeListener, current, live
from verl_multiturn.verl_bridge.loops.output import CertifiedOutput


@contextmanager
def follow(
    row: Mapping[str, Any],
    *listeners: LifeListener | None,
    name: str | None = None,
    validation: bool = False,
    rerolled_from: str | None = None,
) -> Iterator[Life]:
    """Let the conversation of a row live until the block ends, in whose task it runs.

    Yields its life, which the worker completes (status, score). Where a conversation lives here already, that is the
    one which the worker began.

    Args:
        row: verl's row, with `uid`, `session_id`, `index`, `global_steps` and `agent_name` as far as it has them.
        listeners: Those that hear of it.
        name: Its request id; None: a new one.
        validation: Whether it belongs to a validation.
        rerolled_from: Uid of the group in whose place its group was begun.
    """
    if (outer := current()) is not None:
        yield outer
        return
    life = Life(
        id=name or uuid4().hex,
        group=str(row.get("uid", "")),
        number=int(row.get("session_id") or 0),
        rerolled_from=rerolled_from,
        loop=str(row.get("agent_name", "")),
        step=int(row.get("global_steps") or 0),
        validation=validation,
        row=row,
    )
    with live(life, *listeners):
        yield life


def note_score(outputs: AgentLoopOutput | list[AgentLoopOutput]) -> None:
    """Note the reward of the running conversation, once its rows are written.

    Args:
        outputs: The return value of the agent loop's `run`.
    """
    life, last = current(), outputs[-1] if isinstance(outputs, list) and outputs else outputs
    if life is not None and isinstance(last, CertifiedOutput):
        life.score = last.total() if last.is_scored else None
        report = last.extra_fields.get("reward_extra_info") or {}
        life.reported, life.verdicts = numbers_of(report), verdicts_of(report)
