"""How a session ends whose work another project's harness has run and scored, and the error that reports it.

Each bridge has its own `end_cause.py`, which finds who caused an end. The four kinds, and the effect of each, are here.
Imports the standard library only: it runs in a harness's own Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_multiturn.errors import OutageError, UnjudgedError

HarnessEndKind = Literal["reward", "failed", "unjudged", "outage"]


class AgentFailedError(Exception):
    """The agent was late or crashed: there is nothing to judge."""


@dataclass(frozen=True)
class HarnessEnd:
    """How a session ends.

    Attributes:
        kind: `reward`; `failed`: the agent did, and the endpoint decides the effect; `unjudged`: a cause of ours;
            `outage`: a service is not there.
        reward: The reward, for the kind `reward`.
        problem: The event, for the other kinds.
    """

    kind: HarnessEndKind
    reward: float = 0.0
    problem: str = ""


def reward_of(end: HarnessEnd) -> float:
    """Return the reward of an end that has one.

    Raises:
        OutageError: The end is an outage.
        UnjudgedError: The work was not scored, for a cause of ours.
        AgentFailedError: The agent failed.
    """
    if end.kind == "reward":
        return end.reward
    raise {"outage": OutageError, "unjudged": UnjudgedError, "failed": AgentFailedError}[end.kind](end.problem)
