"""The control run of a verifier that came to no reward: it scores an environment where no agent has been.

Where it comes to a reward there, the work of the agent is the cause, and the agent has failed. Where it does not, the
verifier is at fault, and the session is unjudged. `end_cause.py` decides when a control run is needed.

Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from verl_multiturn.harnesses.harbor.trials.end_cause import TrialEnd, TrialEvents, end_of


def control_config(config: Any, folder: Path) -> Any:
    """Return the configuration of a trial with the same task and verifier, and with an agent that does nothing.

    Args:
        config: The trial's own, a `TrialConfig` of Harbor.
        folder: The trial's folder.
    """
    control = config.model_copy(deep=True)
    control.trials_dir = folder / "control"
    control.agent = type(config.agent)(name="nop")
    return control


async def after_control(end: TrialEnd, run: Callable[[], Awaitable[TrialEvents]]) -> TrialEnd:
    """Return how a session ends once the control of its verifier has run, where that is needed.

    Args:
        end: How it ends without a control run.
        run: Runs the control, and returns its events. A late one shows nothing.
    """
    if not end.needs_control:
        return end
    story = await run()
    if story.late or not end_of(story).needs_control:
        return end
    return TrialEnd("unjudged", problem=f"{end.problem}; nor does it where no agent has been: {end_of(story).problem}")
