"""New weights while agents are answered: `DeployedEngine` and `Deployer`, at a stand-in of SGLang."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.weights_server import WeightsServer
from verl_multiturn.errors import EngineError
from verl_multiturn.gateway import deploy
from verl_multiturn.gateway import engine as engine_module
from verl_multiturn.gateway.deploy import Deployer, DeployRefusedError
from verl_multiturn.gateway.engine import DeployedEngine
from verl_multiturn.models.hash import model_hash
from verl_multiturn.rollout.engines import http_engine
from verl_multiturn.rollout.engines.protocol import Ask

BASE = ROOT / "recipes" / "quickstart" / "model"
TRIAL = [1, 2, 3]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of three models, whose weights differ in their last byte: the token that each says."""
    found = {}
    for token in (5, 6, 7):
        folder = tmp_path_factory.mktemp("models") / f"says-{token}"
        shutil.copytree(BASE, folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + bytes([token]))
        found[token] = folder
    return found


def token_of(folder: Path) -> int:
    return (folder / "model.safetensors").read_bytes()[-1]


def ask(tokens: int = 4) -> Ask:
    return Ask("one", [1, 2], {}, tokens)


@asynccontextmanager
async def serving(
    models: dict[int, Path], step_s: float = 0.0
) -> AsyncIterator[tuple[WeightsServer, DeployedEngine, Deployer]]:
    server = WeightsServer(5, model_hash(models[5]), token_of, step_s)
    async with server.serve() as url:
        engine = DeployedEngine(url, server.version)
        deployer = Deployer(engine, models[5], TRIAL)
        try:
            yield server, engine, deployer
        finally:
            await deployer.aclose()
            await engine.aclose()


def order(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(folder), "hash": model_hash(folder), **changes}


async def test_new_weights_sample_after_their_trial(models: dict[int, Path]) -> None:
    async with serving(models) as (server, engine, deployer):
        assert (await engine.generate(ask())).versions == [0] * 4
        assert deployer.begin(order(models[6]))["state"] == "checking"
        now = await deployer.wait()
        assert (now.state, now.error) == ("done", "")
        made = await engine.generate(ask())
        assert (made.ids, made.versions) == ([6] * 4, [1] * 4)
        assert engine.models == [model_hash(models[5]), model_hash(models[6])]
        # Back again: a hash has one version.
        deployer.begin(order(models[5]))
        assert (await deployer.wait()).state == "done"
        assert (await engine.generate(ask())).versions == [0] * 4
        assert server.loaded == [str(models[6]), str(models[5])]
        assert await engine.look() == ""


@pytest.mark.parametrize("keeps_tokens", [True, False])
async def test_a_generation_that_is_cut_goes_on_with_the_new_weights(
    models: dict[int, Path], keeps_tokens: bool
) -> None:
    async with serving(models, step_s=0.002) as (server, engine, deployer):
        server.keeps_tokens = keeps_tokens
        running = [asyncio.ensure_future(engine.generate(ask(1500))) for _ in range(4)]
        await asyncio.sleep(0.05)
        deployer.begin(order(models[6], mode="cut"))
        now = await deployer.wait()
        assert (now.state, now.interrupted) == ("done", 4)
        for made in await asyncio.gather(*running):
            assert made.finish == "length"
            assert len(made.ids) == len(made.logprobs) == len(made.versions) == 1500
            assert {(5, 0), (6, 1)} >= set(zip(made.ids, made.versions, strict=True)) >= {(6, 1)}
            assert made.versions == sorted(made.versions)
            assert (made.versions[0] == 0) is keeps_tokens


async def test_a_drain_lets_generations_end(models: dict[int, Path]) -> None:
    async with serving(models, step_s=0.002) as (_, engine, deployer):
        running = asyncio.ensure_future(engine.generate(ask(200)))
        await asyncio.sleep(0.02)
        deployer.begin(order(models[6]))
        with pytest.raises(DeployRefusedError, match="is under way") as refused:
            deployer.begin(order(models[7]))
        assert refused.value.status == 409
        now = await deployer.wait()
        assert (now.state, now.interrupted) == ("done", 0)
        assert (await running).versions == [0] * 200


async def test_a_caller_that_goes_away_in_a_pause(models: dict[int, Path]) -> None:
    async with serving(models, step_s=0.002) as (_, engine, _):
        async with engine.paused(0):
            waiting = asyncio.ensure_future(engine.generate(ask()))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(RuntimeError, match="paused already"):
                async with engine.paused(0):
                    pass
        running = asyncio.ensure_future(engine.generate(ask(5000)))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine.underway == 0


def cannot_load(folder: Path) -> int:
    if token_of(folder) == 6:
        raise ValueError("size mismatch")
    return token_of(folder)


