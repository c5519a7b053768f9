"""A small household in text: places, things, and one thing that has to be put somewhere. `--smoke` plays it.

It needs no download and speaks as ALFWorld does, so that the smoke run has the same turns as the full recipe. It is not
ALFWorld, and its measurements show nothing about ALFWorld.
"""

from __future__ import annotations

import random
from typing import Any

PLACES = ("cabinet", "drawer", "fridge", "shelf", "sink", "table")
THINGS = ("apple", "book", "cup", "key", "pan")
WON = 10.0
"""Reward of the step that solves the task, as in verl-agent."""
_MOST_STEPS = 50


class Household:
    """An environment with `reset(seed)` and `step(action)`; the seed decides where everything lies, and the task.

    Attributes:
        admissible: The actions that are possible now.
    """

    def __init__(self) -> None:
        self.admissible: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode, and return the player's first view."""
        rng = random.Random(seed)
        self._places = rng.sample(PLACES, 4)
        self._where = {thing: rng.choice(self._places) for thing in rng.sample(THINGS, 3)}
        self._thing = rng.choice(sorted(self._where))
        self._goal = rng.choice([place for place in self._places if place != self._where[self._thing]])
        self._at = ""
        self._held = ""
        self._steps = 0
        self._look()
        seen = ", ".join(f"a {place}" for place in self._places)
        return f"You are in a room. You see {seen}. Your task is to: put the {self._thing} in the {self._goal}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do an action. One that is not possible changes nothing.

        Args:
            action: For example `go to fridge`, `take apple from table` or `put apple in fridge`.
        """
        self._steps += 1
        said = "Nothing happens."
        if action in self.admissible:
            words = action.split()
            if words[0] == "go":
                self._at = words[-1]
                said = f"You arrive at the {self._at}. {self._seen()}"
            elif words[0] == "take":
                self._held = words[1]
                del self._where[self._held]
                said = f"You take the {self._held}."
            else:
                self._where[self._held] = self._at
                said, self._held = f"You put the {self._held} in the {self._at}.", ""
        won = self._where.get(self._thing) == self._goal
        self._look()
        return said, WON * won, won, not won and self._steps >= _MOST_STEPS, {}

    def solution(self) -> list[str]:
        """Return the actions that solve the task from its beginning."""
        place = self._where[self._thing]
        return [
            f"go to {place}",
            f"take {self._thing} from {place}",
            f"go to {self._goal}",
            f"put {self._thing} in {self._goal}",
        ]

    def _seen(self) -> str:
        things = sorted(thing for thing, place in self._where.items() if place == self._at)
        return "There is " + (", ".join(f"a {thing}" for thing in things) if things else "nothing") + "."

    def _look(self) -> None:
        self.admissible = [f"go to {place}" for place in self._places if place != self._at]
        if self._held and self._at:
            self.admissible.append(f"put {self._held} in {self._at}")
        elif self._at:
            here = sorted(thing for thing, place in self._where.items() if place == self._at)
            self.admissible += [f"take {thing} from {self._at}" for thing in here]
