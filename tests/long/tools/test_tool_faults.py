"""Faults of tools and engines end in valid conversations and leave nothing; and the suite finds errors."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.idle_loop import hold_up

pytestmark = pytest.mark.stack


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_many_conversations_end_valid_and_leave_nothing() -> None:
    from tests.long.tools import tool_faults

    result = await tool_faults.measure(conversations=2000, seed=0)
    wanted = {"invalid": 0, "leaks": 0, "over_budget": 0, "author_errors": 40, "groups_incomplete": 0}
    assert {key: result[key] for key in wanted} == wanted


async def test_every_fault_ends_in_a_valid_conversation_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.long.tools import tool_faults

    monkeypatch.setattr(tool_faults, "AUTHORS", 12)  # in conversations 88 to 95 the tool's author made a mistake
    # This seed draws each fault of `execute`, of the engine and of a call, and all but one of those of a lifetime.
    result = await tool_faults.measure(conversations=96, seed=217)
    assert result["faults"] > 500
    wanted = {"invalid": 0, "leaks": 0, "over_budget": 0, "author_errors": 8, "groups_incomplete": 0}
    assert {key: result[key] for key in wanted} == wanted


@pytest.mark.parametrize("is_broken", [False, True])
async def test_the_suite_finds_conversations_that_ignore_their_budget(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    from tests.long.tools import tool_faults
    from verl_multiturn.rollout import conversation

    answers = asyncio.Event()

    async def waits(self: Any, *arguments: Any, **kwargs: Any) -> str:
        await answers.wait()
        return "ok"

    async def let_time_pass() -> None:
        for _ in range(40):
            await asyncio.sleep(0.001)
            hold_up(1.0)
        answers.set()

    monkeypatch.setattr(tool_faults, "TIMEOUT_S", 1000.0)  # of one call: only the conversation's own limit remains
    monkeypatch.setattr(tool_faults, "WALL_CLOCK_S", 2.0)
    monkeypatch.setattr(tool_faults.FaultyTool, "execute", waits)
    if is_broken:
        without = SimpleNamespace(**{**vars(asyncio), "timeout": lambda _: asyncio.timeout(None)})
        monkeypatch.setattr(conversation, "asyncio", without)
    passing = asyncio.create_task(let_time_pass())
    result = await tool_faults.measure(conversations=8, seed=1)
    await passing
    assert (result["over_budget"], result["invalid"]) == (8 if is_broken else 0, 0)


async def test_the_suite_finds_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.long.tools import tool_faults

    async def forgets(self: Any, instance_id: str, **kwargs: Any) -> None:
        (self.root / f"{self.name}-{instance_id}-too").mkdir()

    monkeypatch.setattr(tool_faults.FaultyTool, "release", forgets)
    result = await tool_faults.measure(conversations=8, seed=1)
    assert result["leaks"] >= 3 * 16  # both folders of both tools, and a `create` without `release` for each


async def test_the_suite_finds_a_conversation_that_is_not_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.long.tools import tool_faults
    from verl_multiturn.rollout.trajectory import Trajectory

    append = Trajectory.append_context

    def shifted(self: Trajectory, ids: list[int], source: Any) -> None:
        append(self, ids, source)
        if ids:
            self.mask[-1] = 1

    monkeypatch.setattr(Trajectory, "append_context", shifted)
    result = await tool_faults.measure(conversations=8, seed=1)
    assert result["invalid"] >= 7
    assert result["groups_incomplete"] == 1
