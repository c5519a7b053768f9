"""`doctor --gpu`: its requests to the trainer, and its verdicts. test_training.py runs the same code on the CPU."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.sample_records import sample_record
from verl_multiturn.runs.doctor import DoctorFinding, cuda_compiler, judge_gpu
from verl_multiturn.runs.first_run import judge_run, overrides, run_whole_path

pytestmark = pytest.mark.slow

GOOD = {
    "steps": 2,
    "tool_calls_per_trajectory": 0.3,
    "tool_error_rate": 0.0,
    "prob_diff_mean": 1e-3,
    "certificate_rows": 128,
    "certificate_violations": 0,
}


def write_run(out: Path, versions: dict[int, list[int]], **changes: Any) -> None:
    (out / "summary.json").write_text(json.dumps(GOOD | changes))
    records = [sample_record(step=0, validation=True, request_id="validated")]
    for step, found in versions.items():
        runs = [[1, 0, -1, 0, 0], *([1, 1, version, 0, 1] for version in found)]
        row = {"prompt_length": 1, "ids": [7] * len(runs), "logprobs": [-0.5] * len(found), "runs": runs}
        records.append(sample_record(step=step, rows=[row], request_id=f"trained-{step}"))
    (out / "trajectories.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def bad(findings: list[DoctorFinding]) -> list[str]:
    assert all(finding.ok != bool(finding.remedy) for finding in findings)
    return [finding.what for finding in findings if not finding.ok]


@pytest.mark.parametrize(
    ("changes", "versions", "expected"),
    [
        ({}, {1: [-1, 0, 0], 2: [1, -1, 1]}, []),
        ({"steps": 1}, {1: [0], 2: [1]}, ["GRPO steps"]),
        ({"tool_calls_per_trajectory": 0.0}, {1: [0], 2: [1]}, ["tool calls"]),
        ({"tool_error_rate": 0.9}, {1: [0], 2: [1]}, ["tool calls"]),
        ({"prob_diff_mean": 0.1}, {1: [0], 2: [1]}, ["|rollout - trainer probability|"]),
        ({"prob_diff_mean": float("nan")}, {1: [0], 2: [1]}, ["|rollout - trainer probability|"]),
        ({"certificate_rows": 127}, {1: [0], 2: [1]}, ["certificate"]),
        ({"certificate_violations": 1}, {1: [0], 2: [1]}, ["certificate"]),
        ({}, {1: [0], 2: [0]}, ["weight syncs"]),
        ({}, {1: [0, 1], 2: [1]}, ["weight syncs"]),
        ({}, {1: [0]}, ["weight syncs"]),
    ],
)
def test_verdicts_on_a_run(
    tmp_path: Path, changes: dict[str, Any], versions: dict[int, list[int]], expected: list[str]
) -> None:
    write_run(tmp_path, versions, **changes)
    assert bad(judge_run(tmp_path, "nvidia", 2)) == expected


def test_the_platforms_differ_in_settings_alone() -> None:
    cpu, gpu = overrides("cpu"), overrides("nvidia")
    assert gpu[: len(cpu)] == cpu
    assert "actor_rollout_ref.rollout.dtype=bfloat16" in gpu
    # This environment has no flash-attn.
    assert "actor_rollout_ref.model.use_remove_padding=False" in gpu
    assert not any("use_remove_padding" in flag for flag in cpu)


def test_a_run_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "verl"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SystemExit('RuntimeError: NCCL error in communicator.cpp')\n")
    real = importlib.util.find_spec("verl")
    assert real is not None
    for part in Path(next(iter(real.submodule_search_locations or []))).iterdir():
        if part.name != "__init__.py":
            (broken / part.name).symlink_to(part)
    for name in ("datasets", "peft", "sglang", "tensordict", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")  # the run's server would import them for seconds
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines: list[str] = []
    (finding,) = run_whole_path(tmp_path / "out", "cpu", lines.append)
    assert not finding.ok
    assert finding.what == "GRPO steps"
    doing = "importing verl, checking the settings"
    assert finding.found.startswith(f"the trainer ended with exit status 1 while {doing}; whole log: ")
    assert finding.remedy.startswith("NCCL failed")
    assert any("NCCL error in communicator.cpp" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, ""),
        ({"capability": [7, 5]}, "compute capability 8.0"),
        ({"free": 2e9}, "8 GB must be free"),
    ],
)
def test_verdicts_on_a_gpu(changes: dict[str, Any], remedy: str) -> None:
    described = {"name": "NVIDIA H100", "count": 8, "cuda": "13.0", "capability": [9, 0], "free": 79e9, "total": 85e9}
    finding = judge_gpu(described | changes)
    assert finding.ok == (not remedy)
    assert remedy in finding.remedy
    assert "8 × NVIDIA H100" in finding.found


def test_the_cuda_compiler_is_looked_for_where_sglang_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    missing = cuda_compiler()
    assert not missing.ok
    assert missing.found == f"no nvcc at {tmp_path}/bin/nvcc"
    assert "CUDA_HOME" in missing.remedy
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.delenv("CXX", raising=False)
    (nvcc.parent / "g++").touch(mode=0o755)  # alone it is not looked for
    assert cuda_compiler() == DoctorFinding(
        "CUDA compiler",
        False,
        f"{nvcc}, but no C++ compiler 'c++'",
        "install g++, which brings c++; or set CXX to the compiler that there is",
    )
    monkeypatch.setenv("CXX", "g++ -m64")
    assert cuda_compiler() == DoctorFinding("CUDA compiler", True, str(nvcc))
    monkeypatch.setenv("CXX", "clang++")
    assert cuda_compiler().found == f"{nvcc}, but no C++ compiler 'clang++'"
    monkeypatch.delenv("CXX")
    (nvcc.parent / "c++").touch(mode=0o755)
    assert cuda_compiler() == DoctorFinding("CUDA compiler", True, str(nvcc))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert cuda_compiler() == DoctorFinding("CUDA compiler", True, str(nvcc))
