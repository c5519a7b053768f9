"""Are recorded conversations made again as they were, and is a change of our code found?

    python -m benchmarks.replay [--count 4] [--families quickstart qwen3 llama3.1]

The benchmark has two parts:
1. It records conversations on scripted engines and makes them again: the hard ones of `honest.py`, with
   mistakes of the model beside them; several rows; clocks that run out in a generation, a tool, a user and a reward;
   pictures; parallel calls. And sessions: those of the agent programs whose requests are in `tests/data`, some of whose
   answers get lost, and those of agents that chance drives. Every difference is a false one.
2. It makes them again with each of 24 changes of our code (`replay_changes.py`). A change is found if a replay
   names it with turn, field and token where it shows first.

The last line is one JSON object.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from verl.utils.tokenizer import hf_processor

from tests.integration.vision_models import save_processor
from tests.long.tokens.replay_changes import CHANGES, finds
from tests.long.tokens.replay_worlds import World, all_conversations, images, one_chat_each, programs
from verl_multiturn.replay.calls import ReplayDifference
from verl_multiturn.verl_bridge.offline.replay.command import shown


async def make_worlds(families: Sequence[str], count: int, folder: Path) -> list[World]:
    """Record all conversations and sessions.

    Args:
        families: Names of model families.
        count: Conversations of each situation and family, sessions of chance, and conversations with pictures.
        folder: Folder for the processors.
    """
    worlds = [await programs(3 * count), *await all_conversations(families, count)]
    for kind in ("qwen2_5_vl", "qwen3_vl"):
        save_processor(folder / kind, kind)
        worlds.append(await images(hf_processor(str(folder / kind)), kind, range(count)))
    return worlds


async def differing(worlds: Sequence[World]) -> dict[str, Sequence[ReplayDifference]]:
    """Make everything again; return the differences of each conversation that has some."""
    found = {}
    for world in worlds:
        for record in world.records:
            played = await world.play(record)
            if played.differences or played.skipped:
                found[played.request_id] = played.differences
    return found


async def run(families: Sequence[str], count: int) -> dict[str, Any]:
    """Run both parts, print their findings, and return the figures."""
    with tempfile.TemporaryDirectory() as folder, one_chat_each():
        worlds = await make_worlds(families, count, Path(folder))
    records = [record for world in worlds for record in world.records]
    began = time.process_time()
    false = await differing(worlds)
    cpu_ms = 1000 * (time.process_time() - began) / len(records)
    for name, differences in false.items():
        print(f"false difference: {name}: {shown(differences[0]) if differences else 'skipped'}")
    table = Table("change", "conversations that differ", "found as", title="changes of our code")
    found = 0
    for name, change in CHANGES.items():
        with change.made():
            seen = await differing(worlds)
        first = finds(change, seen)
        found += first is not None
        table.add_row(name, str(len(seen)), "NOT FOUND" if first is None else shown(first)[:100])
        if first is None:
            print(f"not found: {name}: {Counter(each[0].field for each in seen.values() if each)}")
    Console(width=200).print(table)
    return {
        "conversations": sum(record["session"] is None for record in records),
        "sessions": sum(record["session"] is not None for record in records),
        "several_rows": sum(len(record["rows"]) > 1 for record in records),
        "time_up": sum(record["time_up"] is not None for record in records),
        "same": len(records) - len(false),
        "different": len(false),
        "changes": len(CHANGES),
        "found": found,
        "cpu_ms_each": round(cpu_ms, 2),
    }
