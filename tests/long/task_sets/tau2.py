"""τ²'s worlds and verdicts: do they agree with τ² itself, is none shared, and does the event loop wait for none?

    python -m benchmarks.tau2 [--short]

- Gold: in each task of retail and airline the task's own calls are made and the required messages are sent; the reward
  has to be 1. It also has the reward of doing nothing, without which no score of τ² means anything.
- Parity: each task is also played silently, without its last call, with its first call twice, with another argument,
  and with arguments that no tool takes. The verdicts have to be those of τ²'s own `evaluate_simulation`, with data
  bases that it parses anew. (Its module that calls models would import LiteLLM; an empty one replaces it, since nothing
  here calls one.)
- Worlds: 64 at once, four for each of 16 tasks, go on call by call in turns. Every answer and verdict has to be that of
  the task played alone. The control plays the same in one world.
- Loop: meanwhile the event loop is watched. What counts is the time for which a step held it up; that in which others
  had the machine's cores is shown beside it.

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.loop_watch import LoopWatch
from verl_multiturn.task_sets.tau2.package import DOMAINS, GREETING, import_tau2, tasks_of
from verl_multiturn.task_sets.tau2.world_process import judge, load
from verl_multiturn.task_sets.tau2.worlds import World, close_worlds, worlds_of

WORLDS = 64
SIBLINGS = 4
Call = tuple[str, dict[str, Any]]
Played = tuple[list[dict[str, Any]], list[str]]
"""The calls of a conversation with their answers, and the agent's messages."""


def gold_of(task: Any) -> tuple[list[Call], list[str]]:
    """Return the calls that a task requires, and the agent's required messages."""
    criteria = task.evaluation_criteria
    calls = [(each.name, dict(each.arguments)) for each in criteria.actions or []]
    return calls, [GREETING, *(criteria.communicate_info or [])]


def plans_of(task: Any) -> dict[str, tuple[list[Call], list[str]]]:
    """Return the ways in which a task is played, by their names."""
    calls, texts = gold_of(task)
    plans = {"gold": (calls, texts), "nothing": ([], [GREETING]), "silent": (calls, [GREETING])}
    if calls:
        name, arguments = calls[-1]
        other = {key: f"{value}0" if isinstance(value, str) else value for key, value in arguments.items()}
        plans |= {
            "last call left out": (calls[:-1], texts),
            "first call twice": ([calls[0], *calls], texts),
            "last call twice": ([*calls, calls[-1]], texts),
            "another argument": ([*calls[:-1], (name, other)], texts),
            "unknown argument": ([*calls, (name, {"nothing": 1})], texts),
        }
    return plans


