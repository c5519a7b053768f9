"""The locks of the two environments, their scripts' refusals before they install anything, and the lanes of tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import ROOT
from verl_multiturn.runs import doctor
from verl_multiturn.sandbox import launch
from verl_multiturn.sandbox.control_groups import find_parent

pytestmark = pytest.mark.slow

REQUIREMENTS = ROOT / "requirements"
INSTALL = ROOT / "scripts" / "install_gpu.sh"


def pins(name: str) -> dict[str, str]:
    """Return the versions by package in a lock or an override file; "" for a package that is excluded."""
    found = {}
    for line in (REQUIREMENTS / name).read_text().splitlines():
        if line := line.partition("#")[0].strip():
            package = re.split("[=;]", line)[0]
            found[re.sub("[-_.]+", "-", package).lower()] = line.partition("==")[2]
    return found


def test_the_gpu_lock_has_all_of_the_cpu_lock() -> None:
    cpu, gpu, overridden = pins("cpu.lock"), pins("gpu.lock"), pins("gpu.override")
    wanted = {name: overridden.get(name, version) for name, version in cpu.items()}
    differing = {name: (version, gpu.get(name)) for name, version in wanted.items() if gpu.get(name) != version}
    assert not differing, f"{differing}; make gpu.lock again, as requirements/gpu.in says"


def test_the_gpu_lock_has_what_only_gpus_need() -> None:
    gpu = pins("gpu.lock")
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.!+]*", version) for version in gpu.values())
    assert {name: gpu[name] for name in doctor._KERNELS} == doctor._KERNELS
    assert not {"llm", "llama-cpp-python", "flash-attn"} & set(gpu)  # built from their sources, or not needed


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.iterdir()), ids=lambda path: path.name)
def test_no_requirement_names_a_place(path: Path) -> None:
    assert "://" not in path.read_text()


def install(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(INSTALL), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--flashattn"], 2, "unknown argument '--flashattn'; expected --flash-attn WHEEL, "),
        (["--flash-attn"], 2, "--flash-attn needs a value"),
        (["--flash-attn", "gone.whl"], 2, "gone.whl': no such file"),
        (["--venv", str(ROOT / "tests")], 2, "exists and is no environment of Python 3.12; remove it"),
    ],
)
def test_a_wrong_command_installs_nothing(words: list[str], status: int, said: str) -> None:
    ran = install(*words)
    assert ran.returncode == status
    assert said in ran.stderr


def test_another_python_is_refused(tmp_path: Path) -> None:
    if sys.version_info[:2] == (3, 12):
        pytest.skip("this is the Python that it wants")
    ran = install("--without-flash-attn", "--venv", str(tmp_path / "venv"), PYTHON=sys.executable)
    assert ran.returncode == 2
    assert f"Python 3.12 is needed for 'gpu' and '{sys.executable}' is not it" in ran.stderr
    assert not (tmp_path / "venv").exists()


def test_a_build_of_flash_attn_needs_the_compiler_of_torchs_cuda(tmp_path: Path) -> None:
    # A stand-in for Python 3.12, which a machine need not have. Only its version is read before the check.
    for name, said in (
        ("python3.12", "echo 3 12 True /usr/bin/python3.12"),
        ("bin/nvcc", "echo 'release 12.8, V12.8.93'"),
    ):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{said}\n")
        file.chmod(0o755)
    python = str(tmp_path / "python3.12")
    ran = install("--venv", str(tmp_path / "venv"), PYTHON=python, CUDA_HOME=str(tmp_path))
    assert ran.returncode == 2
    assert f"needs CUDA 13's nvcc, and '{tmp_path}/bin/nvcc' is not it; set CUDA_HOME, or give " in ran.stderr
    assert not (tmp_path / "venv").exists()


def test_the_script_and_the_doctor_agree() -> None:
    assert f"flash-attn {doctor.FLASH_ATTN_VERSION} for Python 3.12" in INSTALL.read_text()
    assert doctor.install_command(gpu=True).startswith(f"bash {INSTALL}")
    assert doctor.install_command(gpu=False) == f"bash {ROOT / 'scripts' / 'environment.sh'}"
    variant = doctor.WITHOUT_FLASH_ATTN.removeprefix("--variant ")
    assert (ROOT / "recipes" / "common" / "config" / "variant" / f"{variant}.yaml").is_file()


def test_the_doctor_runs_a_program_in_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = "a control group for each sandbox" if find_parent() else "no control groups, so a supervisor counts"
    assert doctor._sandbox() == doctor.DoctorFinding("sandbox", True, f"a program ran, isolation bwrap, {limits}")
    launch.check.cache_clear()
    monkeypatch.setattr(launch, "find_bwrap", lambda: "/bin/false")
    found = doctor._sandbox()
    launch.check.cache_clear()
    assert not found.ok
    assert found.found.startswith("isolation 'bwrap' does not work here: ")
    assert found.remedy.startswith("only tools and rewards that run code need it: allow user namespaces")
    assert "or set isolation: subprocess" in found.remedy
    monkeypatch.setattr(launch, "Launch", Mock(side_effect=BlockingIOError(11, os.strerror(11))))
    found = doctor._sandbox()
    assert (found.ok, found.found) == (False, f"no sandbox could be started: [Errno 11] {os.strerror(11)}")


def test_the_environment_is_made_again_from_within_itself(tmp_path: Path) -> None:
    """An activated .venv whose lock has changed is removed while its Python is the first on the path."""
    for name in ("scripts/environment.sh", "scripts/install.sh", "verl_multiturn/install.py", "requirements/uv.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "setup.py").touch()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    for name in ("cpu", "templates"):
        (tmp_path / "requirements" / f"{name}.lock").touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    command = ["bash", str(tmp_path / "scripts" / "environment.sh")]
    how = {
        # Nothing is installed: there is no index.
        "env": {**environment, "PIP_NO_INDEX": "1", "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}"},
        "capture_output": True,
        "text": True,
        "check": False,
    }
    foreign = subprocess.run(command, **how)
    assert "is not empty; name a new folder, or remove it" in foreign.stderr  # it is the user's own
    (tmp_path / ".venv" / ".stamp").write_text("of another lock\n")
    made = subprocess.run(command, **how)
    assert made.returncode == 1
    assert (tmp_path / ".venv" / "bin" / "pip").is_file(), made.stderr
    assert (tmp_path / ".venv" / ".unfinished").read_text() == "made"
    python = tmp_path / ".venv" / "bin" / "python3"
    assert subprocess.run([python, "-c", ""], check=False).returncode == 0, made.stderr


@pytest.mark.parametrize(("words", "installed"), [(["--smoke"], 1), ([], 0), (["--smoke", "--print"], 0)])
def test_a_run_on_a_cpu_makes_its_environment_with_what_its_recipe_needs(
    tmp_path: Path, words: list[str], installed: int
) -> None:
    (tmp_path / "recipes" / "common").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "common" / "python.sh", tmp_path / "recipes" / "common")
    stand_ins = {
        "scripts/environment.sh": 'echo "$@" >>"$(dirname "$0")/../words.log"\n',
        "recipes/run.sh": 'set -eu\nextras=tasks\nsource "$(dirname "$0")/common/python.sh"\necho "$python"\n',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    command = ["bash", str(tmp_path / "recipes" / "run.sh"), *words]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == (f"{tmp_path}/.venv/bin/python\n" if words else "python\n")
    log = tmp_path / "words.log"
    assert (log.read_text() if log.exists() else "") == "--with tasks\n" * installed


def test_recipes_of_installed_task_sets_have_them_on_a_cpu() -> None:
    needs = re.compile(r"task_sets\.(bfcl|tau2|swe)\b")
    for run in ROOT.glob("recipes/*/run.sh"):
        files = [path for path in run.parent.rglob("*") if path.suffix in (".py", ".yaml")]
        needed = any(needs.search(path.read_text(encoding="utf-8")) for path in files)
        assert ("\nextras=tasks\n" in run.read_text()) is needed, run


def test_the_fast_lanes_have_every_file_once() -> None:
    lanes = re.findall(r"tests/unit/\S+[.]py", (ROOT / "scripts" / "test.sh").read_text())
    found = [path.name for lane in lanes for path in ROOT.glob(lane)]
    assert sorted(found) == sorted(path.name for path in (ROOT / "tests" / "unit").glob("test_*.py"))


def test_the_script_of_the_environment_knows_two_sets() -> None:
    wrong = subprocess.run(
        ["bash", str(ROOT / "scripts" / "environment.sh"), "--set", "nxt"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "unknown arguments '--set nxt'; expected none, or --set next" in wrong.stderr
