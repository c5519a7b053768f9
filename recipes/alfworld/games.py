"""ALFWorld's games as environments with `reset(seed)` and `step(action)`: `recipes.alfworld.games:make`.

Install ALFWorld with `pip install 'alfworld>=0.4'`, and its data with `alfworld-download`. This module was written
after ALFWorld's own code, and was not run here.
"""

from __future__ import annotations

from typing import Any

import textworld
import textworld.gym
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

WON = 10.0
"""Reward of the step that solves the task, as in verl-agent."""
_HIDDEN = {"help"}
"""Commands that verl-agent does not show the model either."""


class Game:
    """One game of ALFWorld, which a row names by its file.

    Args:
        game: Path of a `game.tw-pddl`.
        max_steps: Number of steps after which the episode is truncated.

    Attributes:
        admissible: The actions that are possible now.
    """

    def __init__(self, game: str, max_steps: int = 50) -> None:
        wanted = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
        env_id = textworld.gym.register_games(
            [game], wanted, max_episode_steps=max_steps, wrappers=[AlfredDemangler(shuffle=False), AlfredInfos]
        )
        self._env = textworld.gym.make(env_id)
        self._max_steps = max_steps
        self._steps = 0
        self.admissible: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the game, and return the player's first view, with the task.

        Args:
            seed: Not used: a game is always the same.
        """
        said, info = self._env.reset()
        self._steps = 0
        self._look(info)
        return str(said), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do an action.

        Args:
            action: One of the possible actions.
        """
        said, _, over, info = self._env.step(action)
        self._steps += 1
        self._look(info)
        won = bool(info["won"])
        return str(said), WON * won, won, not won and (bool(over) or self._steps >= self._max_steps), {}

    def close(self) -> None:
        """End the game."""
        self._env.close()

    def _look(self, info: Any) -> None:
        self.admissible = [command for command in info["admissible_commands"] if command not in _HIDDEN]


def make(**kwargs: Any) -> Game:
    """Return the game that a row names; `StepEnv` calls it with the row's `env_kwargs`."""
    return Game(**kwargs)
