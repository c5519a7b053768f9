"""Checkpoints that a gateway gets when they are better: whatever it does, the training, the evaluation and it go on."""

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluation_samples import write_evaluation
from tests.unit.runs.test_checkpoint_evaluations import RIGHT, WANTED, child, place
from verl_multiturn.evaluation.points import FOLDER, Point, all_points, read_points
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.runs import checkpoint_deployments as deployments
from verl_multiturn.runs import checkpoint_evaluations as evaluations
from verl_multiturn.runs.checkpoint_deployments import is_better
from verl_multiturn.runs.checkpoint_evaluations import work

pytestmark = pytest.mark.slow  # it starts processes
EXPORTED = RIGHT + "; import os; os.makedirs(sys.argv[1] + '/model')"
DEPLOYS = """
import json, os, sys
model, gateway = sys.argv[1:]
now = json.load(open(gateway))
now["took"] += [os.path.basename(model)]
now |= {"state": "done", "path": model, "serves": "hash of " + os.path.basename(model), "serves_path": model}
json.dump(now, open(gateway, "w"))
"""
"""A command that lets the gateway below serve a model."""
TOLD = DEPLOYS + "print('done'); print(json.dumps({'model': now['serves']}))"


class Gateway:
    """A stand-in of a gateway: the file that it reports."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.asked: list[str] = []
        self.write(state="idle", path=None, serves="hash of the first", serves_path="/first", took=[])
        gateway = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gateway.asked.append(self.headers["Authorization"])
                data = file.read_bytes()
                self.send_response(200 if data else 503)
                self.end_headers()
                self.wfile.write(data or b"{}")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def write(self, **state: Any) -> None:
        self.file.write_text(json.dumps(state))

    def change(self, **state: Any) -> None:
        self.write(**{**json.loads(self.file.read_text()), **state})

    @property
    def took(self) -> list[str]:
        return list(json.loads(self.file.read_text())["took"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's folder with checkpoints, whose evaluations export a model; its workers are not started."""
    for step in (5, 10, 15):
        actor = tmp_path / "checkpoints" / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").write_text(f"model of {step}")
    write_evaluation(tmp_path / "made", {0: [1.0, 0.0], 1: [1.0, 1.0]})
    monkeypatch.setattr(evaluations, "worker_command", lambda run: [sys.executable, "-I", "-S", "-c", ""])
    monkeypatch.setenv("KEY", "secret")
    child(monkeypatch, EXPORTED)
    return tmp_path


