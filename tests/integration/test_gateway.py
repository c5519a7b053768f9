"""`verl-multiturn gateway` and `deploy` on a real SGLang: sessions, rewards, other weights, an engine that dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from verl_multiturn.models.hash import model_hash
from verl_multiturn.records.read.origin import models_of
from verl_multiturn.records.read.records import Records

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = ROOT / "recipes" / "quickstart" / "model"
ADMIN = "test-admin-key"
COMMAND = [sys.executable, "-m", "verl_multiturn.cli"]
QUESTION = [{"role": "user", "content": "What is 3+4?"}]


class Served:
    """A gateway in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder.with_suffix(".log")
        self._environment = {**os.environ, "GATEWAY_ADMIN": ADMIN, "PYTHONPATH": str(ROOT)}
        words = ["gateway", str(MODEL), "--records", str(folder), "--smoke", "--admin-key-env", "GATEWAY_ADMIN"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=log, env=self._environment, cwd=ROOT)
        while not (found := [line for line in self.said().splitlines() if line.startswith("gateway http")]):
            assert self.process.poll() is None, self.said()
            time.sleep(0.1)
        self.url = found[0].removeprefix("gateway ")
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=120)

    def said(self) -> str:
        return self._log.read_text()

    def post(self, path: str, key: str, **body: Any) -> httpx.Response:
        return self.http.post(path, headers={"Authorization": f"Bearer {key}"}, json=body)

    def start(self, task: str) -> dict[str, Any]:
        answer = self.post("/rl/start_session", ADMIN, task_id=task)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def chat(self, key: str) -> httpx.Response:
        return self.post("/v1/chat/completions", key, model="policy", messages=QUESTION)

    def deploy(self, model: Path) -> tuple[int, dict[str, Any]]:
        words = ["deploy", str(model), "--to", self.url, "--admin-key-env", "GATEWAY_ADMIN"]
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=self._environment, cwd=ROOT)
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    gateway = Served(tmp_path_factory.mktemp("gateway") / "live")
    try:
        yield gateway
    finally:
        gateway.http.close()
        gateway.process.kill()
        gateway.process.wait()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with other weights, of another precision, as a training exports them."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(MODEL, folder)
    torch.manual_seed(0)
    tensors = {name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()}
    save_file(
        {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def test_sessions_are_served_rewarded_and_verified_over_new_weights_and_a_dead_engine(
    served: Served, other: Path
) -> None:
    first, last = model_hash(MODEL), model_hash(other)
    one, two, silent, late = (served.start(task) for task in ("sum", "sum", "other", "sum"))
    assert served.chat(late["api_key"]).status_code == 200
    assert served.chat(one["api_key"]).status_code == 200
    assert served.chat(two["api_key"]).status_code == 200
    status, found = served.deploy(other)
    assert (status, found["state"], found["models"]) == (0, "done", [first, last])
    assert served.chat(two["api_key"]).status_code == 200
    assert served.post("/rl/set_reward", two["api_key"], reward=1).json()["counted"]
    assert served.post("/rl/end_session", two["api_key"]).json() == {
        "session_id": two["session_id"], "completions": 2, "reward": 1.0
    }  # fmt: skip

    assert served.http.get("/ready").status_code == 200
    children = served.children()
    for child in children:
        child.kill()
    psutil.wait_procs(children)
    while served.http.get("/ready").status_code == 200:
        time.sleep(0.1)
    away = served.chat(one["api_key"])
    assert (away.status_code, "retry-after" in away.headers) == (503, True), away.text
    assert served.post("/rl/set_reward", one["api_key"], reward=0.25).json()["counted"]  # of the completion before
    assert served.post("/rl/end_session", one["api_key"]).json()["reward"] == 0.25
    while served.http.get("/ready").status_code != 200:  # SGLang was started again, with the weights that served
        time.sleep(0.1)
    assert served.chat(late["api_key"]).status_code == 200
    assert served.post("/rl/end_session", late["api_key"]).json()["completions"] == 2
    assert served.end() == 0, served.said()

    records = {each["request_id"]: each for each in Records(served.folder).require().records()}
    assert set(records) >= {one["session_id"], two["session_id"]}
    assert models_of(records[one["session_id"]]) == [first]
    assert models_of(records[two["session_id"]]) == [first, last]
    assert models_of(records[late["session_id"]]) == [first, last]
    assert models_of(records[silent["session_id"]]) == []
    assert subprocess.run([*COMMAND, "verify", str(served.folder)], cwd=ROOT).returncode == 0
