"""The simulation of a cache that is too small, with a few conversations."""

import pytest

from benchmarks import async_sim_cache
from benchmarks.async_sim_cache import Rollout, failures, faster


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_sim_cache, "CACHE", 60_000)


def test_nothing_changes_where_the_cache_suffices() -> None:
    assert faster([0.8]) == {"0.8": {"faster": 1.0, "read": 1.0}}


def test_turns_that_wait_are_read_once() -> None:
    found = faster([3.6])
    assert found["3.6"]["read"] < 0.5
    rollout = Rollout(3.6, holds=True)
    rollout.run()
    assert not rollout._live
    assert not rollout._held


def test_slow_tools_make_no_step_slower() -> None:
    """While the tools of the older conversations take a minute, the younger ones go on."""
    assert faster([3.6], tool_s=60.0)["3.6"]["faster"] >= 0.9


def test_a_step_that_is_not_faster_fails() -> None:
    assert failures({"0.8": {"faster": 1.0}, "3.6": {"faster": 1.6}}) == []
    assert failures({"0.8": {"faster": 0.98}, "3.6": {"faster": 1.6}}) == [
        "at 0.8 times the cache a step is 0.98 times as fast, at least 0.99"
    ]
