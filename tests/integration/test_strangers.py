"""A stranger's folder is data, and nothing but data: the short form of `benchmarks.strangers_folder`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.sample_records import sample_run


@pytest.mark.stack
@pytest.mark.slow
def test_no_command_does_more_than_read_a_strangers_folder() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "benchmarks.strangers_folder", "--short"]
    ran = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["holds"]
    assert summary["runs"] >= 80


def test_a_command_that_reads_a_folder_imports_nothing_from_it(tmp_path: Path) -> None:
    sample_run(tmp_path)
    (tmp_path / "pandas.py").write_text("open('imported', 'w').close()")
    program = "from verl_multiturn.cli.main import main; main()"
    words = [sys.executable, "-P", "-c", program, "show", "."]
    ran = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert ran.returncode == 0
    assert not (tmp_path / "imported").exists()
