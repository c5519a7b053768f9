"""An OpenEnv server of one environment, run by verifiers' Python: count to a goal in steps of 1 to 5.

    python recipes/hub/counter_server.py FILE [--host HOST] [--port PORT]     writes its port to FILE

Reaching the goal gives a reward of 1, passing it one of -1; both end the episode. A step that is no number from 1 to 5
counts as 0.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

_MOST_STEPS = 8


class CounterAction(Action):
    """A step."""

    add: int


class CounterObservation(Observation):
    """The goal, and the sum so far."""

    goal: int = 0
    total: int = 0


class CounterEnvironment(Environment[CounterAction, CounterObservation, State]):
    """Counts."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._goal = self._total = 0
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CounterObservation:
        """Begin to count; `goal` is the goal."""
        self._goal, self._total = int(kwargs.get("goal", 7)), 0
        self._state = State(episode_id=episode_id or "", step_count=0)
        return CounterObservation(goal=self._goal, total=0, done=False, reward=0.0)

    def step(self, action: CounterAction, timeout_s: float | None = None, **kwargs: Any) -> CounterObservation:
        """Add a step."""
        self._state.step_count += 1
        self._total += action.add if 1 <= action.add <= 5 else 0
        done = self._total >= self._goal or self._state.step_count >= _MOST_STEPS
        reward = 0.0 if self._total < self._goal else 1.0 if self._total == self._goal else -1.0
        return CounterObservation(goal=self._goal, total=self._total, done=done, reward=reward)

    @property
    def state(self) -> State:
        """Return the state."""
        return self._state


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="An OpenEnv server that counts.")
    parser.add_argument("file", type=Path, help="the file for its port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    listening = socket.create_server((given.host, given.port))
    app = create_fastapi_app(CounterEnvironment, CounterAction, CounterObservation, max_concurrent_envs=256)
    given.file.write_text(str(listening.getsockname()[1]), encoding="ascii")
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])


if __name__ == "__main__":
    main()
