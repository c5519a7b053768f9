"""The start-up of a run, phase by phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_multiturn.observe import start_up


def test_each_phase_has_its_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([12.0, 15.0, 20.0, 40.0, 44.5])
    monkeypatch.setattr(start_up.time, "time", lambda: next(clock))
    run = start_up.StartUp(started=10.0)
    assert run.doing == "importing verl, checking the settings"
    for line in ("ray init kwargs: {}", "nothing", "INFO Started a local Ray instance.", "ray init kwargs: {}"):
        run.see(line)
    assert run.seconds == {"checks": 2.0, "ray": 3.0}
    run.see("INFO:actor and ref model engine initialized")
    run.see("INFO:checkpoint engine manager initialized")
    run.look_for_conversations(tmp_path / "records")
    assert (run.doing, run.is_over) == ("starting the agent loop, waiting for the first conversation", False)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "host-1.jsonl").write_text("{}\n")
    run.look_for_conversations(tmp_path / "records")
    assert run.seconds == {"checks": 2.0, "ray": 3.0, "fsdp": 5.0, "sglang": 20.0, "first_conversation": 4.5}
    assert (run.doing, run.is_over) == ("training", True)


def test_a_line_that_never_came_keeps_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up.time, "time", lambda: 30.0)
    run = start_up.StartUp(started=10.0)
    run.see("INFO:actor and ref model engine initialized")
    assert run.seconds == {"checks": 20.0, "ray": 0.0, "fsdp": 0.0}
