"""`follow`: follows a conversation from its beginning to its end, whatever ends it, for its record and its trace.

    worker  `with follow(row, …) as followed:` ──▶ the conversation's task ──▶ loop  `note`, `known`: what became of it
    worker  how it ended, its reward ──▶ Recorder ──thread──▶ records, lines      Tracer ──thread──▶ backend

The worker begins to follow a conversation. A loop that runs without our worker does so itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_multiturn.describe import describe
from verl_multiturn.observe.metrics import numbers_of
from verl_multiturn.observe.traces import Followed
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.verl_bridge.loops.certified_output import CertifiedOutput

_followed: ContextVar[Followed | None] = ContextVar("followed", default=None)


class Listener(Protocol):
    """What is told of conversations that are followed."""

    def begun(self, followed: Followed) -> None:
        """Take note of a conversation that begins."""

    def over(self, followed: Followed) -> None:
        """Take note of a conversation that is over, whatever ended it."""


@contextmanager
def follow(
    row: Mapping[str, Any],
    *listeners: Listener | None,
    name: str | None = None,
    validation: bool = False,
    rerolled_from: str | None = None,
) -> Iterator[Followed | None]:
    """Follow a conversation while the context lasts, in whose task it runs.

    Yields what is known of it, which the worker completes (status, score). Where the conversation is followed already,
    that is what the worker made; without listeners it is None.

    Args:
        row: verl's row, with `uid`, `session_id`, `index`, `global_steps` and `agent_name` as far as it has them.
        listeners: Who is told of it.
        name: Its request id; None: a new one.
        validation: Whether it belongs to a validation.
        rerolled_from: Uid of the group in whose place its group was begun.
    """
    outer, told = _followed.get(), [listener for listener in listeners if listener is not None]
    if outer is not None or not told:
        yield outer
        return
    followed = Followed(
        uid=str(row.get("uid", "")),
        session_id=int(row.get("session_id") or 0),
        sample_index=row.get("index"),
        step=int(row.get("global_steps") or 0),
        validate=validation,
        experiment_name=None,
        agent_name=str(row.get("agent_name", "")),
        began=time.time(),
        request_id=name or uuid4().hex,
        rerolled_from=rerolled_from,
    )
    for listener in told:
        listener.begun(followed)
    token = _followed.set(followed)
    try:
        with followed.timeline.kept():
            yield followed
    except asyncio.CancelledError:
        followed.status = "cut" if followed.status == "cut" else "cancelled"
        raise
    except Exception as error:  # it is noted, and goes on
        followed.status, followed.error = "error", describe(error)
        raise
    finally:
        _followed.reset(token)
        followed.ended = followed.ended or time.time()
        for listener in told:
            listener.over(followed)


def followed() -> Followed | None:
    """Return what is known of the running conversation; None where nobody follows it."""
    return _followed.get()


def request_id() -> str:
    """Return the request id of the running conversation, a new one where nobody follows it."""
    found = _followed.get()
    return uuid4().hex if found is None else found.request_id


def note(outcome: Outcome) -> None:
    """Note the running conversation's outcome; a loop calls it before the outcome is complete, or after."""
    if (found := _followed.get()) is not None:
        found.outcome = outcome


def note_score(outputs: AgentLoopOutput | list[AgentLoopOutput]) -> None:
    """Note the reward of the running conversation, once its rows are written.

    Args:
        outputs: What the agent loop's `run` returned.
    """
    found, last = _followed.get(), outputs[-1] if isinstance(outputs, list) and outputs else outputs
    if found is not None and isinstance(last, CertifiedOutput):
        found.score = last.total() if last.is_scored else None
        found.reported = numbers_of(last.extra_fields.get("reward_extra_info") or {})
