"""The start-up of a run, phase by phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_multiturn.runs import start_up


def test_each_phase_has_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([12.0, 15.0, 20.0, 40.0, 44.5])
    monkeypatch.setattr(start_up.time, "time", lambda: next(clock))
    run = start_up.StartUp(started=10.0)
    assert run.doing == "importing verl, checking the settings"
    for line in ("ray init kwargs: {}", "nothing", "INFO Started a local Ray instance.", "ray init kwargs: {}"):
        run.see(line)
    assert run.seconds == {"checks": 2.0, "ray": 3.0}
    run.see("INFO:actor and ref model engine initialized")
    run.see("INFO:checkpoint engine manager initialized")
    assert (run.doing, run.is_over) == ("starting the agent loop, waiting for the first conversation", False)
    run.end()
    assert run.seconds == {"checks": 2.0, "ray": 3.0, "fsdp": 5.0, "sglang": 20.0, "first_conversation": 4.5}
    assert (run.doing, run.is_over) == ("training", True)


def test_a_line_that_never_came_keeps_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up.time, "time", lambda: 30.0)
    run = start_up.StartUp(started=10.0)
    run.see("INFO:actor and ref model engine initialized")
    assert run.seconds == {"checks": 20.0, "ray": 0.0, "fsdp": 0.0}


def test_the_log_has_the_lines_of_both_streams_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.runs.environment import environment_of
    from verl_multiturn.runs.plan import plan_run
    from verl_multiturn.runs.processes import run_watched

    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    plan = plan_run("gsm8k_multiturn", smoke=True, out=tmp_path)
    environment = environment_of(plan, {"recipe": {"on_cpu": False}})
    program = "import os, sys; print('first'); print('second', file=sys.stderr); print('third'); os._exit(3)"

    def watch(is_running: Callable[[], bool]) -> None:
        while is_running():
            time.sleep(0.02)

    log = tmp_path / "log"
    assert run_watched([sys.executable, "-c", program], environment, log, watch) == 3
    assert log.read_text().split() == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("mode", "description", "number"),
    [
        ("separate_async", '{"hidden_size": 576}', "3"),  # trainer and engine work at the same time
        ("multiturn_separate_async", '{"hidden_size": 576}', "3"),
        ("colocate_async", '{"hidden_size": 576}', None),
        ("sync", '{"hidden_size": 576}', None),
        ("sync", '{"hidden_size": 128}', "1"),
        ("separate_async", '{"hidden_size": 128}', "1"),
        ("sync", '{"hidden_size": "128"}', None),
        ("sync", "[]", None),
        ("sync", "{", None),
        ("sync", None, None),  # a model that the run makes, or a name on the hub
    ],
)
def test_threads_follow_the_model_and_the_mode(
    mode: str, description: str | None, number: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.runs import threads
    from verl_multiturn.runs.environment import environment_of
    from verl_multiturn.runs.plan import plan_run

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 6)
    if description is not None:
        (tmp_path / "config.json").write_text(description)
    config = {
        "recipe": {"on_cpu": True},
        "trainer": {"v1": {"trainer_mode": mode}},
        "actor_rollout_ref": {"model": {"path": str(tmp_path)}},
    }
    environment = environment_of(plan_run("quickstart", out=tmp_path), config)
    assert environment.get("OMP_NUM_THREADS") == environment.get("VERL_MULTITURN_THREADS") == number
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # the user's counts
    environment = environment_of(plan_run("quickstart", out=tmp_path), config)
    assert (environment["OMP_NUM_THREADS"], environment.get("VERL_MULTITURN_THREADS")) == ("5", None)


def test_a_run_without_a_model_has_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.runs.threads import thread_variables

    assert thread_variables({}, {}) == {}
    assert thread_variables({"actor_rollout_ref": {"model": {"path": None}}}, {}) == {}
