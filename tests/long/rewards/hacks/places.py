"""Parts that the cases of a reward need: a database, a judge on loopback, entries of data sets."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.long.rewards.hacks import rubric_reply
from tests.long.rewards.hacks.judge_reply import reply
from tests.long.rewards.parity.judged import judging

_GYM = (
    *("chain_sum", "basic_arithmetic", "countdown", "mini_sudoku", "word_ladder"),
    *("polynomial_multiplication", "knights_knaves", "quantum_lock", "tower_of_hanoi"),
    *("game_of_life_halting", "gsm_symbolic", "kakurasu", "survo", "sokoban", "simple_integration"),
)


@contextlib.contextmanager
def places(reward: str) -> Iterator[dict[str, str]]:
    """Return the placeholders in the cases of a reward, with their values."""
    with contextlib.ExitStack() as stack:
        found: dict[str, str] = {}
        if reward == "tool_n1":
            found["$paris"] = json.dumps({"name": "weather", "arguments": {"city": "Paris", "days": 2}})
        if reward == "sql":
            found["$root"] = stack.enter_context(tempfile.TemporaryDirectory())
            _make_shop(Path(found["$root"], "shop"))
        if reward == "judge":
            found["$url"] = stack.enter_context(judging(reply))
        if reward == "rubric":
            found["$url"] = stack.enter_context(judging(rubric_reply.reply))
        if reward == "reasoning_gym":
            found |= _entries()
        yield found


def _make_shop(folder: Path) -> None:
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "shop.sqlite")) as database:
        database.executescript(Path(__file__).with_name("shop.sql").read_text(encoding="utf-8"))


def _entries() -> dict[str, str]:
    import reasoning_gym

    entries: dict[str, Any] = {name: reasoning_gym.create_dataset(name, seed=11, size=1)[0] for name in _GYM}
    metadata = {name: entry["metadata"] for name, entry in entries.items()}
    return {
        **{f"${name}": json.dumps(entry, default=str) for name, entry in entries.items()},
        **{f"${name}.answer": str(entry["answer"]) for name, entry in entries.items()},
        "$countdown.target": str(metadata["countdown"]["target"]),
        "$word_ladder.start": metadata["word_ladder"]["start_word"],
        "$word_ladder.end": metadata["word_ladder"]["end_word"],
        "$lock_and_more": f"{entries['quantum_lock']['answer']}\nI guess",
    }
