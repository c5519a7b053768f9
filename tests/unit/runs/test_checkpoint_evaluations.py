"""Evaluations of a run's checkpoints beside it: one at a time, the newest first, and none that a training waits for."""

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.evaluation_samples import write_evaluation
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.points import FOLDER, Point, add_point, read_points
from verl_multiturn.runs import checkpoint_evaluations as evaluations
from verl_multiturn.runs.checkpoint_evaluations import CheckpointOptions, has_left, put, started_as, work

pytestmark = pytest.mark.slow  # it starts processes
WANTED = CheckpointOptions("recipes/quickstart", ["smoke=cpu"], ["rows.parquet"], 4, None, 600.0)
RIGHT = "import shutil, sys; shutil.copytree(sys.argv[1] + '/../../made', sys.argv[1], dirs_exist_ok=True)"
"""A child that evaluates: two rows, two samples of each, three of four right."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's folder with checkpoints; its workers are not started."""
    for step in (5, 10, 15):
        actor = tmp_path / "checkpoints" / f"global_step_{step}" / "actor"
        (actor / "huggingface").mkdir(parents=True)
        (actor / "huggingface" / "config.json").write_text("{}")
        for name in ("model", "optim", "extra_state"):
            (actor / f"{name}_world_size_1_rank_0.pt").write_text(f"{name} of {step}")
    write_evaluation(tmp_path / "made", {0: [1.0, 0.0], 1: [1.0, 1.0]})
    monkeypatch.setattr(evaluations, "worker_command", lambda run: [sys.executable, "-I", "-S", "-c", ""])
    return tmp_path


