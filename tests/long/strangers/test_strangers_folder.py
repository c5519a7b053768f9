"""A stranger's folder is data, and nothing but data: some cases of each kind, and all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.sample_records import sample_run

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("words", "least"), [(["--short"], 80), pytest.param([], 1000, marks=pytest.mark.long)], ids=["short", "whole"]
)
def test_no_command_does_more_than_read_a_strangers_folder(words: list[str], least: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "benchmarks.strangers_folder", *words]
    ran = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["holds"]
    assert summary["runs"] >= least


_SCRIPT = ["-P", "-c", "from verl_multiturn.cli.main import main; main()"]
_MODULE = ["-m", "verl_multiturn.cli"]


@pytest.mark.parametrize(
    ("start", "words", "status"),
    [
        (_SCRIPT, ["show", "."], 0),
        (_MODULE, ["show", "."], 0),
        (_SCRIPT, ["replay", "."], 2),
        (_MODULE, ["probe", ".", "--recipe", "quickstart"], 2),
        (_SCRIPT, ["eval", "model", "--recipe", "quickstart"], 2),
    ],
)
def test_a_strangers_folder_is_the_current_one_and_nothing_of_it_is_imported(
    tmp_path: Path, start: list[str], words: list[str], status: int
) -> None:
    sample_run(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("pandas", "omegaconf", "torch", "transformers", "pyarrow", "yaml"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()")
    command = [sys.executable, *start, *words]
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert ran.returncode == status
    assert not (tmp_path / "imported").exists()
