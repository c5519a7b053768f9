"""Rewards beyond float32's range, which make a group's advantages NaN: through every door that a reward has.

`paid` means here that such a reward, or a sum of rewards that is one, is in a valid trajectory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.long.rewards.hacks import Tried
from verl_multiturn import BaseTool, Interaction, Reply, ToolResponse, ToolSchema, scripted_rollout
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.interactions.step_env import StepEnv
from verl_multiturn.proxy.agents.end import read_result
from verl_multiturn.rewards import Score, Solution, compute_score
from verl_multiturn.rollout.turn_rewards import interaction_scores, tool_scores
from verl_multiturn.runs.data import tool_call

_LARGEST = float(np.finfo(np.float32).max)
FAR: list[Any] = [
    *(1e39, -1e39, 3.5e38, 1e308, 10**39, 10**400, Fraction(10**39), np.float64(1e39)),
    *(math.inf, -math.inf, math.nan, np.float32(np.inf)),
]
ADDED = [3e38, -3e38]
"""Rewards that fit, and whose sum does not."""
SOUND = 0.5
ALL = [*FAR, *ADDED, SOUND]
SCHEMA = ToolSchema.read(
    {"type": "function", "function": {"name": "far", "description": "Far.", "parameters": {"type": "object"}}},
    "far",
)
_own: Any = 0.0
"""Result of `own_reward`."""


class FarWorld:
    """An environment, in a process of its own, whose step earns one of `ALL`.

    Args:
        which: Index in `ALL`.
    """

    def __init__(self, which: int) -> None:
        self._reward = ALL[which]

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        return "go", {}

    def step(self, action: Any) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """End the episode, with the reward."""
        return "done", self._reward, True, False, {}


def own_reward(solution: Solution, ground_truth: Any) -> Score:
    """Give the reward `_own`, as a function of a user may."""
    return Score(value=_own, acc=1.0, format=1.0, answered=1.0)


async def _rollout(
    tools: list[Any], turns: list[str], interaction: Interaction | None = None, kwargs: dict[str, Any] | None = None
) -> list[float]:
    """Return the rewards in a conversation's row; none where it is invalid."""
    outcome = await scripted_rollout(tools, turns, "Go.", interaction=interaction, interaction_kwargs=kwargs)
    return [reward for row in [*tool_scores(outcome), *interaction_scores(outcome)] for _, reward in row]


async def _interaction(reply: Any, score: Any = 0.0, turns: int = 1) -> list[float]:
    class Far(Interaction):
        left = turns

        def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
            self.left -= 1
            return Reply("x", reward=reply, done=self.left == 0)

        def score(self, instance_id: str) -> float:
            return score  # type: ignore[no-any-return]

    return await _rollout([], ["a"] * turns, Far({}))


async def _tool(step: Any, calculated: Any = 0.0, calls: int = 1) -> list[float]:
    class Far(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return ToolResponse(text="x"), step, {}

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            return calculated  # type: ignore[no-any-return]

    return await _rollout([Far({}, SCHEMA)], [*[tool_call("far", {})] * calls, "done"])


async def _compute_score(value: Any, **options: Any) -> list[float]:
    global _own
    _own = value
    found = await compute_score("own", "", "", {}, routes={"own": f"{__name__}.own_reward"}, **options)
    return [found["score"]]


async def _options(value: Any, name: str) -> list[float]:
    """Score an answer for which the option counts: one that is wrong, right, or not in the format."""
    answer = {"wrong_call_credit": "#### 41", "tool_use_bonus": "#### 42", "format_weight": "41"}[name]
    calls = [] if name == "format_weight" else [[{"name": "a", "arguments": "{}"}]]
    extra = {"assistant_texts": [answer], "assistant_calls": calls, "call_statuses": ["ok"]}
    limit = {"wrong_call_limit": value} if name == "wrong_call_credit" else {}
    found = await compute_score("gsm8k", "", "42", extra, gsm8k={name: value, **limit})
    return [found["score"]]


async def _agent(result: Any) -> list[float]:
    read = read_result(result)
    return [read.reward or 0.0, *read.completions.values()]


async def _step_env(env: StepEnv, value: Any) -> list[float]:
    which = next(index for index, each in enumerate(ALL) if each is value)
    return await _rollout([], ["a"], env, {"env_kwargs": {"which": which}})


Door = Callable[[Any], Awaitable[list[float]]]
DOORS: dict[str, Door] = {
    "reply of an interaction": _interaction,
    "score of an interaction": lambda value: _interaction(0.0, value),
    "replies that add up": lambda value: _interaction(value, turns=3),
    "a reply and a score": lambda value: _interaction(value, value),
    "execute of a tool": _tool,
    "calc_reward of a tool": lambda value: _tool(0.0, value),
    "calls that add up": lambda value: _tool(value, value, calls=3),
    "result of an agent": _agent,
    "reward in an agent's result": lambda value: _agent({"reward": value}),
    "completions in an agent's result": lambda value: _agent({"completions": {"a": value, "b": value}}),
    "a function of one's own": _compute_score,
    "option format_weight": lambda value: _options(value, "format_weight"),
    "option tool_use_bonus": lambda value: _options(value, "tool_use_bonus"),
    "option wrong_call_credit": lambda value: _options(value, "wrong_call_credit"),
}
"""For each door, a function that sends a reward through it, and returns the rewards that are in the row then."""


async def float32(quick: bool) -> AsyncIterator[Tried]:
    """Send every reward through every door."""
    env = StepEnv({"env": f"{__name__}:FarWorld"})
    try:
        doors: dict[str, Door] = {**DOORS, "step of an environment": functools.partial(_step_env, env)}
        for door, enter in doors.items():
            for value in FAR[:1] if quick else [*FAR, *ADDED]:
                case = "10**400" if isinstance(value, int) and value > 10**100 else repr(value)
                yield Tried("float32", door, case, float(_is_far(await _entered(enter, value))))
            rewards = await _entered(enter, SOUND)
            sound = float(any(rewards) and not _is_far(rewards))
            yield Tried("float32", "control", f"{door}: {SOUND}", sound, control=True)
    finally:
        await env.aclose()


async def _entered(enter: Door, value: Any) -> list[float]:
    try:
        return await enter(value)
    except (MultiTurnError, OverflowError):  # refused: it is in no trajectory
        return []


def _is_far(rewards: list[float]) -> bool:
    return any(not abs(reward) <= _LARGEST for reward in [*rewards, sum(rewards)])
