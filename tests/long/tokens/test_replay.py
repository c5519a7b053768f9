"""Every kind of conversation is made again from the disk without a difference, and a change of our code is found.

The worlds: limits, contexts, tools, users, clocks, failures, images, agents' sessions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.verl_bridge.offline.replay.command import shown

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


async def differing(world: Any) -> list[str]:
    """Make the conversations of a world again; return their differences, and why one was skipped."""
    played = [await world.play(record) for record in world.records]
    return [line for each in played for line in (*map(shown, each.differences), *filter(None, [each.skipped]))]


async def test_conversations_in_every_situation() -> None:
    from tests.long.tokens.replay_worlds import all_conversations, one_chat_each

    with one_chat_each():
        worlds = await all_conversations(["quickstart"], 3)
        found = {world.name: await differing(world) for world in worlds}
    records = [record for world in worlds for record in world.records]
    # Sources of the kinds: replies of a user, calls, several rows, a time that was up, and generations in no row.
    assert {bool(record["replies"]) for record in records} == {True, False}
    assert {bool(record["calls"]) for record in records} == {True, False}
    assert {len(record["rows"]) > 1 for record in records} == {True, False}
    assert {record["valid"] for record in records} == {True, False}
    assert any(each["cause"] is not None for record in records for each in record["generations"])
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
async def test_conversations_with_images(kind: str, tmp_path: Path) -> None:
    from verl.utils.tokenizer import hf_processor

    from tests.integration.vision_models import save_processor
    from tests.long.tokens.replay_worlds import images

    save_processor(tmp_path, kind)
    world = await images(hf_processor(str(tmp_path)), kind, range(2))
    assert [bool(record["rows"][0]["images"]) for record in world.records] == [True, True]
    assert await differing(world) == []


async def test_sessions_of_agents() -> None:
    from tests.long.tokens.replay_worlds import programs

    world = await programs(4)
    assert "undelivered" in {each["cause"] for record in world.records for each in record["generations"]}
    assert await differing(world) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_each_family_and_each_change() -> None:
    from tests.long.tokens.honest import FAMILIES
    from tests.long.tokens.replay import run

    figures = await run(list(FAMILIES), 4)
    assert figures["different"] == 0
    assert figures["found"] == figures["changes"] == 24
    assert min(figures["conversations"], figures["sessions"], figures["several_rows"], figures["time_up"]) > 0
