"""The checks of `verl-multiturn doctor`. Heavy packages such as verl and torch are checked in separate processes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.errors import ConfigError
from verl_multiturn.install import FLASH_ATTN_VERSION
from verl_multiturn.runs.ray_start import load_text, problems, temp_folder
from verl_multiturn.runs.version_sets import Judgement, installed, judge
from verl_multiturn.sandbox.control_groups import find_parent
from verl_multiturn.sandbox.launch import SandboxError, check
from verl_multiturn.sandbox.settings import SandboxSettings

_ROOT = Path(__file__).resolve().parents[2]
# Packages with SGLang's kernels, which only a GPU needs.
_KERNELS = {"sglang-kernel": "0.4.2.post2", "flashinfer-python": "0.6.11.post1", "flash-attn-4": "4.0.0b15"}
FLASH_ATTN = "flash-attn"
WITHOUT_FLASH_ATTN = "--variant without_flash_attn"
_GB = 1e9


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check."""

    what: str
    """Name of the thing that was checked."""
    ok: bool
    found: str
    """State in which it was found."""
    remedy: str = ""
    """Advice; empty when the check passed. Where it passed all the same, this is a warning."""


def examine(gpu: bool = False) -> list[DoctorFinding]:
    """Check versions, the needs of a start of Ray, the sandbox, and whether verl knows the plugin.

    Args:
        gpu: Whether to check also the needs of GPU runs alone.
    """
    remedy = install_command(gpu or _has_gpu())
    judgement = judge()
    findings = [_python(), *_versions(judgement, remedy)]
    findings += [_version(name, version, remedy) for name, version in _KERNELS.items() if gpu]
    complete = all(finding.found != _MISSING for finding in findings)
    findings += [_free_disk(), _ray(), _load(), _shared_memory(gpu), _sandbox()]
    if gpu:
        findings += [_flash_attn(remedy), _gpu(remedy), cuda_compiler()]
    if complete:
        findings += _registration(judgement, remedy)
    return findings


def install_command(gpu: bool) -> str:
    """Return the command that installs, or repairs, the whole environment.

    It is one command, because a single package that is installed by hand may replace versions of others.

    Args:
        gpu: Whether the environment is for a GPU.
    """
    without = " --without-flash-attn" if gpu and _installed(FLASH_ATTN) is None else ""
    fits = sys.prefix != sys.base_prefix and sys.version_info[:2] == ((3, 12) if gpu else (3, 11))
    script = _ROOT / "scripts" / ("install_gpu.sh" if gpu else "environment.sh")
    if not script.is_file():  # the wheel
        place = f"{shlex.quote(sys.prefix)} --repair" if fits else "DIR"
        return f"verl-multiturn install {'gpu' if gpu else 'cpu'} {place}{without}"
    place = f" --venv {sys.prefix}" if gpu and fits else ""
    return f"bash {script}{without}{place}"


def has_flash_attn() -> bool:
    """Return whether flash-attn is installed. flash-attn-4 is another package, with the same import name."""
    return _installed(FLASH_ATTN) is not None


_MISSING = "not installed"
_PATIENCE_S = 300
"""Seconds that a probe in a process of its own may take."""


def _has_gpu() -> bool:
    """Return whether this environment is meant for a GPU, as far as that can be known without torch."""
    platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
    return platform != "cpu" if platform else shutil.which("nvidia-smi") is not None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> DoctorFinding:
    found = sys.version.split()[0]
    ok = sys.version_info[:2] in ((3, 11), (3, 12))
    return DoctorFinding("Python", ok, found, "" if ok else "use Python 3.11 or 3.12")


def _version(name: str, expected: str, remedy: str) -> DoctorFinding:
    found = _installed(name)
    if found is None:
        return DoctorFinding(name, False, _MISSING, remedy)
    same = found.split("+")[0] == expected
    return DoctorFinding(name, same, found, "" if same else f"written for {expected}: {remedy}")


def _versions(judgement: Judgement, remedy: str) -> list[DoctorFinding]:
    """Report which set of versions this is, and the faults of its packages."""
    accepted = judgement.verdict != "refused"
    locks = " or ".join(judgement.nearest.locks)
    found = f"{'' if judgement.verdict == 'supported' else 'nearest: '}{judgement.nearest.name} ({locks})"
    findings = [DoctorFinding("set of versions", accepted, found, "" if accepted else remedy)]
    versions = installed()
    for name in judgement.nearest.versions:
        why = judgement.wrong.get(name, "")
        good = not why or (accepted and name in versions)
        findings.append(DoctorFinding(name, good, versions.get(name, _MISSING), why))
    return findings


