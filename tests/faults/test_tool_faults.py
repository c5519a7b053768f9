"""The fault suite of `benchmarks.tool_faults`, smaller; and a check that the suite finds leaks."""

from typing import Any

import pytest

pytestmark = pytest.mark.stack


async def test_every_fault_ends_in_a_valid_conversation_and_leaves_nothing() -> None:
    from benchmarks.tool_faults import measure

    # In conversations 392 to 399 the tool's author made a mistake.
    result = await measure(conversations=400, seed=1)
    assert result["faults"] > 2000
    wanted = {"invalid": 0, "leaks": 0, "over_budget": 0, "author_errors": 8, "groups_incomplete": 0}
    assert {key: result[key] for key in wanted} == wanted


async def test_the_suite_finds_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tool_faults

    async def forgets(self: Any, instance_id: str, **kwargs: Any) -> None:
        (self.root / f"{self.name}-{instance_id}-too").mkdir()

    monkeypatch.setattr(tool_faults.FaultyTool, "release", forgets)
    result = await tool_faults.measure(conversations=8, seed=1)
    assert result["leaks"] >= 3 * 16  # both folders of both tools, and a `create` without `release` for each


async def test_the_suite_finds_a_conversation_that_is_not_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tool_faults
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
