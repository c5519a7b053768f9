"""The tokens of interrupted generations are those that the engine sampled."""

import json

import pytest

from tests.support.warm_python import run_warm

pytestmark = pytest.mark.stack


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_interrupted_generations_are_those_of_the_journal() -> None:
    """In a process of its own, which holds the engine."""
    ran = run_warm("-m", "benchmarks.interrupt", timeout_s=1700)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["wrong"], found["unlike_their_version"], found["not_flushed"], found["faults"]) == (0, 0, 0, {})
    assert found["real"] >= 200
    assert found["compared"] > found["excluded"]
