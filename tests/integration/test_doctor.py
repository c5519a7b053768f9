"""`verl-multiturn doctor` as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

COMMAND = str(Path(sys.executable).parent / "verl-multiturn")


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "doctor"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def test_all_is_well_in_the_locked_environment() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "platform: cpu" in done.stdout


def test_it_says_when_verl_does_not_load_the_plugin() -> None:
    done = run(VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 1
    assert "sglang_async is not registered" in done.stdout
    assert "unset it" in done.stdout
