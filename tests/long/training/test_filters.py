"""Filters of groups without signal: worlds that are killed and go on, and gradients of the rows that stay."""

from pathlib import Path
from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", ["off", "skip", "refill", "difficulty"])
def test_worlds_that_are_killed(mode: Any, is_async: bool, tmp_path: Path) -> None:
    from tests.long.training.filters_world import World, play, play_killed

    steps = 12
    plain = play(World(mode, is_async, 1, steps, rows=40), steps)
    killed = World(mode, is_async, 1, steps, rows=40)
    assert not +play_killed(killed, 4, 3, steps, tmp_path)
    counts = plain.found.counts
    assert (counts["wrong"], counts["in_vain"]) == (0, 0)
    assert counts["signal"] < counts["groups"]
    if not is_async:
        assert killed.buffer.filter.state() == plain.buffer.filter.state()
    metrics = plain.buffer.metrics()
    assert ("rollout/filter/groups" in metrics) is (mode != "off")
    assert ("rollout/filter/pool/mixed" in metrics) is (mode == "difficulty")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_worlds_and_gradients() -> None:
    from tests.long.training.filters import faults_of, gradients, simulated

    assert faults_of(simulated(range(4), 40) | {"gradient": gradients(40)}) == {}


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_real_run_with_a_filter(tmp_path: Path) -> None:
    from tests.long.training.filters import faults_of, real

    assert faults_of(real(["difficulty"], [0], 3, tmp_path)) == {}
