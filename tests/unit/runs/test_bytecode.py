"""Compiled code of a run's processes, where Python must write none."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_multiturn.runs import bytecode
from verl_multiturn.runs.bytecode import bytecode_variables
from verl_multiturn.runs.environment import environment_of
from verl_multiturn.runs.plan import plan_run


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give a machine whose packages are not compiled, and return its cache folder."""
    monkeypatch.setattr(bytecode, "_is_compiled", lambda: False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    return tmp_path / "cache"


def run_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """Import a module of a folder in a process of a run."""
    (folder / "mine.py").write_text("A = 1\n")
    plan = plan_run("quickstart", out=folder / "out")
    environment = environment_of(plan, {"recipe": {"on_cpu": True}})
    environment["PYTHONPATH"] = str(folder)
    command = [sys.executable, "-c", "import mine; print(mine.__cached__)"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_run_keeps_compiled_code_in_the_cache(bare: Path, tmp_path: Path) -> None:
    done = run_in(tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(bare / "verl-multiturn" / "bytecode")
    assert Path(done.stdout.strip()).is_file()
    assert not (tmp_path / "__pycache__").exists()


def test_a_cache_that_cannot_be_written_is_no_fault(bare: Path, tmp_path: Path) -> None:
    bare.write_text("a file, so that not even root makes a folder in it")
    done = run_in(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PYTHONDONTWRITEBYTECODE": ""},
        {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/mine"},
    ],
)
def test_what_the_user_says_stays(environment: dict[str, str]) -> None:
    assert bytecode_variables(environment) == {}


def test_compiled_packages_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "_is_compiled", lambda: True)
    assert bytecode_variables({"PYTHONDONTWRITEBYTECODE": "1"}) == {}
