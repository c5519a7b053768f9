"""Verdicts on τ²'s tasks are its own, and no two conversations share a world."""

import asyncio

import pytest

from tests.long.task_sets.tau2 import measure


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_verdicts_and_worlds() -> None:
    found = asyncio.run(measure(short=False))
    assert found["different"] == []
    assert set(found["gold"].values()) == {1.0}
    assert found["compared"] > sum(found["tasks"].values())
    assert (found["shared"], found["control_shared"] > 0) == (0, True)
