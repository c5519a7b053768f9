"""The lake: random maps, the model's view of them, the shortest ways, and how far a random walk comes.

Only this module defines the task. The warm start, the data set, the environment's text and the report all use it. The
environment itself is Gymnasium's `FrozenLake-v1`, on ice that is not slippery.

A map is four rows of four fields: `S` start, `F` ice, `H` hole, `G` goal. Example: `("SFFF", "FHFH", "FFFH", "HFFG")`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

Map = tuple[str, ...]

DATA_SOURCE = "gymnasium/frozen_lake"
ACTIONS = ("left", "down", "right", "up")
"""Names of Gymnasium's actions 0 to 3."""
SIZE = 4
SLIPPERY = False
ICE_SHARE = 0.8
"""Probability that a field is ice, when a map is drawn, as in Gymnasium's own random maps."""
TURNS = 10
"""Most actions of an episode. A shortest way takes 6."""
HELD_OUT = 256
SYSTEM_PROMPT = "Walk from P to G on the ice F, around the holes H: left, down, right or up."
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_HELD_OUT_SEED = 9_000_000


def next_field(field: int, action: int) -> int:
    """Return the field that an action leads to; at the edge it is the same field.

    Args:
        field: Number of the field, row by row.
        action: Index in `ACTIONS`.
    """
    row, column = divmod(field, SIZE)
    down, right = _MOVES[action]
    return min(max(row + down, 0), SIZE - 1) * SIZE + min(max(column + right, 0), SIZE - 1)


def distances(lake: Map) -> dict[int, int]:
    """Return the number of steps from each field to the goal, for the fields that can reach it without a hole."""
    fields = "".join(lake)
    goal = fields.index("G")
    found, waiting = {goal: 0}, deque([goal])
    while waiting:
        field = waiting.popleft()
        for action in range(len(ACTIONS)):
            before = next_field(field, action)  # steps between two fields go both ways
            if before not in found and fields[before] != "H":
                found[before] = found[field] + 1
                waiting.append(before)
    return found


def best_actions(lake: Map, field: int, far: dict[int, int]) -> list[int]:
    """Return the actions that begin a shortest way to the goal.

    Args:
        lake: The map.
        field: Number of the player's field.
        far: The result of `distances` for the map.
    """
    return [a for a in range(len(ACTIONS)) if far.get(next_field(field, a), far[field]) < far[field]]


def draw_maps(seed: int, without: Collection[Map] = ()) -> Iterator[Map]:
    """Yield random maps, each one once, whose goal can be reached within `TURNS` steps.

    Args:
        seed: Seed of the maps.
        without: Maps to omit.
    """
    rng, seen = random.Random(seed), set(without)
    while True:
        fields = ["F" if rng.random() < ICE_SHARE else "H" for _ in range(SIZE * SIZE)]
        fields[0], fields[-1] = "S", "G"
        lake = tuple("".join(fields[row : row + SIZE]) for row in range(0, SIZE * SIZE, SIZE))
        if lake not in seen and distances(lake).get(0, TURNS + 1) <= TURNS:
            seen.add(lake)
            yield lake


def held_out_maps() -> list[Map]:
    """Return the maps of the validation, the same for every seed. No other map of this recipe is one of them."""
    maps = draw_maps(_HELD_OUT_SEED)
    return [next(maps) for _ in range(HELD_OUT)]


def show_field(lake: Map, field: int) -> str:
    """Return the player's view: the map, with `P` on the player's field."""
    fields = ["P" if place == field else "F" if sign == "S" else sign for place, sign in enumerate("".join(lake))]
    return "\n".join(" ".join(fields[row : row + SIZE]) for row in range(0, SIZE * SIZE, SIZE))


def to_text(env: Any, observation: Any, info: Any) -> str:
    """Return the player's view of Gymnasium's environment; `StepEnv` calls it.

    Args:
        env: The environment.
        observation: Number of the player's field.
        info: Not used.
    """
    return show_field(tuple(row.tobytes().decode() for row in env.unwrapped.desc), int(observation))


def random_policy_share(lake: Map) -> float:
    """Return the probability that random actions reach the goal within `TURNS` steps, without slipping."""
    fields = "".join(lake)
    at = {0: 1.0}
    won = 0.0
    for _ in range(TURNS):
        then: dict[int, float] = {}
        for field, share in at.items():
            for action in range(len(ACTIONS)):
                reached = next_field(field, action)
                won += share / len(ACTIONS) if fields[reached] == "G" else 0.0
                if fields[reached] not in "GH":
                    then[reached] = then.get(reached, 0.0) + share / len(ACTIONS)
        at = then
    return won