def _free_disk() -> DoctorFinding:
    folder, setting = temp_folder({}, os.environ)
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    free_gb = shutil.disk_usage(there).free / _GB
    remedy = "" if free_gb > 2 else f"Ray needs 2 GB there; free it, or set another folder ({setting})"
    return DoctorFinding(f"space in {there} (Ray)", free_gb > 2, f"{free_gb:.0f} GB free", remedy)


def _ray() -> DoctorFinding:
    """Look at the places that a Ray which is started here needs."""
    found = [problem.partition("; ") for problem in problems({}, os.environ)]
    if found:
        what, remedy = ("; ".join(parts[at] for parts in found) for at in (0, 2))
        return DoctorFinding("start of Ray", False, what, remedy)
    return DoctorFinding(
        "start of Ray", True, f"its token and its sessions ({temp_folder({}, os.environ)[0]}) can be written"
    )


def _load() -> DoctorFinding:
    """Look whether a start of Ray is in doubt, which waits for its processes for a fixed time."""
    load, is_busy = load_text()
    remedy = "Ray waits 30 s for its processes, and may not start now: wait until the load is lower" if is_busy else ""
    return DoctorFinding("load of this machine", True, load, remedy)


def _sandbox() -> DoctorFinding:
    """Run a program in a sandbox with the isolation that tools and rewards have unless a setting changes it."""
    settings = SandboxSettings.model_validate({})
    try:
        check(settings)
    except (ConfigError, SandboxError) as error:
        found, _, remedy = str(error).partition("; ")
        return DoctorFinding("sandbox", False, found, f"only tools and rewards that run code need it: {remedy}")
    limits = "a control group for each sandbox" if find_parent() else "no control groups, so a supervisor counts"
    return DoctorFinding("sandbox", True, f"a program ran, isolation {settings.isolation}, {limits}")


def _shared_memory(gpu: bool) -> DoctorFinding:
    """Look at the shared memory: NCCL needs it, and Ray's objects lie on the disk where it is small."""
    total_gb = shutil.disk_usage("/dev/shm").total / _GB
    remedy = "" if total_gb > 1 else "containers begin with 64 MB: docker run --shm-size=16g"
    return DoctorFinding("shared memory", total_gb > 1 or not gpu, f"{total_gb:.1f} GB", remedy)


class _ProgramEnd(NamedTuple):
    """How a Python program in a process of its own ended."""

    ok: bool
    lines: list[str]
    """Its output; of a program that failed its error output."""
    is_late: bool = False

    def advice(self, otherwise: str) -> str:
        """Return the remedy for a program that failed: one that was only late shows nothing about packages."""
        return (
            f"start this command again when the machine is less busy ({load_text()[0]})" if self.is_late else otherwise
        )


def _python_says(program: str) -> _ProgramEnd:
    """Run a Python program in a separate process, for at most `_PATIENCE_S` seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return _ProgramEnd(
            False, [f"no answer within {_PATIENCE_S} s: the machine is busy, or an import hangs"], is_late=True
        )
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return _ProgramEnd(done.returncode == 0, said or [f"no message (exit status {done.returncode})"])


def _flash_attn(remedy: str) -> DoctorFinding:
    """Check flash-attn.

    A wheel that was built for another torch installs, but cannot be imported. flash-attn also has a `flash_attn.cute`
    of its own, which SGLang's (from flash-attn-4) must have replaced.
    """
    what, found = FLASH_ATTN, _installed(FLASH_ATTN)
    if found is None:
        return DoctorFinding(what, True, f"{_MISSING}: recipes need {WITHOUT_FLASH_ATTN}")
    if found.split("+")[0] != FLASH_ATTN_VERSION:
        return DoctorFinding(what, False, found, f"written for {FLASH_ATTN_VERSION}: {remedy}")
    said = _python_says("import torch, flash_attn_2_cuda")
    if not said.ok:
        another = f"built for another torch or CUDA; another wheel: {remedy}"
        return DoctorFinding(what, False, f"{found}: {said.lines[-1]}", said.advice(another))
    replaced = [file for file in importlib.metadata.files("flash-attn-4") or [] if _is_another(file)]
    if replaced:
        return DoctorFinding(what, False, f"its {replaced[0]} is in the place of flash-attn-4's", remedy)
    return DoctorFinding(what, True, found)


def _is_another(file: importlib.metadata.PackagePath) -> bool:
    """Return whether a package's file is missing, or has another size than the package recorded."""
    path = Path(str(file.locate()))
    return file.size is not None and (not path.is_file() or path.stat().st_size != file.size)


_PROBE = """
import json, torch
torch.cuda.init()
free, total = torch.cuda.mem_get_info(0)
print(json.dumps({
    "name": torch.cuda.get_device_name(0), "count": torch.cuda.device_count(), "cuda": torch.version.cuda,
    "capability": torch.cuda.get_device_capability(0), "free": free, "total": total,
}))
"""


