"""An environment that Gymnasium knows only once this module was imported, as those of third parties are."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Discrete

ID = "RegisteredWorld-v0"


class Counter(gymnasium.Env[int, int]):
    """Counts the steps, and ends at `target`."""

    action_space = Discrete(2)
    observation_space = Discrete(100)

    def __init__(self, target: int = 2) -> None:
        self.target, self.at = target, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.at = 0
        return self.at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += int(action)
        return self.at, float(self.at == self.target), self.at >= self.target, False, {}


gymnasium.register(ID, entry_point="tests.registered_world:Counter")