async def test_weights_that_do_not_load_leave_the_old_ones(models: dict[int, Path]) -> None:
    async with serving(models) as (server, engine, deployer):
        server.token_of = cannot_load
        deployer.begin(order(models[6]))
        now = await deployer.wait()
        assert now.state == "failed"
        assert "size mismatch" in now.error
        assert (await engine.generate(ask())).versions == [0] * 4
        assert engine.models == [model_hash(models[5])]
        assert await engine.look() == ""


async def test_weights_that_fail_their_trial_are_taken_back(models: dict[int, Path]) -> None:
    async with serving(models) as (server, engine, deployer):
        server.nan_tokens = {6}
        deployer.begin(order(models[6]))
        now = await deployer.wait()
        assert (now.state, server.loaded) == ("failed", [str(models[6]), str(models[5])])
        assert "failed their trial: a log-probability is nan" in now.error
        assert (await engine.generate(ask())).ids == [5] * 4
        assert engine.models == [model_hash(models[5])]


async def test_the_old_weights_cannot_be_loaded_again_either(models: dict[int, Path]) -> None:
    def none(folder: Path) -> int:
        raise ValueError("no memory")

    async with serving(models) as (server, engine, deployer):
        server.token_of = none
        deployer.begin(order(models[6]))
        assert (await deployer.wait()).state == "failed"
        assert "could not be loaded again" in engine.fault
        assert "restart the gateway" in await engine.look()
        with pytest.raises(EngineError, match="could not be loaded again"):
            await engine.generate(ask())