def child(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let the child of each evaluation be a program, which gets the folder of the evaluation."""
    command = [sys.executable, "-I", "-S", "-c", program]
    monkeypatch.setattr(CheckpointOptions, "command", lambda self, held, out: [*command, str(out)])


def place(run: Path, *steps: int, wanted: CheckpointOptions = WANTED) -> None:
    for step in steps:
        assert put(run, step, run / "checkpoints" / f"global_step_{step}", wanted).wait() == 0


def test_the_weights_that_wait_stay_when_the_trainer_removes_them(run: Path) -> None:
    place(run, 5)
    (run / "checkpoints" / "global_step_5" / "actor" / "model_world_size_1_rank_0.pt").unlink()
    held = run / FOLDER / "waiting" / "global_step_5" / "actor"
    assert (held / "model_world_size_1_rank_0.pt").read_text() == "model of 5"
    assert sorted(str(path.relative_to(held)) for path in held.rglob("*.*")) == [
        "huggingface/config.json",
        "model_world_size_1_rank_0.pt",
    ]


def test_a_checkpoint_becomes_a_point(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, RIGHT)
    place(run, 5)
    assert work(run) == 1
    (point,) = read_points(run)
    assert (point.step, point.state, point.avg, point.rows, point.samples) == (5, "evaluated", 0.75, 2, 2)
    assert point.interval is not None
    assert point.interval[0] < 0.75 < point.interval[1]
    assert (point.folder, has_left(run)) == ("step_5", False)


def test_the_newest_comes_first_and_those_before_it_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, RIGHT)
    place(run, 5, 10, 15)
    assert work(run) == 1
    assert [(point.step, point.state, point.why) for point in read_points(run)] == [
        (5, "skipped", "step 15 was there before its turn came"),
        (10, "skipped", "step 15 was there before its turn came"),
        (15, "evaluated", ""),
    ]


def test_one_that_comes_meanwhile_is_the_next(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def began(wanted: CheckpointOptions, held: Path, out: Path, meanwhile: Any) -> str:
        ran.append(held.name)
        assert work(run) == 0  # a second worker leaves at once
        if held.name == "global_step_5":
            place(run, 10)
        return "no engine"

    monkeypatch.setattr(evaluations, "_run", began)
    place(run, 5)
    assert (work(run), ran) == (2, ["global_step_5", "global_step_10"])


def test_no_more_than_one_waits_while_another_is_evaluated(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = run / "ends"
    waits = f"import os, sys, time\nwhile not os.path.exists({str(ends)!r}): time.sleep(0.01)\n"
    child(monkeypatch, waits + RIGHT)
    monkeypatch.setattr(evaluations, "_LOOK_S", 0.01)
    looked = evaluations._skip_older

    def looks(folder: Path) -> int:
        newest = looked(folder)
        if not ends.exists():
            held = sorted(path.name for path in (run / FOLDER).glob("*ing/*"))
            if held == ["global_step_5"]:
                place(run, 10, 15)
            elif held == ["global_step_15", "global_step_5"]:  # the disk holds no more than these two
                ends.touch()
        return newest

    monkeypatch.setattr(evaluations, "_skip_older", looks)
    place(run, 5)
    assert work(run) == 2
    assert [(point.step, point.state) for point in read_points(run)] == [
        (5, "evaluated"),
        (10, "skipped"),
        (15, "evaluated"),
    ]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit('verl-multiturn: no such recipe')", "it ended with exit status 1: no such recipe"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it ended with signal 9: it printed nothing"),
        ("pass", "'{out}' has no evaluation.json; name the folder that `verl-multiturn eval … --out` wrote"),
    ],
)
def test_a_child_that_fails_is_a_point(run: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str) -> None:
    child(monkeypatch, program)
    place(run, 5)
    assert work(run) == 1
    (point,) = read_points(run)
    assert (point.state, point.why) == ("failed", why.format(out=run / FOLDER / "step_5"))
    assert not has_left(run)


def test_a_child_that_hangs_is_ended_and_the_next_one_has_its_turn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "_END_S", 0.1)
    child(monkeypatch, "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)")
    place(run, 5, wanted=CheckpointOptions(**{**WANTED.__dict__, "timeout_s": 0.5}))
    work(run)
    child(monkeypatch, RIGHT)
    place(run, 10)
    work(run)
    assert [(point.step, point.state, point.why) for point in read_points(run)] == [
        (5, "failed", "it was ended after timeout_s, 0.5 s"),
        (10, "evaluated", ""),
    ]


def test_what_a_killed_worker_left_goes_on_in_its_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> str:
        raise KeyboardInterrupt

    place(run, 5)
    with monkeypatch.context() as patched:
        patched.setattr(evaluations, "_run", killed)
        with pytest.raises(KeyboardInterrupt):
            work(run)
    (run / FOLDER / "step_5").mkdir()
    assert has_left(run)
    child(monkeypatch, RIGHT)
    work(run)
    assert [(point.state, point.folder) for point in read_points(run)] == [("evaluated", "step_5")]


def test_a_step_that_is_trained_again_has_a_folder_of_its_own(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, RIGHT)
    for _ in range(2):
        place(run, 5)
        work(run)
    assert [point.folder for point in read_points(run)] == ["step_5.2"]


def test_a_full_disk_costs_the_point_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluations, "_run", full)
    monkeypatch.setattr(evaluations, "add_point", full)
    place(run, 5, 10)
    assert work(run) == 1
    assert not has_left(run)


def test_a_checkpoint_that_cannot_be_linked_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", full)
    monkeypatch.setattr("os.link", full)
    with pytest.raises(OSError, match="No space left"):
        place(run, 5)
    assert list((run / FOLDER / "waiting").iterdir()) == []


def test_the_command_asks_as_the_run_was_started(tmp_path: Path) -> None:
    hydra = tmp_path / "hydra" / ".hydra"
    hydra.mkdir(parents=True)
    words = ["recipe.root=/r", "recipe.out=/o", "smoke=cpu", "+mode=sync", "trainer.save_freq=5", "data.seed=3"]
    (hydra / "overrides.yaml").write_text(yaml.safe_dump(words))
    sources = [{"path": "hydra.conf", "provider": "hydra"}, {"path": "/r/recipes/q", "provider": "main"}]
    (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"config_sources": sources}}}))
    wanted = CheckpointOptions(*started_as(tmp_path), ["v.parquet"], 4, None, 60.0)
    assert wanted.command(Path("held"), Path("out"))[2:] == [
        "verl_multiturn.cli", "eval", "held", "--recipe", "/r/recipes/q", "--out", "out", "--trust", "--rows",
        "v.parquet",
        "--samples", "4", "--set", "smoke=cpu", "--set", "+mode=sync", "--set", "data.seed=3",
    ]  # fmt: skip


def test_a_run_that_no_recipe_began_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say how the run was started"):
        started_as(tmp_path)


def test_points_are_read_by_step_and_torn_lines_left_out(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for step, avg in ((10, 0.5), (5, 0.25), (10, 0.75)):
        add_point(tmp_path, Point(step=step, state="evaluated", avg=avg))
    with (tmp_path / FOLDER / "points.jsonl").open("a") as file:
        file.write(json.dumps({"step": 15})[:-3] + "\n")
    assert [(point.step, point.avg) for point in read_points(tmp_path)] == [(5, 0.25), (10, 0.75)]
