"""Simulated users and environments: the figures of all their benchmarks in one line.

    python -m benchmarks.interactions [--wheel verl-0.6.1-py3-none-any.whl]

- verl's own old classes answer as they did (`benchmarks.interaction_old_classes`, which downloads verl's old wheel);
- hostile texts bring no control token in, and an answer costs little (`interaction_texts.py`);
- advantages are those of papers and the exact gradient (`benchmarks.interaction_advantages`);
- a step of an environment costs little, and one seed is one world (`benchmarks.interaction_envs`).

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.long.interactions import interaction_advantages as advantages
from tests.long.interactions import interaction_envs as envs
from tests.long.interactions import interaction_old_classes as old
from tests.long.interactions import interaction_texts as texts


def measure(
    wheel: Path | None = None, texts_each: int = texts.TEXTS, families: list[str] | None = None
) -> dict[str, Any]:
    """Return the figures of texts, advantages, speed and environments; print errors.

    Args:
        wheel: As in `interaction_old_classes.measure`.
        texts_each: Hostile texts for each family.
        families: Names of the families; None means all.
    """
    found = texts.hostile_texts(texts_each, families)
    for line in found.forged[:10]:
        print(line)
    print(f"left out, since no user turn can follow: {', '.join(found.refused) or 'none'}")
    print(f"turns in which a call or reasoning was read, so that there is nothing to compare: {found.calls}")
    step_ms, alone_ms = envs.env_step_p50_ms()
    theirs = old.measure(wheel)
    return {
        "old_classes": theirs["old_classes"],
        "old_same": theirs["old_same"],
        "families": found.families,
        "hostile_texts": found.texts,
        "hostile_conversations": found.conversations,
        "control_tokens": len(found.forged),
        **advantages.figures(),
        "reply_p50_ms": round(asyncio.run(texts.reply_ms(texts.Answers({}))), 3),
        "reply_in_thread_p50_ms": round(asyncio.run(texts.reply_ms(texts.AnswersInThread({}))), 3),
        "user_turn_p50_ms": round(asyncio.run(texts.user_turn_ms()), 3),
        "env_step_p50_ms": round(step_ms, 3),
        "env_alone_p50_ms": round(alone_ms, 3),
        "same_world": envs.same_world(),
    }