async def test_a_folder_that_is_written_into_after_its_check_is_taken_back(
    models: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, check = tmp_path / "new", deploy.check_candidate
    shutil.copytree(models[6], folder)

    def check_and_write(*given: Any) -> Any:
        found = check(*given)
        shutil.copy(models[7] / "model.safetensors", folder)
        return found

    monkeypatch.setattr(deploy, "check_candidate", check_and_write)
    async with serving(models) as (server, engine, deployer):
        deployer.begin(order(folder))
        now = await deployer.wait()
        assert now.state == "failed"
        assert f"its weights are {model_hash(models[7])} by now, and were {model_hash(models[6])}" in now.error
        assert server.loaded == []
        made = await engine.generate(ask())
        assert (made.ids, made.versions, engine.models) == ([5] * 4, [0] * 4, [model_hash(models[5])])


async def test_a_mistake_in_the_trial_takes_the_weights_back(
    models: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def broken(made: Any, version: int) -> str:
        tried.append(version)
        return "" if version == 0 else str(1 // 0)

    monkeypatch.setattr(deploy, "trial_fault", broken)
    async with serving(models) as (_, engine, deployer):
        deployer.begin(order(models[6]))
        now = await deployer.wait()
        assert (now.state, tried) == ("failed", [1, 0])
        assert "ZeroDivisionError" in now.error
        assert (await engine.generate(ask())).ids == [5] * 4


async def test_an_order_to_stop_that_the_server_has_missed_is_repeated(
    models: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_ABORT_S", 60.0)
    async with serving(models, step_s=0.002) as (server, engine, deployer):
        server.deaf = 2
        running = asyncio.ensure_future(engine.generate(ask(1500)))
        await asyncio.sleep(0.05)
        deployer.begin(order(models[6], mode="cut"))
        assert (await deployer.wait()).state == "done"
        made = await running
        assert (made.ids[0], made.versions[0], made.ids[-1], made.versions[-1]) == (5, 0, 6, 1)


async def test_an_error_in_the_place_of_a_generation_that_is_cut(models: dict[int, Path]) -> None:
    async with serving(models, step_s=0.002) as (server, engine, deployer):
        server.abort_status = 500
        running = asyncio.ensure_future(engine.generate(ask(1500)))
        await asyncio.sleep(0.05)
        deployer.begin(order(models[6], mode="cut"))
        assert (await deployer.wait()).state == "done"
        made = await running
        assert (made.ids, made.versions) == ([6] * 1500, [1] * 1500)


async def test_a_trial_without_an_end_is_taken_back(models: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "_TRIAL_S", 0.2)
    async with serving(models) as (server, engine, deployer):
        server.hanging_tokens = {6}
        deployer.begin(order(models[6]))
        now = await deployer.wait()
        assert (now.state, server.loaded) == ("failed", [str(models[6]), str(models[5])])
        assert "did not end their trial in 0.2 s" in now.error
        assert (await engine.generate(ask())).ids == [5] * 4


async def test_a_gateway_that_is_closed_while_weights_are_loaded(models: dict[int, Path]) -> None:
    async with serving(models, step_s=0.05) as (server, engine, deployer):
        deployer.begin(order(models[6]))
        await server.loads.wait()
        await deployer.aclose()
        now = await deployer.wait()
        assert (now.state, now.error) == ("failed", "the gateway was closed")
        assert server.loaded[-1] == str(models[5])
        assert (server.version, engine.models) == (model_hash(models[5]), [model_hash(models[5])])


async def test_links_that_change_later(models: dict[int, Path], tmp_path: Path) -> None:
    served, newest = tmp_path / "served", tmp_path / "newest"
    served.symlink_to(models[5])
    newest.symlink_to(models[6])
    async with serving(models) as (server, engine, _):
        deployer = Deployer(engine, served, TRIAL)
        served.unlink()
        deployer.begin(order(newest))
        newest.unlink()
        newest.symlink_to(models[7])
        assert (await deployer.wait()).error == ""
        assert deployer.state()["serves_path"] == str(models[6])
        deployer.begin(order(newest))
        assert (await deployer.wait()).error == ""
        assert server.loaded == [str(models[6]), str(models[7])]


async def test_a_report_names_what_serves_until_the_new_weights_do(models: dict[int, Path]) -> None:
    serves = model_hash(models[5]), str(models[5])
    async with serving(models) as (server, _, deployer):
        seen = []

        def seeing(folder: Path) -> int:
            seen.append(deployer.state())
            return token_of(folder)

        server.token_of = seeing
        deployer.begin(order(models[6]))
        await deployer.wait()
        seen.append(deployer.state())
        assert [(each["state"], each["serves"], each["serves_path"]) for each in seen] == [
            ("loading", *serves),
            ("done", model_hash(models[6]), str(models[6])),
        ]


async def test_weights_that_somebody_else_swapped_under_the_old_name(models: dict[int, Path]) -> None:
    async with serving(models) as (server, engine, deployer):
        assert (await engine.generate(ask())).versions == [0] * 4
        server.token, server.place = 7, "/elsewhere"
        with pytest.raises(
            EngineError, match="has loaded '/elsewhere', which was not deployed here, under the name of"
        ):
            await engine.generate(ask())
        assert "'/elsewhere'" in await engine.look()
        deployer.begin(order(models[6]))
        assert (await deployer.wait()).error == ""
        made = await engine.generate(ask())
        assert (made.ids, made.versions, await engine.look()) == ([6] * 4, [1] * 4, "")
        server.token, server.place = 7, "/elsewhere"
        assert "which was not deployed here" in await engine.look()


async def test_one_question_serves_all_generations_that_ended_before_it(models: dict[int, Path]) -> None:
    async with serving(models, step_s=0.01) as (_, engine, _):
        asked: list[str] = []
        real = engine._get

        async def counted(path: str) -> dict[str, Any]:
            asked.append(path)
            await asyncio.sleep(0.2)
            return await real(path)

        engine._get = counted  # type: ignore[method-assign]
        await asyncio.gather(*(engine.generate(ask()) for _ in range(20)))
        assert 0 < len(asked) < 10


async def test_a_look_while_weights_are_loaded_is_no_fault(models: dict[int, Path]) -> None:
    async with serving(models, step_s=0.02) as (server, engine, _):
        assert await engine.look() == ""
        real, held = engine._get, asyncio.Event()

        async def late(path: str) -> dict[str, Any]:
            found = await real(path)
            await held.wait()
            return found

        engine._get = late  # type: ignore[method-assign]
        looking = asyncio.ensure_future(engine._check_place())
        await asyncio.sleep(0.05)
        engine._get = real  # type: ignore[method-assign]
        async with engine.paused(0):
            await engine.load(str(models[6]), server.version)
        held.set()
        await looking
        assert engine.fault == ""


async def test_weights_that_somebody_else_swapped(models: dict[int, Path]) -> None:
    async with serving(models) as (server, engine, _):
        server.version = "00ff00ff00ff00ff"
        with pytest.raises(EngineError, match="'00ff00ff00ff00ff' sampled it, and those deployed here are"):
            await engine.generate(ask())
        assert "serves the weights '00ff00ff00ff00ff'" in await engine.look()
        server.version = engine.model
        assert await engine.look() == ""


def changed(models: dict[int, Path], to: Path, change: str) -> Path:
    folder = to / "other"
    shutil.copytree(models[6], folder)
    config, tokenizer = folder / "config.json", folder / "tokenizer.json"
    if change == "vocabulary":
        held = json.loads(tokenizer.read_text())
        vocabulary = held["model"]["vocab"]
        one, two = list(vocabulary)[10:12]
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
        tokenizer.write_text(json.dumps(held))
    elif change == "architecture":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "qwen3"}))
    elif change == "positions":
        held = json.loads(config.read_text())
        config.write_text(json.dumps({**held, "rope_parameters": {**held["rope_parameters"], "rope_theta": 1e6}}))
    elif change == "tail":
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"more")
    elif change == "second file":
        shutil.copy(models[7] / "model.safetensors", folder / "more.safetensors")
    elif change == "template":
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    elif change == "half":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif change == "tensor":
        weights = folder / "model.safetensors"
        data = weights.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        wide = next(
            name for name, each in header.items() if len(each.get("shape", [])) == 2 and len({*each["shape"]}) == 2
        )
        header[wide]["shape"].reverse()
        written = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        weights.write_bytes(data[:8] + written + data[8 + length :])
    elif change == "no config":
        config.write_text("{")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("vocabulary", "has another vocabulary than the model that serves"),
        ("architecture", "has another model_type in config.json than the model that serves: 'qwen3'"),
        ("positions", "has another rope_parameters in config.json than the model that serves"),
        ("tail", "model.safetensors' cannot be loaded ("),
        ("second file", "holds 'more.safetensors' beside 'model.safetensors', and a server may load both"),
        ("template", "has another chat template than the model that serves"),
        ("half", "is no whole file of safetensors (it is cut short"),
        ("tensor", "has another tensor "),
        ("no config", "config.json"),
        ("hash", "and 00000000000000ff were to be deployed; name the folder that both see"),
        ("gone", "is no folder"),
    ],
)
async def test_a_model_that_cannot_take_its_place_touches_nothing(
    models: dict[int, Path], tmp_path: Path, change: str, message: str
) -> None:
    folder = changed(models, tmp_path, change)
    weights = "00000000000000ff" if change in ("hash", "half") else model_hash(folder)
    async with serving(models) as (server, _, deployer):
        deployer.begin({"path": str(tmp_path / "no" if change == "gone" else folder), "hash": weights})
        now = await deployer.wait()
        assert (now.state, server.loaded) == ("failed", [])
        assert message in now.error


