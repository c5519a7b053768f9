"""Whether the model was shown the same tokens behind the endpoint as by the built-in loop.

Each recorded session is played again by the built-in loop, with the quickstart's own configuration, tools and rows, and
an engine that repeats the model's turns of the session. The prompts that the engine is given are compared, token for
token: the first one, and each later one as long as the tools have answered the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from verl_multiturn import ScriptedEngine
from verl_multiturn.records.rows import columns
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.verl_bridge.loops.runner import Runner, build_runner
from verl_multiturn.verl_bridge.model.loading import load_model

_WITHOUT_RECORDS = "actor_rollout_ref.rollout.custom.multiturn.record_dir=null"
_AT_ONCE = 256


@dataclass
class Comparison:
    """How many prompts were compared, and how many differ."""

    first: int = 0
    later: int = 0
    different: int = 0
    other_results: int = 0
    """Sessions with a later prompt after which a tool, or the built-in loop, answered or did something else."""

    @property
    def equal(self) -> bool:
        """Return whether no prompt differs; False where there is none to compare."""
        return bool(self.first and not self.different)


def compare(records: Sequence[Mapping[str, Any]], data: Path) -> Comparison:
    """Play recorded sessions again with the built-in loop, and compare the prompts.

    Args:
        records: Records of sessions.
        data: Folder of the rows, as `train.parquet` and `test.parquet`.
    """
    rows: dict[str, list[dict[str, str]]] = {}
    for path in sorted(data.glob("*.parquet")):
        for messages in pd.read_parquet(path)["prompt"]:
            rows[messages[-1]["content"]] = [dict(message) for message in messages]
    return asyncio.run(_compare(records, rows))


async def _compare(records: Sequence[Mapping[str, Any]], rows: Mapping[str, list[dict[str, str]]]) -> Comparison:
    said: dict[str, list[list[int]]] = {}

    def say(request_id: str, _: Sequence[int], turn: int) -> list[int]:
        turns = said[request_id]
        return turns[turn] if turn < len(turns) else turns[-1]  # later turns than the session's are not compared

    engine = ScriptedEngine(say)
    runner = built_in(engine)
    found = Comparison()

    async def one(name: str, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Any]]:
        messages = rows[_question(record)]
        full = [columns(row) for row in record["rows"]]
        said[name] = [row["ids"][start:end] for row in full for start, end in turns_of(row["mask"])]
        request = await runner.request({"raw_prompt": messages}, {}, name)
        outcome, _ = await runner.run(request)
        return record, outcome.messages

    for start in range(0, len(records), _AT_ONCE):
        named = {str(start + i): record for i, record in enumerate(records[start : start + _AT_ONCE])}
        known = {name: record for name, record in named.items() if _question(record) in rows}
        found.first += len(named) - len(known)
        found.different += len(named) - len(known)  # of no row of the data
        played = dict(zip(known, await asyncio.gather(*(one(*each) for each in known.items())), strict=True))
        prompts: dict[str, list[list[int]]] = {name: [] for name in known}
        for name, ids in engine.seen:
            prompts[name].append(ids)
        engine.seen.clear()
        for name, (record, messages) in played.items():
            _count(found, record, messages, prompts[name])
    return found


def _count(found: Comparison, record: Mapping[str, Any], messages: list[Any], prompts: list[list[int]]) -> None:
    """Compare the prompts of a session with those of the built-in loop."""
    full = [columns(row) for row in record["rows"]]
    shown = [row["ids"][:start] for row in full for start, _ in turns_of(row["mask"])]
    ours, theirs = _results(record["messages"]), _results(messages)
    for turn, ids in enumerate(shown):
        if turn and (turn >= len(prompts) or ours[:turn] != theirs[:turn]):
            found.other_results += 1
            return
        found.first += turn == 0
        found.later += turn > 0
        found.different += ids != prompts[turn]


def _results(messages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the texts of the tools after each of the assistant's messages."""
    texts: list[list[str]] = []
    for message in messages:
        if message["role"] == "assistant":
            texts.append([])
        elif texts:
            texts[-1].append(str(message["content"]))
    return texts


def built_in(engine: ScriptedEngine) -> Runner:
    """Return the quickstart's conversations, as its workers run them, with another engine."""
    config = OmegaConf.create(resolved(compose_run(plan_run("quickstart", overrides=[_WITHOUT_RECORDS]))))
    model = load_model(config.actor_rollout_ref.model, "install the package with its recipes", config.data)
    return build_runner(config, model, engine)


def turns_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the beginning and the end of each run of sampled tokens."""
    edges = [i for i, (before, now) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if before != now]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _question(record: Mapping[str, Any]) -> str:
    return next((message["content"] for message in record["messages"] if message["role"] == "user"), "")
