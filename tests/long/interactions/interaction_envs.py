"""Environments of `StepEnv`: the cost of a step, and whether one seed is one world in many sessions at once.

    python -m benchmarks.interaction_envs

- Step: one session of Gymnasium's FrozenLake plays 2,000 steps, one after another; the time is that of `reply`, from
  the model's text to the answer. Beside it the environment runs alone, in this process.
- Same world: 128 sessions with one seed play the same actions at the same time, each in its own process, in a world
  that draws from the random numbers of its process, as GEM's do, and on a slippery FrozenLake. Every observation,
  reward and end has to be that of one session alone. The control plays the first world in 16 threads of this process.

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import threading
import time
from typing import Any

import gymnasium

from verl_multiturn.interactions.step_env import StepEnv

STEPS = 2_000
SESSIONS = 128
THREADS = 16
SEED = 11
NAMES = ["left", "down", "right", "up"]
ACTIONS = [random.Random(SEED).choice(NAMES) for _ in range(20)]
LAKE = {"env": "FrozenLake-v1", "env_kwargs": {"render_mode": "ansi"}, "actions": NAMES}
DRAWN = {"env": "tests.long.interactions.interaction_envs:DrawnWorld"}


class DrawnWorld:
    """A world that seeds the random numbers of its whole process and draws from them."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Draw a board of 16 fields."""
        random.seed(seed)
        self._steps = 0
        return self._draw(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Draw another board, and a reward."""
        self._steps += 1
        return self._draw(), random.random(), self._steps == len(ACTIONS), False, {}

    def _draw(self) -> str:
        fields = []
        for _ in range(16):
            fields.append(random.choice("SFHG"))
            time.sleep(0)  # lets another thread in, if there is one
        return "".join(fields)


def env_step_p50_ms(steps: int = STEPS) -> tuple[float, float]:
    """Return the median milliseconds of a step: of a session's `reply`, and of the environment alone."""
    return asyncio.run(_session_ms(steps)), _alone_ms(steps)


async def _session_ms(steps: int) -> float:
    env, times = StepEnv(LAKE), []
    await env.start("a", seed=SEED)
    for index in range(steps):
        turn = [{"role": "assistant", "content": f"So I go.\n<action>{NAMES[index % 4]}</action>"}]
        began = time.perf_counter()
        reply = await env.reply("a", turn)
        times.append(time.perf_counter() - began)
        if reply.done:
            await env.close("a")
            await env.start("a", seed=SEED + index)
    await env.close("a")
    await env.aclose()
    return 1e3 * statistics.median(times)


def _alone_ms(steps: int) -> float:
    env, times = gymnasium.make("FrozenLake-v1", render_mode="ansi"), []
    env.reset(seed=SEED)
    for index in range(steps):
        began = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(index % 4)
        env.render()
        times.append(time.perf_counter() - began)
        if terminated or truncated:
            env.reset(seed=SEED + index)
    return 1e3 * statistics.median(times)


def same_world(sessions: int = SESSIONS) -> bool:
    """Return whether concurrent sessions with one seed all play the episode that one session plays alone."""
    return all(len(asyncio.run(_worlds(config, sessions))) == 1 for config in (DRAWN, LAKE))


async def _worlds(config: dict[str, Any], sessions: int) -> set[str]:
    """Return the different episodes that sessions with one seed play, first one alone, then all others at once."""
    env = StepEnv(config)
    played = {await _episode(env, "alone")}
    barrier = asyncio.Barrier(sessions)
    played |= set(await asyncio.gather(*[_episode(env, f"n{index}", barrier) for index in range(sessions)]))
    await env.aclose()
    return played


async def _episode(env: StepEnv, name: str, barrier: asyncio.Barrier | None = None) -> str:
    seen = [await env.start(name, seed=SEED)]
    if barrier is not None:
        await barrier.wait()  # all are open at the same time
    for action in ACTIONS:
        seen.append(await env.reply(name, [{"role": "assistant", "content": action}]))
        if seen[-1].done:
            break
    await env.close(name)
    return json.dumps([(reply.text, reply.reward, reply.done, reply.truncated) for reply in seen])


def worlds_in_threads(threads: int = THREADS) -> int:
    """Return how many different episodes threads of this process play with one seed: the control."""
    played: set[str] = set()
    barrier = threading.Barrier(threads)

    def play() -> None:
        env = DrawnWorld()
        seen: list[Any] = [env.reset(SEED)]
        barrier.wait()  # so that their steps draw from one sequence, however the threads take turns
        seen += [env.step(action) for action in ACTIONS]
        played.add(json.dumps(seen))

    running = [threading.Thread(target=play) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return len(played)


def figures() -> dict[str, Any]:
    """Return the figures of a step, and whether one seed is one world."""
    step_ms, alone_ms = env_step_p50_ms()
    return {
        "env_step_p50_ms": round(step_ms, 3),
        "env_alone_p50_ms": round(alone_ms, 3),
        "sessions": SESSIONS,
        "same_world": same_world(),
        "worlds_in_threads": worlds_in_threads(),
    }