async def play(world: World, calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Make calls in a world, and return them with their answers."""
    for name, arguments in calls:
        await world.call(name, arguments)
    return world.calls


def original_reward(domain: str, task: Any, calls: Sequence[dict[str, Any]], texts: Sequence[str]) -> float:
    """Return the reward that τ² itself gives to a conversation."""
    message, simulation = import_tau2("data_model.message"), import_tau2("data_model.simulation")
    sys.modules.setdefault("tau2.utils.llm_utils", _no_models())
    evaluator = import_tau2("evaluator.evaluator")
    written: list[Any] = [message.AssistantMessage(role="assistant", content=text) for text in texts[:1]]
    written.append(message.UserMessage(role="user", content="Please."))
    for number, each in enumerate(calls):
        made = message.ToolCall(id=str(number), name=each["name"], arguments=each["arguments"])
        written.append(message.AssistantMessage(role="assistant", tool_calls=[made]))
        written.append(message.ToolMessage(id=str(number), role="tool", content=each["content"], error=each["error"]))
    written += [message.AssistantMessage(role="assistant", content=text) for text in texts[1:]]
    written.append(message.UserMessage(role="user", content="###STOP###"))
    run = simulation.SimulationRun(
        id="0", task_id=task.id, start_time="", end_time="", duration=0.0, termination_reason="user_stop",
        messages=written,
    )  # fmt: skip
    return float(evaluator.evaluate_simulation(run, task, evaluator.EvaluationType.ALL, False, domain).reward)


def _no_models() -> ModuleType:
    """Return a module with the names of τ²'s own that asks models, which would import LiteLLM."""
    module = ModuleType("tau2.utils.llm_utils")
    for name in ("generate", "get_cost"):
        setattr(module, name, None)
    return module


async def judged(domain: str, short: bool) -> dict[str, Any]:
    """Play every task of a domain in every way, one after another, and compare the verdicts with τ²'s own.

    Args:
        domain: Its name.
        short: Whether only every eighth task is compared.
    """
    rewards: dict[str, list[float]] = {}
    times, played, different = [], 0, []
    for index, (task_id, task) in enumerate(tasks_of(domain).items()):
        for name, (calls, texts) in plans_of(task).items():
            if name not in ("gold", "nothing") and short and index % 8:
                continue
            world = World(worlds_of(domain))
            answered = await play(world, calls)
            began = time.perf_counter()
            verdict = await world.judge(task_id, texts)
            times.append(time.perf_counter() - began)
            await world.close()
            rewards.setdefault(name, []).append(verdict.reward)
            if not (short and index % 8):
                played += 1
                theirs = await asyncio.to_thread(original_reward, domain, task, answered, texts)
                different += [] if theirs == verdict.reward else [[task_id, name, verdict.reward, theirs]]
    return {
        "tasks": len(rewards["gold"]),
        "gold": statistics.mean(rewards["gold"]),
        "do_nothing": round(statistics.mean(rewards["nothing"]), 3),
        "compared": played,
        "different": different,
        "verdict_p50_ms": round(1000 * statistics.median(times)),
    }


async def side_by_side(domain: str, count: int, one_world: bool = False) -> tuple[int, list[float]]:
    """Play conversations at the same time.

    Args:
        domain: Name of the domain.
        count: Number of conversations, several for each task.
        one_world: Whether all are played in one world, which is the control.

    Returns:
        How many are not as they are alone, and the megabytes of each world's process that no other process shares.
    """
    own_mb: list[float] = []
    changing = [task for task in tasks_of(domain).values() if len(gold_of(task)[0]) > 2]
    tasks = changing[: count // SIBLINGS]
    alone = {}
    for task in tasks:
        world = World(worlds_of(domain))
        calls, texts = gold_of(task)
        alone[task.id] = [await play(world, calls), await world.judge(task.id, texts)]
        await world.close()
    barrier = asyncio.Barrier(count)
    common = World(worlds_of(domain))

    async def conversation(task: Any) -> bool:
        world = common if one_world else World(worlds_of(domain))
        calls, texts = gold_of(task)
        answers = []
        await barrier.wait()
        for name, arguments in calls:
            content, error = await world.call(name, arguments)
            answers.append({"name": name, "arguments": arguments, "content": content, "error": error})
            await asyncio.sleep(0)
        verdict = None if one_world else await world.judge(task.id, texts)
        own_mb.extend([] if one_world else [_own_mb(world)])
        await barrier.wait()  # all worlds are there until the last verdict
        if not one_world:
            await world.close()
        return answers != alone[task.id][0] or (not one_world and verdict != alone[task.id][1])

    wrong = sum(await asyncio.gather(*[conversation(task) for task in tasks for _ in range(SIBLINGS)]))
    await common.close()
    return wrong, own_mb


def _own_mb(world: World) -> float:
    assert world.process is not None
    lines = Path(f"/proc/{world.process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def verdict_cpu_ms(domain: str, count: int = 5) -> float:
    """Return the median processor time of a verdict, without a process of its own and without one-time loading."""
    times = []
    for task_id in list(tasks_of(domain))[:count]:
        loaded = load({"domain": domain})
        gc.collect()
        gc.freeze()  # as a zygote does
        began = time.process_time()
        judge(loaded, task_id, [], [GREETING])
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times)


async def measure(short: bool) -> dict[str, Any]:
    """Measure everything."""
    for domain in DOMAINS:  # work of a run before its first conversation
        tasks_of(domain)
        await (await worlds_of(domain).fork()).close()
    async with LoopWatch() as loop:
        found = await asyncio.gather(*[side_by_side(domain, WORLDS // len(DOMAINS)) for domain in DOMAINS])
    control, _ = await side_by_side("retail", WORLDS // len(DOMAINS), one_world=True)
    by_domain = {domain: await judged(domain, short) for domain in DOMAINS}
    for domain in DOMAINS:
        await close_worlds(domain)
    return {
        "gold": {domain: each["gold"] for domain, each in by_domain.items()},
        "do_nothing": {domain: each["do_nothing"] for domain, each in by_domain.items()},
        "tasks": {domain: each["tasks"] for domain, each in by_domain.items()},
        "compared": sum(each["compared"] for each in by_domain.values()),
        "different": [each for domain in by_domain.values() for each in domain["different"]],
        "worlds": WORLDS,
        "shared": sum(wrong for wrong, _ in found),
        "control_shared": control,
        "world_mb": round(statistics.median(each for _, own_mb in found for each in own_mb), 1),
        "verdict_p50_ms": max(each["verdict_p50_ms"] for each in by_domain.values()),
        "verdict_cpu_ms": round(max(verdict_cpu_ms(domain) for domain in DOMAINS)),
        "loop_max_ms": round(loop.held_ms, 1),
        "loop_late_ms": round(loop.late_ms, 1),
        "step_max_ms": round(loop.step_ms, 1),
    }
