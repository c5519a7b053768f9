"""Write τ²'s tasks as verl's parquet: `python recipes/tau2/prepare_data.py --out DIR [--domain airline|retail]`.

The splits are τ²'s own. Each row has the reward of an agent that does nothing, which is computed here. `--smoke` takes
a few short tasks, and with `--model` makes a tiny model that has their solutions by heart.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripted import first_words

from verl_multiturn.runs.data import Row, arguments, make_row, prepare, tool_call, write_rows
from verl_multiturn.task_sets.tau2.package import (
    DOMAINS,
    GREETING,
    agent_prompt,
    check_domain,
    splits_of,
    tasks_of,
    tool_schemas,
)
from verl_multiturn.task_sets.tau2.worlds import World, close_worlds, worlds_of

_SPLITS = ("train", "test")
_SMOKE = {"train": 4, "test": 2}
_SMOKE_CALLS = 3
"""Most calls of a task of the smoke run."""
_SMOKE_PROMPT = "Help the user by calls."
"""In the place of the policy, which a tiny model does not read and would take minutes to go through."""


def gold_calls(domain: str, task: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that a task asks for."""
    actions = tasks_of(domain)[task].evaluation_criteria.actions or []
    return [(each.name, dict(each.arguments)) for each in actions]


def own_tools(domain: str, task: str) -> list[str]:
    """Return the names of the tools that a task's own calls need, in the order of the domain's tools."""
    called = {name for name, _ in gold_calls(domain, task)}
    return [name for name in tool_schemas(domain) if name in called]


def row(domain: str, task: str, do_nothing: float, *, smoke: bool = False) -> Row:
    """Return the row of a task.

    Args:
        domain: Name of the domain.
        task: Id of the task.
        do_nothing: The reward of an agent that does nothing.
        smoke: Whether the prompt is a short one, with the tools of the task's own calls alone.
    """
    prompt = [
        {"role": "system", "content": _SMOKE_PROMPT if smoke else agent_prompt(domain)},
        {"role": "assistant", "content": GREETING},
    ]
    return make_row(
        f"tau2/{domain}",
        prompt,
        "",
        ability="customers",
        tools=own_tools(domain, task) if smoke else None,
        interaction="tau2",
        interaction_kwargs={"task": task, "do_nothing": do_nothing},
        task=task,
    )


async def rewards_of_doing_nothing(domain: str, tasks: Sequence[str]) -> dict[str, float]:
    """Return by task τ²'s reward of an agent that only greets."""
    worlds = worlds_of(domain)
    try:
        verdicts = await asyncio.gather(*[worlds.judge(task, [], [GREETING]) for task in tasks])
    finally:
        await close_worlds(domain)
    return {task: verdict.reward for task, verdict in zip(tasks, verdicts, strict=True)}


def short_tasks(domain: str, split: str) -> list[str]:
    """Return the tasks of a split with few calls and no required information; short schemas and calls come first."""
    schemas = tool_schemas(domain)
    lengths = {
        task: len(json.dumps([gold_calls(domain, task), [schemas[name] for name in own_tools(domain, task)]]))
        for task in splits_of(domain)[split]
        if 0 < len(gold_calls(domain, task)) <= _SMOKE_CALLS
        and not tasks_of(domain)[task].evaluation_criteria.communicate_info
    }
    return sorted(lengths, key=lambda task: lengths[task])


async def solution(domain: str, task: str) -> list[dict[str, Any]]:
    """Return the conversation in which a task is solved, in the form of a chat template."""
    world = World(worlds_of(domain))
    messages = [*row(domain, task, 0.0, smoke=True)["prompt"], {"role": "user", "content": first_words(domain, task)}]
    for name, given in gold_calls(domain, task):
        content, _ = await world.call(name, given)
        messages.append({"role": "assistant", "content": tool_call(name, given)})
        messages.append({"role": "tool", "content": content})
    await world.close()
    return [*messages, {"role": "assistant", "content": "Done."}]


async def solutions(domain: str, tasks: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return the solved conversations of several tasks."""
    try:
        return [await solution(domain, task) for task in tasks]
    finally:
        await close_worlds(domain)


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--domain", choices=DOMAINS, default="airline")
    parser.add_argument("--model", type=Path, help="with --smoke: where a tiny model is written")
    args = parser.parse_args()
    check_domain(args.domain, "--domain")
    tasks = {
        split: short_tasks(args.domain, split) if args.smoke else splits_of(args.domain)[split] for split in _SPLITS
    }
    nothing = asyncio.run(rewards_of_doing_nothing(args.domain, [task for split in _SPLITS for task in tasks[split]]))
    if args.smoke:  # a reward there means that something was done
        tasks = {split: [task for task in tasks[split] if not nothing[task]][: _SMOKE[split]] for split in _SPLITS}
    for split in _SPLITS:
        shares = [nothing[task] for task in tasks[split]]
        print(json.dumps({"split": split, "tasks": len(shares), "do_nothing": round(sum(shares) / len(shares), 3)}))
    write_rows(
        args.out,
        {
            split: [row(args.domain, task, nothing[task], smoke=args.smoke) for task in tasks[split]]
            for split in _SPLITS
        },
        args.tools,
    )
    if args.model is not None:
        from by_heart import make_model

        learned = [task for split in _SPLITS for task in tasks[split]]
        conversations = asyncio.run(solutions(args.domain, learned))
        names = [own_tools(args.domain, task) for task in learned]
        make_model(args.model, args.domain, list(zip(names, conversations, strict=True)))


if __name__ == "__main__":
    prepare(main)
