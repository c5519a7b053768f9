"""`doctor` about the machine: needs of a start of Ray, and parts that are only slow on a busy one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_multiturn.runs import doctor
from verl_multiturn.runs.version_sets import judge


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(file))
    monkeypatch.setenv("RAY_TMPDIR", str(file))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    found = doctor._ray()
    assert not found.ok
    assert found.found.startswith(
        f"HOME='{file}': Ray cannot write its token to '{file}/.ray' ({file}: Not a directory)"
    )
    assert f"RAY_TMPDIR='{file}': Ray cannot write its sessions there" in found.found
    assert found.remedy.startswith("set HOME to a folder that can be written, or RAY_AUTH_MODE=disabled")
    assert found.remedy.endswith("set RAY_TMPDIR to a folder that can be written")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert doctor._ray() == doctor.DoctorFinding(
        "start of Ray", True, "its token and its sessions (/tmp/ray) can be written"
    )


def test_the_disk_is_that_of_rays_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(free=1e9, total=9e9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    found = doctor._free_disk()
    assert (asked, found.ok, found.what) == ([tmp_path], False, f"space in {tmp_path} (Ray)")
    assert found.remedy == f"Ray needs 2 GB there; free it, or set another folder (RAY_TMPDIR='{tmp_path}/new')"


def test_a_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "load_text", lambda: ("load 15 on 2 cores", True))
    assert doctor._load() == doctor.DoctorFinding(
        "load of this machine",
        True,
        "load 15 on 2 cores",
        "Ray waits 30 s for its processes, and may not start now: wait until the load is lower",
    )
    monkeypatch.setattr(doctor, "load_text", lambda: ("load 1 on 2 cores", False))
    assert doctor._load().remedy == ""


@pytest.mark.parametrize(
    ("total", "gpu", "ok", "warned"),
    [(64e6, False, True, True), (64e6, True, False, True), (9e9, True, True, False)],
)
def test_small_shared_memory_is_a_fault_for_a_gpu_alone(
    total: float, gpu: bool, ok: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total))
    found = doctor._shared_memory(gpu)
    assert (found.ok, bool(found.remedy)) == (ok, warned)


@pytest.mark.parametrize("policy", ["auto", "none"])
def test_what_was_only_late_is_no_reason_to_install(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: Any, **named: Any) -> None:
        raise subprocess.TimeoutExpired("python", 300)

    monkeypatch.setattr(subprocess, "run", late)
    monkeypatch.setattr(doctor, "load_text", lambda: ("load 15 on 2 cores", True))
    monkeypatch.setattr(doctor, "_installed", lambda name: doctor.FLASH_ATTN_VERSION)
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    found = [*doctor._registration(judge(), "INSTALL"), doctor._flash_attn("INSTALL"), doctor._gpu("INSTALL")]
    again = "start this command again when the machine is less busy (load 15 on 2 cores)"
    assert [(each.ok, each.remedy) for each in found] == [(False, again)] * 3
    assert all("no answer within 300 s: the machine is busy, or an import hangs" in each.found for each in found)
