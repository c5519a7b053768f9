"""`deploy_model` and `deployment_at`: what a gateway answers, and what it does not."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import ROOT
from tests.support.served import answering, served
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.gateway import deploy_client
from verl_multiturn.gateway.deploy_client import deploy_model, deployment_at
from verl_multiturn.models.hash import model_hash

MODEL = ROOT / "recipes" / "quickstart" / "model"
HASH = model_hash(MODEL)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_client, "_LOOK_S", 0.0)


def state(name: str, model: str | None = HASH) -> bytes:
    return json.dumps({"state": name, "model": model}).encode()


REFUSAL = b'{"error": {"message": "this key opens nothing"}}'


async def deploying(*answers: Any, report: list[str] | None = None) -> tuple[Any, list[Any]]:
    """Deploy at a gateway that answers so, and return the report and the requests."""
    seen: list[Any] = []
    async with served(rl__deploy=answering(*answers, seen=seen)) as url:
        said = [] if report is None else report
        found = await asyncio.to_thread(deploy_model, MODEL, url + "/", "key", "drain", 5.0, said.append)
    return found, seen


async def test_a_deployment_is_followed_to_its_end() -> None:
    said: list[str] = []
    states = ("checking", "checking", "draining", "failed")
    found, seen = await deploying(*map(state, states), report=said)
    assert found["state"] == "failed"
    assert seen == [{"path": str(MODEL), "hash": HASH, "mode": "drain", "drain_s": 5.0}, *["/rl/deploy"] * 3]
    assert said == [f"{MODEL} has the weights {HASH}", "checking", "draining", "failed"]


@pytest.mark.parametrize("later", [state("idle", None), state("loading", "ff" * 8)])
async def test_a_gateway_that_was_started_anew_or_deploys_another_model(later: bytes) -> None:
    with pytest.raises(EngineError, match="by now: it was started anew, or another"):
        await deploying(state("checking"), later)


async def test_a_gateway_that_is_away_for_a_moment_is_asked_again() -> None:
    found, _ = await deploying(state("checking"), b"no JSON", 503, state("done"))
    assert found["state"] == "done"


async def test_a_refusal_is_one_before_the_beginning_alone() -> None:
    async with served(rl__deploy=lambda request: _refused(request, at="POST")) as url:
        with pytest.raises(ConfigError, match="answered 401: this key opens nothing"):
            await asyncio.to_thread(deploy_model, MODEL, url, "key", "drain", None, lambda line: None)
        assert (await asyncio.to_thread(deployment_at, url, "key"))["state"] == "checking"
    async with served(rl__deploy=lambda request: _refused(request, at="GET")) as url:
        with pytest.raises(EngineError, match="answered 401: this key opens nothing"):
            await asyncio.to_thread(deploy_model, MODEL, url, "key", "drain", None, lambda line: None)
        with pytest.raises(ConfigError, match="answered 401: this key opens nothing"):
            await asyncio.to_thread(deployment_at, url, "key")


async def _refused(request: Any, at: str) -> Any:
    if request.method == at:
        return web.Response(body=REFUSAL, status=401)
    return web.Response(body=state("checking"))


async def test_a_gateway_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_client, "_SILENT_S", 0.0)
    with pytest.raises(EngineError, match="no answer of a gateway"):
        await deploying(state("checking"), b"no JSON")


def test_ranks_are_refused_with_the_command_that_exports_them(tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text("{}")
    (folder / "fsdp_config.json").write_text('{"world_size": 1}')
    (folder / "model_world_size_1_rank_0.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="verl-multiturn export"):
        deploy_model(folder, "http://127.0.0.1:1", "key", "drain", None, lambda line: None)
