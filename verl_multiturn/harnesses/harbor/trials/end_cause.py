"""Find who caused the end of a trial of Harbor. This is the one place that decides it.

In this order:
1. a call that a container engine did not answer is an **outage**;
2. a failure before the agent began (image, container, harness) is **unjudged**: no model has caused it;
3. so is an environment of the agent that somebody outside ended: a container that was killed or removed;
4. an agent that was late, crashed, or ended its own environment has **failed**. The endpoint decides the effect: after
   its first completion the session is trained with `error_reward`, before it the session is invalid;
5. a verifier whose own environment did not start, or was ended from outside, is **unjudged**;
6. a verifier that was late, crashed or wrote no reward may have done so because of the work that it scores, which is
   the model's to choose. So it scores an untouched environment once more (`control_run.py`). Only if it fails
   there, too, is it the verifier's fault, and the session **unjudged**; otherwise the agent has failed;
7. anything else is the verifier's **reward**.

Imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from verl_multiturn.harnesses.ends import HarnessEnd
from verl_multiturn.verdicts.script_run import reward_entry

Phase = Literal["environment", "setup", "agent", "verifier", "over"]
"""The phase of a trial: its environment, the harness in it, the agent, the verifier; or its end."""
Lost = Literal["", "inside", "outside", "engine"]
"""Who ended an environment early: no one, a process in it, one outside of it; or the engine does not report it."""
WORKSPACE = "verl_multiturn.harnesses.harbor.trials.environment:WorkspaceEnvironment"
"""Import path of the environment `workspace`, in Harbor's Python."""


@dataclass(frozen=True)
class TrialEvents:
    """The events of a trial.

    Attributes:
        phase: The last phase that began.
        error: The trial's report: the error's type and text. Empty if it reports none.
        agent_failed: Whether the agent was late or crashed.
        not_started: Error of an environment that did not start. Empty if all did.
        agent_lost: Who ended the agent's environment, as it was when the agent was done.
        verifier_lost: Who ended the verifier's environment.
        rewards: The verifier's rewards; None if it came to none.
        late: Whether the session's time was up.
    """

    phase: Phase
    error: str = ""
    agent_failed: bool = False
    not_started: str = ""
    agent_lost: Lost = ""
    verifier_lost: Lost = ""
    rewards: Mapping[str, float] | None = None
    late: bool = False


@dataclass(frozen=True)
class TrialEnd(HarnessEnd):
    """How a session with a trial ends.

    Attributes:
        needs_control: Whether the verifier has to show on an untouched environment that it works. The end remains
            if it does; if it does not, the session is unjudged.
    """

    needs_control: bool = False


def end_of(story: TrialEvents) -> TrialEnd:
    """Return who caused the end, by the module's rules."""
    lost = story.agent_lost or story.verifier_lost
    if lost == "engine":
        return TrialEnd("outage", problem=f"the container engine does not answer: {story.error}")
    if story.phase in ("environment", "setup"):
        of = "environment" if story.phase == "environment" else "harness in it"
        why = "was not there within the session's time" if story.late else "could not be set up"
        return TrialEnd("unjudged", problem=f"the {of} {why}: {story.not_started or story.error}")
    if story.agent_lost == "outside":
        return TrialEnd("unjudged", problem=f"the agent's environment was ended from outside: {story.error}")
    if story.phase == "agent" or story.agent_failed or story.agent_lost:
        what = "ended its own environment" if story.agent_lost else "was late" if story.late else "failed"
        return TrialEnd("failed", problem=f"the agent {what}: {story.error}")
    if story.not_started:
        return TrialEnd("unjudged", problem=f"the verifier's environment did not start: {story.not_started}")
    if story.verifier_lost == "outside":
        return TrialEnd("unjudged", problem=f"the verifier's environment was ended from outside: {story.error}")
    reward = _reward_in(story.rewards)
    if reward is None:
        given = f"it gave {dict(story.rewards)!r}" if story.rewards is not None else story.error
        return TrialEnd("failed", problem=f"the verifier came to no reward: {given}", needs_control=True)
    return TrialEnd("reward", reward)


def _reward_in(rewards: Mapping[str, float] | None) -> float | None:
    """Return the entry `reward`, or the only one; None if there is none or it is not a finite number."""
    try:
        reward = float(reward_entry(rewards or {}))
    except KeyError:
        return None
    return reward if math.isfinite(reward) else None
