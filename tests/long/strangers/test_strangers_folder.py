"""A stranger's folder is data, and nothing but data: some cases of each kind, and all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.long.strangers.strangers_watch import wait_for
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


_MAPS = "import mmap; held = mmap.mmap(open('weights', 'rb').fileno(), 0, access=mmap.ACCESS_READ); held[::4096]"


@pytest.mark.parametrize(("code", "least", "most"), [("held = b'1' * (96 << 20)", 96, 160), (_MAPS, 0, 64)])
def test_memory_is_counted_without_the_pages_of_files(tmp_path: Path, code: str, least: int, most: int) -> None:
    (tmp_path / "weights").write_bytes(b"1" * (96 << 20))
    with subprocess.Popen([sys.executable, "-c", f"{code}; input()"], cwd=tmp_path, stdin=subprocess.PIPE) as process:
        seen = wait_for(process.pid, cpu_s=60.0, before=0)
    assert least <= seen["memory_mb"] <= most
