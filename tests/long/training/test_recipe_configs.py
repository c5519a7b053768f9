"""Every GPU configuration of every recipe is accepted, by verl's checks and ours."""

import json

import pytest

from tests.support.warm_python import run_warm

pytestmark = pytest.mark.stack


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "words", [("--short",), pytest.param((), marks=pytest.mark.long)], ids=["one recipe", "each recipe"]
)
def test_every_gpu_configuration_is_accepted(words: tuple[str, ...]) -> None:
    """In a process of its own, whose platform is not the CPU."""
    ran = run_warm("-m", "benchmarks.recipe_configs", *words, timeout_s=3500)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["failed"] == []
    assert found["recipes"] >= 10
    assert found["variants"] >= found["recipes"] * 2
    assert {name: found["steps"][name] for name in ("retool", "retool+ppo", "search_r1", "smollm2")} == {
        "retool": 3300,
        "retool+ppo": 1600,
        "search_r1": 1005,
        "smollm2": 12,
    }
