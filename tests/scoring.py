"""Scoring of a text as verl's reward worker does it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.idle_loop import hold_up
from verl_multiturn.rewards import compute_score

KEYS = ("score", "acc", "format", "answered", "timed_out", "failed", "outage", "unjudgeable")

RIGHT = (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
RIGHT_UNFORMATTED = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
WRONG = (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
WRONG_UNFORMATTED = (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
NO_ANSWER = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
TIMED_OUT = (0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)
FAILED = (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
OUTAGE = (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
UNJUDGEABLE = (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0)

Numbers = tuple[float, ...]


async def score(data_source: str, text: str, ground_truth: Any, extra: Any = None, **options: Any) -> Numbers:
    """Return the values of `KEYS` for a conversation of one turn of our agent loop."""
    for patient in ("math", "reasoning_gym"):  # a busy machine may take long for an honest answer
        options[patient] = {"timeout_s": 60.0, **options.get(patient, {})}
    extra_info = {"assistant_texts": [text], "assistant_calls": [], "call_statuses": [], **(extra or {})}
    found = await compute_score(data_source, "what a tool said", ground_truth, extra_info, **options)
    assert list(found) == list(KEYS)
    assert all(type(value) is float for value in found.values())
    return tuple(found.values())


def block(program: str) -> str:
    """Return the text of a turn that ends with a program."""
    return f"<think>hm</think>Here it is:\n```python\n{program}\n```\nDone."


async def late(awaited: Coroutine[Any, Any, Numbers]) -> Numbers:
    """Await the score of an answer that never ends: its time is up, again and again."""
    scoring = asyncio.ensure_future(awaited)
    while not scoring.done():
        hold_up(200)
        await asyncio.wait({scoring}, timeout=0.05)
    return scoring.result()


def children(command: str) -> set[int]:
    """Return the processes that this one started and that run `command`."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        for process in (thread / "children").read_text().split():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if command in Path("/proc", process, "cmdline").read_text():
                    found.add(int(process))
    return found
