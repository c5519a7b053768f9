"""Every prompt is trained once, whatever process dies: how prompts are counted, and real runs that are killed."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.long.training import async_faults
from tests.long.training.async_faults import Faults, plan, poisoned
from tests.long.training.async_faults_count import Left, count


def left(**changes: Any) -> Left:
    """Make the files of a run that drew six prompts: three trained, one evicted, and two still open."""
    uids = {"a": "1+1", "b": "1+2", "c": "1+3", "d": "1+4", "e": "1+5"}  # of f there is no conversation yet
    fields: dict[str, Any] = {
        "steps": 2,
        "drawn": 6,
        "trained": {1: ["a", "b"], 2: ["c"]},
        "evicted": ["d"],
        "open": ["e", "f"],
        "questions": uids,
        "twins": Counter(uids.values()),
    }
    return Left(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "twice", "lost"),
    [
        ({}, 0, 0),
        ({"drawn": 7}, 0, 1),
        ({"open": ["e"]}, 0, 1),
        ({"evicted": []}, 0, 1),
        ({"trained": {1: ["a", "b"], 2: ["c", "a"]}}, 1, 0),
        ({"evicted": ["d", "a"]}, 1, 0),  # trained and evicted
        ({"open": ["e", "f", "a"]}, 1, 0),  # trained, and to be trained again
        ({"trained": {1: ["a", "b"], 2: ["a"]}}, 1, 1),
        ({"trained": {1: ["a", "b", "g"], 2: ["c"]}}, 1, 0),  # never drawn
        ({"trained": {1: ["a", "b", "c"]}}, 0, 1),  # a step that trained nothing
    ],
)
def test_each_prompt_is_counted_once(changes: dict[str, Any], twice: int, lost: int) -> None:
    assert count(left(**changes)) == {"twice": twice, "lost": lost}


def test_a_prompt_under_two_uids_is_found_by_its_question() -> None:
    same = {**left().questions, "c": "1+1"}
    assert count(left(questions=same)) == {"twice": 1, "lost": 1}
    assert count(left(questions=same, twins=Counter({**left().twins, "1+1": 2}))) == {"twice": 0, "lost": 0}


def test_what_counts_as_poisoned() -> None:
    clean = {"rollout/certificate/violations": 0, "rollout/certificate/unverified": 0, "rollout/async/age/max": 1}
    assert poisoned([clean, clean], "CertificateError is an error of ours") == 0
    assert poisoned([clean, {**clean, "rollout/async/age/max": 2}], "") == 1
    assert poisoned([{**clean, "rollout/certificate/unverified": 3}], "CertificateError: step 2: the batch") == 4


def test_the_plan_of_a_seed() -> None:
    made = plan(["worker", "trainer"], 2, "0 separate_async")
    assert sorted(kind for kind, _ in made) == ["trainer", "trainer", "worker", "worker"]
    assert all(0 <= pause <= 30 for _, pause in made)
    assert made == plan(["worker", "trainer"], 2, "0 separate_async") != plan(["worker", "trainer"], 2, "1")


# A run that logs a step every 50 ms. It replaces a dead worker, ends when its trainer dies, and hangs on request.
RUN = """
import os, pathlib, signal, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
def start(title):
    return subprocess.Popen([title, "600"], executable="/bin/sleep", start_new_session=True)
processes = {title: start(title) for title in ("ray::MultiTurnWorker", "ray::TaskRunnerV1")}
try:
    while True:
        time.sleep(0.05)
        if processes["ray::TaskRunnerV1"].poll() is not None:
            sys.exit(1)
        if processes["ray::MultiTurnWorker"].poll() is not None:
            processes["ray::MultiTurnWorker"] = start("ray::MultiTurnWorker")
        for path in (f"records/{os.getpid()}.jsonl", "metrics.jsonl"):
            (out / path).parent.mkdir(exist_ok=True)
            if not (out / "hang").exists():
                (out / path).open("a").write("{}\\n")
finally:
    for process in processes.values():
        process.kill()
        process.wait()
"""


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(async_faults, "_POLL_S", 0.05)

    def start(mode: str, steps: int, seed: int, out: Path, *words: str, log: Any) -> Any:
        return subprocess.Popen([sys.executable, "-c", RUN, str(out)], stdout=log, stderr=log)

    monkeypatch.setattr(async_faults, "start", start)
    made: Any = Faults("separate_async", tmp_path, 0, 60.0)
    yield made
    made._interrupt()


def test_a_run_is_killed_and_started_again(faults: Any) -> None:
    faults._train(0.0)
    faults._kill("worker")
    faults._kill("trainer")
    assert (faults._starts, faults._running) == (1, None)
    faults._kill("worker")
    assert (faults._starts, faults._hung, faults._ended) == (2, 0, 0)
    assert faults._kills == {"worker": 2, "trainer": 1}


def test_a_run_that_ends_without_need_is_counted(faults: Any) -> None:
    faults._train(0.0)
    for process in faults._processes(("ray::TaskRunnerV1",)):
        process.kill()
    faults._running.wait(timeout=60)
    faults._train(0.0)
    assert (faults._starts, faults._hung, faults._ended) == (2, 0, 1)


def test_a_run_that_hangs_is_counted_and_ended(faults: Any, tmp_path: Path) -> None:
    faults._train(0.0)
    (tmp_path / "hang").touch()
    faults._limit_s = 0.5
    faults._train(60.0)
    assert (faults._starts, faults._hung, faults._ended, faults._running) == (1, 1, 0, None)


@pytest.mark.long
@pytest.mark.stack
@pytest.mark.engine
@pytest.mark.timeout(7200)
def test_every_prompt_is_trained_once_whatever_dies(tmp_path: Path) -> None:
    found = async_faults.run(tmp_path)
    none = dict.fromkeys(async_faults.MODES, 0)
    assert {field: found[field] for field in ("hung", "ended", "lost", "twice", "poisoned")} == dict.fromkeys(
        ("hung", "ended", "lost", "twice", "poisoned"), none
    )
