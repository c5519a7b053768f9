"""Do the named benchmarks pay right solutions, and nothing else?

    python -m benchmarks.eval_sets [--rows DIR] [--short]

Ten made rows of each set go through its reader and its reward, with a right, a wrong and an empty answer. `--rows DIR`
has folders named as the benchmarks (`DIR/math500/test.jsonl`), and their own solutions are scored, too. Of BFCL, τ² and
the recipe terminal ten tasks are played with their solutions, and with nothing done; `--short` leaves these out.

The last line is one JSON object:

- `sets`: for each benchmark the number of its `rows`, and the mean reward of `reference` (right solutions), `wrong`
  and `empty` answers. τ²'s tasks are those that do not pay for doing nothing; Terminal-Bench's need containers, so that
  tasks of our own are in their place;
- `fetched`: the same for the sets of `--rows`, with the entries that were `left_out`, the number of rows without a
  solution (`none`), and the numbers of those whose solution is not paid (`missed`);
- `without_solutions`: sets of `--rows` that have none;
- `cells`: cells of `protocols.tsv`; `different`: those that are others than in the YAML, or have no source.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from verl_multiturn.evaluation.benchmarks.protocol import benchmarks, cells, differing, read_protocol
from verl_multiturn.rewards import aclose, compute_score

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "benchmarks" / "single_turn"
# Limits that no busy machine reaches: a late verdict is no verdict on a solution.
_LIMITS = {"math": {"timeout_s": 120}, "code": {"timeout_s": 120, "total_timeout_s": 3600}}
_AT_ONCE = 4


def module(name: str) -> ModuleType:
    """Import a module beside the script that makes the rows."""
    spec = importlib.util.spec_from_file_location(f"single_turn_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


@functools.cache
def reward_kwargs() -> dict[str, Any]:
    """Return the options of the rewards, as the recipe has them, with `_LIMITS`."""
    config = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))
    own = config["reward"]["custom_reward_function"]["reward_kwargs"]
    return {name: {**own.get(name, {}), **limits} for name, limits in _LIMITS.items()}


async def scores(rows: Sequence[Mapping[str, Any]], said: Sequence[str]) -> list[float]:
    """Return the reward of an answer to each row."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(row: Mapping[str, Any], text: str) -> float:
        async with gate:
            extra = {**row["extra_info"], "assistant_texts": [text]}
            truth = row["reward_model"]["ground_truth"]
            found = await compute_score(row["data_source"], text, truth, extra, **reward_kwargs())
        assert (found["failed"], found["timed_out"]) == (0.0, 0.0), (row["data_source"], text[:200])
        return found["score"]

    return list(await asyncio.gather(*map(one, rows, said)))


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return round(sum(values) / len(values), 6) if values else None


async def of_made(name: str) -> dict[str, Any]:
    """Return the rewards of the made entries of a benchmark."""
    made = module("made_entries")
    entries = made.made_entries(name)
    rows, left_out = module("readers").rows_of(name, read_protocol(name), [each.entry for each in entries])
    assert not left_out
    found = {kind: await scores(rows, said) for kind, said in made.answers(entries).items()}
    return {"rows": len(rows), **{kind: mean(values) for kind, values in found.items()}}


async def of_fetched(name: str, folder: Path) -> dict[str, Any] | None:
    """Return the rewards of a fetched set's own solutions; None where it has none."""
    readers, protocol = module("readers"), read_protocol(name)
    entries = readers.read_entries(name, protocol, str(folder))
    if (solution_of := readers.SOLUTIONS.get(name)) is None:
        return None
    rows, left_out = readers.rows_of(name, protocol, entries)
    said = [solution_of(entry) for entry in entries]
    solved = [number for number, text in enumerate(said) if text is not None]
    right = await scores([rows[number] for number in solved], [said[number] for number in solved])
    return {
        "rows": len(rows),
        "left_out": dict(left_out),
        "none": said.count(None),
        "reference": mean(right),
        "missed": [number for number, value in zip(solved, right, strict=True) if value != 1.0],
        "wrong": mean(await scores(rows, ["It is \\boxed{-31337}.\n#### -31337"] * len(rows))),
        "empty": mean(await scores(rows, [""] * len(rows))),
    }


def run(rows: Path | None = None, short: bool = False) -> dict[str, Any]:
    """Score the made entries, the fetched sets of a folder, and tasks that are played.

    Args:
        rows: The folder; None: no fetched sets.
        short: Whether nothing is played.
    """
    names = list(module("readers").PROBLEM_READERS)
    there = [name for name in names if rows is not None and (rows / name).exists()]

    async def all_sets() -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            made = {name: await of_made(name) for name in names}
            return made, {name: await of_fetched(name, (rows or FOLDER) / name) for name in there}
        finally:
            await aclose()

    made, fetched = asyncio.run(all_sets())
    if not short:
        from tests.long.task_sets.eval_plays import PLAYED

        made |= {name: play() for name, play in PLAYED.items()}
    return {
        "sets": made,
        "fetched": {name: found for name, found in fetched.items() if found is not None},
        "without_solutions": [name for name, found in fetched.items() if found is None],
        "cells": sum(len(line) for line in cells().values()),
        "different": [f"{name}.{key}" for name in benchmarks() for key in differing(name)],
    }
