"""Each setting of verl is read, refused or named: in every recipe with every variant, and in a traced run."""

import json

import pytest

from tests.support.warm_python import run_warm

pytestmark = pytest.mark.stack


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_each_setting_of_verl_is_read_refused_or_named() -> None:
    """In a process of its own, whose platform is not the CPU."""
    ran = run_warm("-m", "benchmarks.silent_settings", timeout_s=3500)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["wrong"], found["not_named"], found["recipes_with_a_message"]) == (0, [], 0)
    assert found["traced"] > 100
