"""The servers of opponents: processes of their own, which answer, die, are started again, and end."""

from __future__ import annotations

import asyncio
import os
import signal
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import composed
from verl_multiturn.errors import OutageError
from verl_multiturn.models.checkpoints import POSITION
from verl_multiturn.models.evaluation_model import EvaluatedModel
from verl_multiturn.verl_bridge.servers import opponents, sglang_child
from verl_multiturn.verl_bridge.servers.opponents import OpponentServers

pytestmark = [pytest.mark.stack, pytest.mark.slow]

MODEL = ROOT / "recipes" / "quickstart" / "model"
PROGRAM = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = json.loads(sys.argv[1])
assert arguments["skip_tokenizer_init"] is False
if "broken" in arguments["model_path"]:
    sys.exit("no such model")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"model": arguments["model_path"], "gpus": __import__("os").environ["CUDA_VISIBLE_DEVICES"]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

ThreadingHTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()
"""
"""A program in the place of SGLang's server."""


@asynccontextmanager
async def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpponentServers]:
    program = tmp_path / "serve.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(sglang_child, "_PROGRAM", program)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    config = composed("tictactoe", overrides=[f"actor_rollout_ref.model.path={MODEL}"], out=tmp_path / "run")
    made = OpponentServers(config)
    try:
        yield made
    finally:
        await made.aclose()


async def answer(address: str) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False) as client:
        found: dict[str, Any] = (await client.get(address)).json()
        return found


async def ended(process: int) -> bool:
    for _ in range(200):
        with suppress(ProcessLookupError):
            os.killpg(process, 0)
            await asyncio.sleep(0.05)
            continue
        return True
    return False


async def test_a_server_serves_its_model_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers(tmp_path, monkeypatch) as made:
        first, again = await asyncio.gather(made.address(0), made.address(0))
        assert first == again
        assert first.endswith("/v1")
        assert await answer(first) == {"model": str(MODEL), "gpus": ""}
        other = await made.address(str(MODEL))
        assert other != first
        processes = await made.processes()
        assert set(processes) == {0, str(MODEL)}
    assert [await ended(process) for process in processes.values()] == [True, True]


async def test_a_server_that_died_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with servers(tmp_path, monkeypatch) as made:
        first = await made.address(0)
        process = (await made.processes())[0]
        os.killpg(process, signal.SIGKILL)
        for _ in range(200):
            if (again := await made.address(0)) != first:
                break
            await asyncio.sleep(0.05)
        assert (await answer(again))["model"] == str(MODEL)
        assert (await made.processes())[0] != process


async def test_a_server_that_cannot_start_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in MODEL.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    async with servers(tmp_path, monkeypatch) as made:
        with pytest.raises(OutageError, match=r"broken cannot be served: .*exit status 1 .*\n?.*no such model"):
            await made.address(str(broken))
        with pytest.raises(OutageError, match="step 3 cannot be served: "):
            await made.address(3)
        assert await made.processes() == {}


async def test_a_checkpoint_is_there_once_it_is_whole_and_of_an_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(tmp_path, monkeypatch) as made:
        folder = tmp_path / "run" / "checkpoints" / "global_step_2"
        assert await made.has(0, 0)
        assert not await made.has(2, 3)
        (folder / "actor").mkdir(parents=True)
        assert not await made.has(2, 3)
        with zipfile.ZipFile(folder / POSITION, "w") as position:
            position.writestr("archive/data.pkl", b"")
        assert [await made.has(2, step) for step in (1, 2, 3, 9)] == [False, False, True, True]


async def test_an_export_is_of_the_checkpoint_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that began anew, or went on from an earlier step, has other weights under the same step."""
    exports: list[tuple[Path, bool]] = []

    def evaluated(named: str, model: Path, out: Path, *rest: Any) -> EvaluatedModel:
        exports.append((out, (out / "model").is_dir()))
        (out / "model").mkdir(parents=True, exist_ok=True)
        (out / "model.json").touch()
        return EvaluatedModel(named, MODEL, "hash", {})

    monkeypatch.setattr(opponents, "evaluated", evaluated)
    monkeypatch.setattr(opponents, "find_model", Path)
    position = tmp_path / "run" / "checkpoints" / "global_step_2" / POSITION
    position.parent.mkdir(parents=True)
    position.touch()
    async with servers(tmp_path, monkeypatch) as made:
        await made.address(2)
    async with servers(tmp_path, monkeypatch) as made:
        await made.address(2)
        later = (exports[0][0] / "model.json").stat().st_mtime + 10
        os.utime(position, (later, later))
    async with servers(tmp_path, monkeypatch) as made:
        await made.address(2)
        for run in ("a", "b"):
            await made.address(str(tmp_path / run / "global_step_2"))
    assert [held for _, held in exports] == [False, True, False, False, False]
    assert len({out for out, _ in exports}) == 3