def _gpu(remedy: str) -> DoctorFinding:
    platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if platform == "cpu":
        return DoctorFinding("GPU", False, "VERL_PLATFORM='cpu' asks for a run without one", "unset it")
    if _installed("torch") is None:
        return DoctorFinding("GPU", False, "torch is not installed, so that nothing is known of it", remedy)
    said = _python_says(_PROBE)
    if not said.ok:
        elsewhere = said.advice("start it on a machine with a GPU")
        return DoctorFinding("GPU", False, f"none that torch can use: {said.lines[-1]}", elsewhere)
    return judge_gpu(json.loads(said.lines[-1]))


def judge_gpu(gpu: dict[str, Any]) -> DoctorFinding:
    """Judge the first GPU.

    Args:
        gpu: The GPU as `_PROBE` describes it: compute capability as two numbers, memory in bytes.
    """
    free_gb, total_gb = gpu["free"] / _GB, gpu["total"] / _GB
    major, minor = gpu["capability"]
    found = (
        f"{gpu['count']} × {gpu['name']}, compute capability {major}.{minor}, {free_gb:.0f} of {total_gb:.0f} GB free, "
        f"CUDA {gpu['cuda']}"
    )
    if major < 8:
        return DoctorFinding(
            "GPU", False, found, "bfloat16 and FlashAttention need compute capability 8.0 (Ampere) or newer"
        )
    if free_gb < 8:
        return DoctorFinding("GPU", False, found, "another program holds its memory (nvidia-smi); 8 GB must be free")
    return DoctorFinding("GPU", True, found)


def cuda_compiler() -> DoctorFinding:
    """Look for CUDA's compiler where SGLang looks: it compiles kernels for this GPU when it first needs them."""
    what = "CUDA compiler"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    remedy = "SGLang compiles kernels when they are first used: install CUDA 13's toolkit, or set CUDA_HOME to it"
    if not os.access(found, os.X_OK):
        return DoctorFinding(what, False, f"no nvcc at {found}", remedy)
    # The name by which torch's loader of extensions asks for it.
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    if shutil.which(compiler) is None:
        remedy = "install g++, which brings c++; or set CXX to the compiler that there is"
        return DoctorFinding(what, False, f"{found}, but no C++ compiler {compiler!r}", remedy)
    return DoctorFinding(what, True, found)


_REGISTERED = """
import verl
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import _ROLLOUT_REGISTRY as rollouts
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as loops
assert ('sglang_async', 'async') in rollouts, 'rollout sglang_async is not registered'
from verl_multiturn.verl_bridge.servers.registrations import another_class
found = another_class()
assert found is None, f'{found.place} has {found.name} under the name sglang: sglang_async cannot run'
assert 'multiturn_agent' in loops, 'agent loop multiturn_agent is not registered'
print('platform:', get_platform().device_name)
"""


# As `verl_bridge/compat/contract.py` prints it on the command line; here in the process that has imported verl already.
_NAMES = """
import json
from verl_multiturn.verl_bridge.compat.contract import check, read
print(json.dumps({"names": len(read()), "faults": check()}))
"""


def _registration(judgement: Judgement, remedy: str) -> list[DoctorFinding]:
    """Check that `import verl` registers the plugin, and that all names of verl, SGLang and Ray that it uses are there.

    A separate process makes the registrations of a run.
    """
    plugin = "plugin in verl"
    said = _python_says(_REGISTERED + _NAMES)
    if said.ok:
        platform, names = said.lines[-2:]
        return [DoctorFinding(plugin, True, f"registered; {platform}"), _names(names, judgement, remedy)]
    last, policy = said.lines[-1], os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if policy != "auto" and not said.is_late:
        return [DoctorFinding(plugin, False, last, f"VERL_USE_EXTERNAL_PLUGINS={policy!r} keeps plugins out; unset it")]
    finding = DoctorFinding(plugin, False, last, said.advice(remedy))
    if judgement.verdict == "supported" or said.is_late:
        return [finding]
    # A name that is missing may be why it did not register.
    asked = _python_says(_NAMES)
    return [finding, _names(asked.lines[-1], judgement, remedy)] if asked.ok else [finding]


def _names(said: str, judgement: Judgement, remedy: str) -> DoctorFinding:
    """Judge the JSON output of the contract's check."""
    found = json.loads(said)
    what, faults = "names that we use", found["faults"]
    if not faults:
        return DoctorFinding(what, True, f"all {found['names']} are there")
    why = "a package is not as it was released" if judgement.verdict == "supported" else "these versions do not fit"
    return DoctorFinding(what, False, "; ".join(faults), f"{why}: {remedy}")
