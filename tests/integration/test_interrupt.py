"""Interrupted generations of the real SGLang on the CPU; `benchmarks.interrupt` in a short form."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.engine

SHORT = "--k 4 13 --pauses 8 --every 0.2 --conversations 8 --control 1"


@pytest.mark.timeout(600)
def test_every_token_is_what_the_engine_sampled() -> None:
    command = [sys.executable, "-m", "benchmarks.interrupt", *SHORT.split()]
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    right = {"real": 8, "wrong": 0, "unlike_their_version": 0, "not_flushed": 0, "faults": {}}
    assert {name: result[name] for name in right} == right, done.stdout
    assert result["positions"] > 20
    assert result["compared"] > 100
    assert 8 < result["trajectories"] < result["attempts"]