@pytest.fixture
def gateway(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    found = Gateway(run / "gateway.json")
    deploys(monkeypatch, found, TOLD)
    yield found
    found.server.shutdown()
    found.server.server_close()


def deploys(monkeypatch: pytest.MonkeyPatch, gateway: Gateway, program: str) -> None:
    """Let a program deploy, which gets the model's folder and the gateway's file."""
    command = [sys.executable, "-I", "-S", "-c", program]
    monkeypatch.setattr(deployments, "deploy_command", lambda model, to, env: [*command, str(model), gateway.file])


def evaluate(run: Path, gateway: Gateway, step: int, only: str = "always") -> Point:
    wanted = replace(WANTED, deploy_to=gateway.url, deploy_key_env="KEY", deploy_if=only)
    place(run, step, wanted=wanted)
    assert work(run) == 1
    return all_points(run)[-1]


def right(run: Path, *scores: float) -> None:
    """Let the next evaluations have these scores."""
    shutil.rmtree(run / "made")
    write_evaluation(run / "made", {0: list(scores[:2]), 1: list(scores[2:])})


def held(run: Path) -> list[str]:
    return sorted(path.name for path in (run / FOLDER / "deployed").glob("*/*"))


def test_a_checkpoint_that_is_better_than_the_one_that_serves_is_deployed(run: Path, gateway: Gateway) -> None:
    for step in (5, 10):
        evaluate(run, gateway, step, "better")
    right(run, 1.0, 1.0, 1.0, 1.0)
    evaluate(run, gateway, 15, "better")
    assert [(point.step, point.deployed, point.not_deployed) for point in read_points(run)] == [
        (5, True, ""),
        (10, False, "its mean reward is not above that of the one that serves"),
        (15, True, ""),
    ]
    assert (gateway.took, held(run)) == (["step_5", "step_15"], ["step_15", "step_5"])
    assert not (run / FOLDER / "step_10" / "model").exists()
    assert set(gateway.asked) == {"Bearer secret"}


def test_a_step_that_is_trained_again_does_not_hide_the_one_that_serves(run: Path, gateway: Gateway) -> None:
    evaluate(run, gateway, 5, "better")
    right(run, 0.0, 0.0, 0.0, 0.0)
    evaluate(run, gateway, 5, "better")
    assert [(point.step, point.deployed) for point in read_points(run)] == [(5, False)]
    right(run, 1.0, 0.0, 0.0, 0.0)  # above the second, and below the one that serves
    assert not evaluate(run, gateway, 10, "better").deployed
    assert gateway.took == ["step_5"]


def test_a_model_that_the_gateway_took_after_all_is_the_one_to_beat() -> None:
    former = [
        Point(step=5, state="evaluated", avg=0.2, model="a", deployed=True),
        Point(step=10, state="evaluated", avg=0.8, model="b", not_deployed="it was given up"),
        Point(step=15, state="failed"),
    ]
    point = Point(step=20, state="evaluated", avg=0.5, model="c")
    assert not is_better(point, former, "b")
    assert is_better(point, former, "a")
    assert is_better(point, former, "of somebody else")
    assert not is_better(point.model_copy(update={"avg": None}), [], "a")
    assert is_better(point, [], None)


def test_all_are_deployed_where_that_is_set_and_two_folders_stay(run: Path, gateway: Gateway) -> None:
    for step in (5, 10, 15):
        assert evaluate(run, gateway, step).deployed
    assert (gateway.took, held(run)) == (["step_5", "step_10", "step_15"], ["step_10", "step_15"])


def test_the_same_step_twice_does_not_touch_the_folder_that_serves(run: Path, gateway: Gateway) -> None:
    evaluate(run, gateway, 5)
    (model,) = (run / FOLDER / "deployed").glob("*/step_5")
    (model / "first").touch()
    assert evaluate(run, gateway, 5).deployed
    assert (gateway.took, held(run)) == (["step_5", "step_5.2"], ["step_5", "step_5.2"])
    assert (model / "first").exists()
    evaluate(run, gateway, 5)
    assert held(run) == ["step_5.2", "step_5.3"]


def test_an_old_model_that_serves_again_stays(run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(run, gateway, 5)
    (model,) = (run / FOLDER / "deployed").glob("*/step_5")
    evaluate(run, gateway, 10)
    gateway.change(serves_path=str(model))  # somebody took the former back
    deploys(monkeypatch, gateway, "raise SystemExit(1)")
    for step in (15, 5):
        evaluate(run, gateway, step)
    assert held(run) == ["step_10", "step_5"]


def test_a_model_that_serves_whatever_the_command_reports_is_deployed(
    run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploys(monkeypatch, gateway, DEPLOYS + "raise SystemExit(1)")  # the last answer of the gateway was lost
    point = evaluate(run, gateway, 5)
    assert (point.deployed, point.not_deployed, held(run)) == (True, "", ["step_5"])


def test_a_model_that_is_loaded_when_the_command_is_given_up_stays(
    run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = DEPLOYS.replace('"state": "done"', '"state": "draining"').replace('"serves_path": model', '"former": ""')
    deploys(monkeypatch, gateway, loading + "import time; time.sleep(600)")
    monkeypatch.setattr(deployments, "DEPLOY_S", 1.0)
    point = evaluate(run, gateway, 5)
    assert (point.deployed, held(run)) == (False, ["step_5"])
    assert "verl-multiturn deploy ended with status -9, and it does not serve" in point.not_deployed


def test_nothing_is_removed_where_the_gateway_is_silent(
    run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        evaluate(run, gateway, step)
    deploys(monkeypatch, gateway, "import sys; open(sys.argv[2], 'w'); raise SystemExit(1)")
    point = evaluate(run, gateway, 15)
    assert (point.state, point.deployed, held(run)) == ("evaluated", False, ["step_10", "step_15", "step_5"])
    point = evaluate(run, gateway, 15)  # it is silent from the beginning: nothing is kept that could fill the disk
    assert (point.state, point.deployed, held(run)) == ("evaluated", False, ["step_10", "step_15", "step_5"])
    assert "answered 503" in point.not_deployed


def test_weights_that_serve_already_are_not_swapped(run: Path, gateway: Gateway) -> None:
    gateway.change(serves=read_results(run / "made").evaluation.model.hash)  # the worker was killed before its point
    point = evaluate(run, gateway, 5, "better")
    assert (point.deployed, gateway.took, held(run)) == (True, [], [])


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "import time; time.sleep(600)"])
def test_a_deployment_that_fails_costs_itself_alone(
    run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    deploys(monkeypatch, gateway, program)
    if "sleep" in program:
        monkeypatch.setattr(deployments, "DEPLOY_S", 0.5)
    point = evaluate(run, gateway, 5)
    assert (point.state, point.deployed, held(run)) == ("evaluated", False, [])
    assert "verl-multiturn deploy ended with status" in point.not_deployed


def test_a_disk_that_fails_costs_the_deployment_alone(
    run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(deployments, "_run", full)
    point = evaluate(run, gateway, 5)
    assert (point.state, point.avg) == ("evaluated", 0.75)
    assert "No space left" in point.not_deployed


def test_weights_do_not_pile_up_while_a_gateway_drains(
    run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = run / "ends"
    deploys(
        monkeypatch, gateway, f"import os, time\nwhile not os.path.exists({str(ends)!r}): time.sleep(0.01)\n" + TOLD
    )
    monkeypatch.setattr(deployments, "_LOOK_S", 0.01)
    monkeypatch.setattr(deployments, "DEPLOY_S", 20.0)  # where it is never looked at
    looked, seen = evaluations._skip_older, list[list[str]]()

    def looks(folder: Path) -> int:
        if not ends.exists() and (run / FOLDER / "deployed").exists():
            waiting = run / FOLDER / "waiting"
            if not list(waiting.iterdir()):
                place(run, 10, 15, wanted=WANTED)
            newest = looked(folder)
            seen.append(sorted(path.name for path in waiting.iterdir()))
            ends.touch()
            return newest
        return looked(folder)

    monkeypatch.setattr(evaluations, "_skip_older", looks)
    wanted = replace(WANTED, deploy_to=gateway.url, deploy_key_env="KEY")
    place(run, 5, wanted=wanted)
    work(run)
    assert seen == [["global_step_15"]]


def test_two_gateways_keep_their_models_apart(run: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Gateway(run / "other.json")
    try:
        evaluate(run, gateway, 5)
        (model,) = (run / FOLDER / "deployed").glob("*/step_5")
        deploys(monkeypatch, other, TOLD)
        for step in (10, 15, 5):
            evaluate(run, other, step)
        assert model.is_dir()
    finally:
        other.server.shutdown()
        other.server.server_close()
