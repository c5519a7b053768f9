"""The real stack on the CPU: verl's trainer, SGLang, our rollout and a tool; and that nothing remains afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.config_reads import reads_in, traced
from verl_multiturn.records.read.records import read_records
from verl_multiturn.records.rows import columns
from verl_multiturn.records.summaries import summary_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.runs.first_run import overrides, run_whole_path
from verl_multiturn.verl_bridge.startup.verl_keys import trace_faults

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MARK = "VERL_MULTITURN_TEST_RUN"


def marked(out: Path) -> dict[str, str]:
    """Return the environment variables that mark the processes of a run."""
    # Without SPT_NOENV, programs that set their title overwrite their environment, and the mark with it.
    return {"COLUMNS": "200", MARK: str(out), "SPT_NOENV": "1"}


def start(out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--out", str(out), *arguments]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", **marked(out)}
    with (out.parent / "console.log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=_can_be_interrupted
        )


def _can_be_interrupted() -> None:
    """Restore the default of SIGINT, which a shell ignores in the commands that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_of(out: Path) -> set[str]:
    """Return id and command line of every process that a run started, Ray's own included.

    They inherit the mark of the run.
    """
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(out) and process.status() != psutil.STATUS_ZOMBIE:
                found.add(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def versions_of(record: dict[str, Any]) -> set[int]:
    return {version for row in record["rows"] for _, _, version, *_ in row["runs"]}


def records_of(out: Path) -> list[dict[str, Any]]:
    return list(read_records(out / "trajectories.jsonl"))


def check_metrics(logged: list[dict[str, Any]], records: list[dict[str, Any]], prefix: str) -> None:
    """Check that the metrics of all batches together agree with the records."""
    calls = [call for record in records for call in record["calls"]]
    assert sum(data[f"{prefix}trajectories"] for data in logged) == len(records)
    assert sum(data[f"{prefix}calls/total"] for data in logged) == len(calls)
    assert sum(data[f"{prefix}tools/calculator/calls"] for data in logged) == sum(bool(call["tool"]) for call in calls)
    assert max(data[f"{prefix}calls/per_trajectory/max"] for data in logged) == max(len(r["calls"]) for r in records)
    finished = sum(data[f"{prefix}stop/finished"] * data[f"{prefix}trajectories"] for data in logged)
    assert round(finished) == sum(record["stop_reason"] == "finished" for record in records)
    for data in logged:
        assert sum(value for key, value in data.items() if key.startswith(f"{prefix}stop/")) == pytest.approx(1)
        assert data[f"{prefix}invalid_share"] == 0
        assert data[f"{prefix}generate_s/p95"] >= data[f"{prefix}generate_s/p50"] > 0
        assert 0 <= data[f"{prefix}reward/compute_score/mean"] <= 1


def test_two_steps_of_the_real_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of `doctor --gpu`, with the CPU as its platform."""
    out = tmp_path / "out"
    (reads := tmp_path / "reads").mkdir()
    for name, value in {**marked(out), **traced(reads)}.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    findings = run_whole_path(out, "cpu", lines.append)
    console = "\n".join(lines)
    assert [finding for finding in findings if not finding.ok] == [], console[-4000:]
    assert [finding.what for finding in findings[:3]] == ["GRPO steps", "tool calls", "weight syncs"]

    summary = json.loads(console.strip().splitlines()[-1])
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["prob_diff_mean"] <= 1e-3
    assert summary["val_acc_before"] <= 0.6
    assert (out / "curve.png").stat().st_size > 1000
    assert console.count("calls/trajectory") == 2

    trained = [record for record in records_of(out) if not record["validation"]]
    assert len(trained) == 2 * 8 * 8
    # The trainer verified every row before it trained on it.
    logged = [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    certified = [data for data in logged if "rollout/certificate/rows" in data]
    assert [data["rollout/certificate/rows"] for data in certified] == [8 * 8] * 2
    assert sum(data["rollout/certificate/tokens"] for data in certified) == sum(
        summary_of(r)["sampled_tokens"] for r in trained
    )
    assert all(data[f"rollout/certificate/{name}"] == 0 for data in certified for name in ("violations", "unverified"))
    assert summary["certificate_rows"] == 2 * 8 * 8
    assert summary["certificate_violations"] == 0
    assert all(verify_record(record).violations == [] for record in records_of(out))
    check_metrics(certified, trained, prefix="rollout/")
    validated = [data for data in logged if "val/rollout/trajectories" in data]
    greedy = [record for record in records_of(out) if record["validation"]]
    assert len(greedy) == 16 * len(validated) > 16
    check_metrics(validated, greedy, prefix="val/rollout/")
    assert {record["stop_reason"] for record in trained} <= {"finished", "response_length", "max_assistant_turns"}
    called = [record for record in trained if record["calls"]]
    assert called
    for record in trained:
        full = columns(record["rows"][0])
        assert len({len(column) for column in full.values()}) == 1
        for mask, source, logprob, version in zip(
            full["mask"], full["sources"], full["logprobs"], full["versions"], strict=True
        ):
            assert (mask == 1) == (source == 1) == (version >= 0)
            assert logprob <= 0
            assert mask or logprob == 0
    # Step n is sampled with the weights of step n - 1: the weight sync reaches the engine.
    versions = {step: {v for r in trained if r["step"] == step for v in versions_of(r) if v >= 0} for step in (1, 2)}
    assert versions == {1: {0}, 2: {1}}
    assert processes_of(out) == set()
    # The settings of verl that were read are those of the table.
    assert len(noted := reads_in(reads)) > 500
    assert trace_faults(noted) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path, signum: signal.Signals) -> None:
    out = tmp_path / "out"
    trainer = start(out, "--steps", "3")
    log = out / "train.log"
    # SIGINT comes while the engine is starting; SIGTERM comes earlier, while Ray is starting.
    sign = "SGLang http server" if signum is signal.SIGINT else "ray init kwargs"
    started = ["raylet/raylet", "ray::", "sglang::"] if signum is signal.SIGINT else ["raylet/raylet"]
    deadline = time.monotonic() + 1000
    while time.monotonic() < deadline and not (log.exists() and sign in log.read_text(errors="replace")):
        assert trainer.poll() is None, (tmp_path / "console.log").read_text()
        time.sleep(0.5)
    while time.monotonic() < deadline and not all(any(name in p for p in processes_of(out)) for name in started):
        time.sleep(0.5)
    assert all(any(name in process for process in processes_of(out)) for name in started)
    # The trainer is a fork of the run's server, and so are Ray's workers.
    assert "imports everything itself" not in log.read_text(errors="replace")
    server = [each for each in psutil.Process(trainer.pid).children() if "cpu_processes/forkserver.py" in line_of(each)]
    assert len(server) == 1
    raylet = psutil.Process(int(min(pids_of(out, "raylet/raylet"))))
    assert raylet.ppid() in {fork.pid for fork in server[0].children()}
    trainer.send_signal(signum)
    assert trainer.wait(timeout=700) == 130
    assert processes_of(out) == set()


def line_of(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def pids_of(out: Path, part: str) -> set[str]:
    """Return the ids of the run's processes whose command line has a part."""
    return {each.partition(" ")[0] for each in processes_of(out) if part in each}


SMALL = [*overrides("cpu"), "trainer.resume_mode=auto", "trainer.val_before_train=False", "trainer.test_freq=-1"]


def steps_in(metrics: Path) -> list[int]:
    """Return the steps in a file of metrics, which may be growing."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_goes_on_from_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    trainer = start(out, "--steps", "90", *SMALL)
    while not steps_in(out / "metrics.jsonl"):
        assert trainer.poll() is None, (tmp_path / "console.log").read_text()
        time.sleep(0.1)
    trainer.send_signal(signal.SIGUSR1)
    assert trainer.wait(timeout=700) == 0
    console = (tmp_path / "console.log").read_text().splitlines()
    last = max(steps_in(out / "metrics.jsonl"))
    assert json.loads(console[-1]) == {"recipe": "out", "stopped": last, "out": str(out)}
    assert console[-2] == (
        f"stopped as asked; the weights of step {last} are saved in '{out}/checkpoints/global_step_{last}'; start the "
        "same command again with trainer.resume_mode=auto, which goes on from them"
    )
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        f"global_step_{last}",
        "latest_checkpointed_iteration.txt",
    ]
    assert processes_of(out) == set()
    again = start(out, "--steps", str(last + 1), *SMALL)
    assert again.wait(timeout=700) == 0
    assert json.loads((tmp_path / "console.log").read_text().splitlines()[-1])["steps"] == last + 1
    assert steps_in(out / "metrics.2.jsonl") == [last + 1]
