"""The trainer `separate_async` lends its devices to generation (`hybrid_rollout.enable_switch`), on the real stack."""

from pathlib import Path

import pytest

from tests.support.warm_python import of_run

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]


def test_slow_conversations_make_it_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short form of `python -m benchmarks.verl_features --only hybrid`, with a router of a user's own."""
    from benchmarks.verl_features import hybrid

    variables, words = of_run()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = hybrid(tmp_path, steps=3, more=words)
    assert found["hybrid_steps"] == 3
    assert found["hybrid_switches"] >= 1
    assert (found["hybrid_violations"], found["hybrid_beyond"]) == (0, 0)
    assert found["hybrid_servers"] == 2  # the trainer's own, and the one apart
    assert 0 < found["hybrid_cached"] < 1