def in_float32(folder: Path) -> None:
    """Write a model's weights in another precision, and its configuration as another program spells it."""
    from safetensors.torch import load_file, save_file

    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: tensor.float() for name, tensor in load_file(weights).items()}, weights)
    held = json.loads(config.read_text())
    names = ("dtype", "rope_parameters", "layer_types", "use_cache")
    spelled = {"torch_dtype": "float32", "rope_theta": 10000.0, "eos_token_id": [2, 5]}
    config.write_text(json.dumps({**{name: each for name, each in held.items() if name not in names}, **spelled}))


async def test_weights_in_another_precision_are_cast_by_the_server(models: dict[int, Path], tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(models[6], folder)
    in_float32(folder)
    async with serving(models) as (server, _, deployer):
        server.token_of = lambda folder: 6
        deployer.begin(order(folder))
        now = await deployer.wait()
        assert (now.state, now.error) == ("done", "")


async def test_the_model_that_serves_is_gone(models: dict[int, Path], tmp_path: Path) -> None:
    served = tmp_path / "served"
    shutil.copytree(models[5], served)
    async with serving(models) as (server, engine, _):
        deployer = Deployer(engine, served, TRIAL)
        shutil.copy(models[7] / "model.safetensors", served)
        deployer.begin(order(models[6]))
        now = await deployer.wait()
        assert (now.state, server.loaded) == ("failed", [])
        assert "could not be taken back" in now.error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "expected a JSON object"),
        ({"path": "relative", "hash": "0" * 16}, "expected the absolute path"),
        ({"path": "/a\0b", "hash": "0" * 16}, "expected the absolute path"),
        ({"path": "/a", "hash": "0" * 15}, "expected 16 hexadecimal digits"),
        ({"path": "/a", "hash": "0" * 16, "mode": "now"}, "expected 'drain' or 'cut'"),
        ({"path": "/a", "hash": "0" * 16, "drain_s": -1}, "expected seconds from 0 to 3600"),
        ({"path": "/a", "hash": "0" * 16, "drain_s": float("nan")}, "expected seconds from 0 to 3600"),
        ({"path": "/a", "hash": "0" * 16, "drain_s": True}, "expected seconds from 0 to 3600"),
        ({"path": "/a", "hash": "0" * 16, "drian_s": 1}, "unknown field 'drian_s'"),
    ],
)
async def test_requests_that_are_none(models: dict[int, Path], body: Any, message: str) -> None:
    async with serving(models) as (_, _, deployer):
        with pytest.raises(DeployRefusedError, match=message) as refused:
            deployer.begin(body)
        assert refused.value.status == 400
        assert deployer.state()["state"] == "idle"
