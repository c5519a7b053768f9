"""The trainer's process: it gets a request to stop, or Ray was not there. The trainers here are small programs."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.runs import training
from verl_multiturn.runs.progress import RunConsole
from verl_multiturn.runs.run_folder import RunFolder
from verl_multiturn.runs.stop_request import StopAnswer, StopRequest
from verl_multiturn.runs.training import Training, TrainingEnd, stop_line

LATE = """
import os, sys, time
from pathlib import Path
print("ray init kwargs: {}")
out = Path(sys.argv[1])
tries = len(list(out.glob("try*")))
(out / f"try{tries}").touch()
session = out / "tmp" / "ray" / f"session_2026-11-28_21-21-0{tries}_223741_{os.getpid()}" / "logs"
session.mkdir(parents=True)
(session / "raylet.err").write_text(
    "[2026-11-28 21:21:17,699 C 11981 11981] (raylet) node_manager.cc:3576:  An unexpected system state has occurred. "
    f"You have likely discovered a bug in Ray. Check failed: statussetor3576.has_value() Timed out waiting {tries}\\n"
    "*** StackTrace Information ***\\nray::operator<<()\\n")
if tries == int(sys.argv[2]):
    print("Started a local Ray instance.")
    raise SystemExit(0)
print("Traceback (most recent call last):\\n    ray.init(**OmegaConf.to_container(ray_init_kwargs))")
print("Exception: The current node timed out during startup.")
raise SystemExit(1)
"""
TRAINER = {"total_training_steps": 3}


def train(out: Path, program: str, *words: str, **config: Any) -> tuple[TrainingEnd, str]:
    """Run a program as the trainer, and return its end and its console's text."""
    command = [sys.executable, "-c", program, str(out), *words]
    composed = {"trainer": TRAINER, **config}
    made = Training(command, composed, RunFolder(out), out / "metrics.jsonl", None, is_ppo=True)
    made._console = RunConsole(file=io.StringIO(), width=200)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "RAY_TMPDIR": str(out / "tmp"), "RAY_ADDRESS": ""}
    with RunFolder(out).held() as lock:
        end = made.run(environment, time.time(), lock)
    assert isinstance(made._console.file, io.StringIO)
    return end, made._console.file.getvalue()


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "load_text", lambda: ("load 15 on 2 cores", True))


def test_a_start_that_ray_was_too_late_for_is_tried_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end, shown = train(tmp_path, LATE, "1")
    assert (end.status, sorted(path.name for path in tmp_path.glob("try*"))) == (0, ["try0", "try1"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("Ray was not there in time: Timed out waiting 0 (")
    assert said[0].endswith(
        "/logs/raylet.err); this machine is busy (load 15 on 2 cores); the trainer is started once more"
    )
    assert "Traceback" not in shown


def test_a_second_failure_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end, shown = train(tmp_path, LATE, "-1")
    assert (end.status, len(list(tmp_path.glob("try*")))) == (1, 2)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert said[1].startswith("Ray was not there in time: Timed out waiting 1 (")
    assert said[1].endswith(
        "this machine is busy (load 15 on 2 cores); start the same command again, on a busy machine when its load is "
        f"lower; whole log: {tmp_path}/train.log"
    )
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("program", "config"),
    [
        ("print('ray init kwargs: {}'); print('ray.init('); raise SystemExit('PermissionError: no')", {}),
        ("print('ray init kwargs: {}'); raise SystemExit('loading the model timed out')", {}),
        (LATE.replace("int(sys.argv[2])", "-1"), {"ray_kwargs": {"ray_init": {"address": "10.0.0.1:6379"}}}),
    ],
)
def test_other_failures_are_not_tried_again(
    program: str, config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end, shown = train(tmp_path, program, **config)
    assert end.status == 1
    assert shown.count("ray init kwargs") == 1
    assert capsys.readouterr().out == (
        f"the trainer ended with exit status 1 while starting Ray; whole log: {tmp_path}/train.log\n"
    )


def test_an_error_of_ours_is_said_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = "verl_multiturn.errors.RewardContractError: no conversation of a batch has a reward"
    end, shown = train(tmp_path, f"print('ray init kwargs: {{}}'); print({error!r}); raise SystemExit('(more)')")
    assert end.status == 1
    assert error in shown
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "RewardContractError: no conversation of a batch has a reward"


STOPS = """
import json, sys, time
from pathlib import Path
stop = Path(sys.argv[1]) / "checkpoints" / "stop"
while not stop.exists():
    time.sleep(0.02)
if sys.argv[2] == "answers":
    stop.write_text(json.dumps({"step": 2, "said": "the weights of step 2 are saved"}))
raise SystemExit(int(sys.argv[3]))
"""


def ask_when_it_runs(out: Path) -> None:
    """Send this process SIGUSR1 as soon as its trainer writes its log."""

    def ask() -> None:
        while not (out / "train.log").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=ask).start()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("answers", "0"), (0, StopAnswer(2, "the weights of step 2 are saved"))),
        (("ends", "0"), (0, None)),  # its last step ended
        (("answers", "3"), (3, None)),
    ],
)
def test_sigusr1_asks_the_trainer_to_stop(
    words: tuple[str, str], expected: tuple[int, StopAnswer | None], tmp_path: Path
) -> None:
    ask_when_it_runs(tmp_path)
    end, shown = train(tmp_path, "print('begun')\n" + STOPS, *words)
    assert (end.status, end.stopped) == expected
    assert end.was_asked
    assert shown.count("asked to stop: a checkpoint when the step that runs has ended; SIGUSR1 again") <= 1
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_is_ended_at_once_leaves_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def ended(*words: Any, stop: Any, **options: Any) -> int:
        stop()
        made.append((tmp_path / "checkpoints" / "stop").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run_watched", ended)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "")
    assert made == [True]
    assert not (tmp_path / "checkpoints").exists()


def test_the_request_of_an_earlier_start_is_forgotten(tmp_path: Path) -> None:
    StopRequest(tmp_path / "checkpoints").make()
    end, _ = train(tmp_path, "import os, sys; raise SystemExit(os.path.exists(sys.argv[1] + '/checkpoints/stop'))")
    assert (end.status, end.stopped, end.was_asked) == (0, None, False)


def test_a_file_without_an_answer_is_a_request(tmp_path: Path) -> None:
    request = StopRequest(tmp_path / "checkpoints")
    assert not request.is_made()
    assert request.take() is None
    for content in ("", "\n", "now", "{}", "[1]"):
        request.make()
        request.path.write_text(content)
        assert request.is_made()
    request.answer(StopAnswer(4, "saved ü"))
    assert not request.is_made()
    (tmp_path / "checkpoints" / "global_step_4").mkdir()
    assert request.take() == StopAnswer(4, "saved ü")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_4"]


def test_only_a_folder_that_the_request_made_is_removed_with_it(tmp_path: Path) -> None:
    own, made = tmp_path / "own", tmp_path / "a" / "made"
    own.mkdir()
    for folder in (own, made):
        request = StopRequest(folder)
        request.take()
        request.make()
        request.take()
    assert (own.exists(), made.exists(), made.parent.exists()) == (True, False, True)


def test_the_last_line_of_a_stopped_run_is_json() -> None:
    line = stop_line(StopAnswer(2, "saved"), Path("/runs/mine"))
    assert json.loads(line) == {"recipe": "mine", "stopped": 2, "out": "/runs/mine"}
