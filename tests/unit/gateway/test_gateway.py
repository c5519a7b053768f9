"""The gateway on a scripted engine: sessions, rewards and ends over a real socket, and a restart."""

import asyncio
import errno
import gzip
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.agent_sessions import make_run, turns
from tests.conftest import until
from verl_multiturn.errors import ConfigError
from verl_multiturn.gateway import journal, sessions
from verl_multiturn.gateway.app import Gateway
from verl_multiturn.gateway.files import GatewaySettings
from verl_multiturn.observe.documents.folder import RunDocuments
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.explain.finding import OF_TRAINER
from verl_multiturn.records.read.fates import fates_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.sessions import SessionIndex
from verl_multiturn.records.schema import RunFile
from verl_multiturn.records.write import recorder
from verl_multiturn.records.write.locks import is_held

ADMIN = "admin-key"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_LOOK_S", 0.05)


class Weights:
    def __init__(self) -> None:
        self.models = ["a" * 64]
        self.fault = ""

    async def look(self) -> str:
        return self.fault


class Client:
    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.gateway, self._http = gateway, http

    async def post(self, path: str, key: str | None, body: Any = None) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        async with self._http.post(self.gateway.address + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def completes(
        self, key: str, path: str = "/v1/chat/completions", messages: Any = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Ask for a completion; return status, answer and headers."""
        asked = messages or [{"role": "user", "content": "1+1?"}]
        body = {"model": "policy", "max_tokens": 100, ("input" if path.endswith("responses") else "messages"): asked}
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post(self.gateway.address + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def session(self, **body: Any) -> tuple[str, str]:
        """Let a session begin, get a completion and end; return its id and its key."""
        found = await self.start(**body)
        await self.chat(found["api_key"])
        assert (await self.post("/rl/end_session", found["api_key"]))[0] == 200
        return found["session_id"], found["api_key"]

    async def get(self, path: str, key: str = "") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._http.get(self.gateway.address + path, headers=headers) as response:
            return response.status, await response.text()

    async def start(self, **body: Any) -> dict[str, Any]:
        status, found = await self.post("/rl/start_session", ADMIN, {"task_id": "t", **body})
        assert status == 201, found
        return dict(found)

    async def chat(self, key: str) -> str:
        body = {"model": "policy", "messages": [{"role": "user", "content": "1+1?"}]}
        status, found = await self.post("/v1/chat/completions", key, body)
        assert status == 200, found
        return str(found["id"])


@asynccontextmanager
async def serving(
    folder: Path, *said: str, engine: Any = None, about: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Client]:
    run = make_run(engine or turns(*said))
    gateway = Gateway(run, Weights(), folder, GatewaySettings(**settings), ADMIN, about=about)
    await gateway.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(gateway, http)
    finally:
        await gateway.aclose()


def written(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.sessions.jsonl"))


async def test_a_session_is_rewarded_before_and_after_its_end_and_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, "two", "three") as client:
        session = await client.start(user="u")
        key = session["api_key"]
        assert (await client.post("/rl/set_reward", key, {"reward": 1}))[0] == 409
        first = await client.chat(key)
        assert (await client.post("/rl/set_reward", key, {"reward": 0.25, "interaction_id": first}))[0] == 200
        status, ended = await client.post("/rl/end_session", key)
        assert (status, ended["completions"], ended["reward"]) == (200, 1, 0.25)
        assert await client.post("/rl/end_session", key) == (200, ended)
        assert (await client.post("/rl/set_reward", key, {"reward": 0.5, "id": "x"}))[1]["counted"] is True
    async with serving(tmp_path) as client:
        again = await client.post("/rl/set_reward", key, {"reward": 0.5, "id": "x"})
        assert (again[0], again[1]["counted"]) == (200, False)
        assert (await client.post("/rl/set_reward", key, {"reward": 0.75, "id": "x"}))[0] == 409
        assert (await client.post("/rl/set_reward", key, {"reward": 0.1, "interaction_id": "chatcmpl-no"}))[0] == 404
        status, ended = await client.post("/rl/end_session", ADMIN, {"session_id": session["session_id"]})
        assert (status, ended["reward"]) == (200, 0.75)
        assert (await client.start())["session_id"] != session["session_id"]
    index = SessionIndex(tmp_path)
    index.refresh()
    assert sorted((each.number, each.why) for each in index.sessions.values()) == [(0, "ended"), (1, "closed")]
    assert key not in written(tmp_path)


async def test_bad_requests_are_refused_and_count_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, "two", "two", most=2) as client:
        one, two = await client.start(), await client.start()
        assert (await client.post("/rl/start_session", ADMIN, {"task_id": "t"}))[0] == 429
        await client.chat(one["api_key"])
        for expected, key, body in (
            (401, None, {"reward": 1}),
            (401, "no-key", {"reward": 1}),
            (403, two["api_key"], {"reward": 1, "session_id": one["session_id"]}),
            (400, one["api_key"], b'{"reward": NaN}'),
            (400, one["api_key"], {"reward": True}),
            (400, one["api_key"], {"reward": "1"}),
            (422, one["api_key"], {"reward": 1.5}),
            (400, one["api_key"], b"["),
            (400, one["api_key"], {"reward": 1, "id": 7}),
            (400, ADMIN, {"reward": 1}),
            (404, ADMIN, {"reward": 1, "session_id": "s-no"}),
        ):
            status, answer = await client.post("/rl/set_reward", key, body)
            assert status == expected, (body, answer)
        assert (await client.get("/rl/set_reward"))[0] == 405
        assert (await client.get("/rl/stats"))[0] == 401
        stats = json.loads((await client.get("/rl/stats", ADMIN))[1])
        assert (stats["running"], stats["rewards"]) == (2, 0)


async def test_a_repeated_reward_counts_once_also_at_the_same_time(tmp_path: Path) -> None:
    async with serving(tmp_path, "two") as client:
        session = await client.start()
        await client.chat(session["api_key"])
        sent = [client.post("/rl/set_reward", session["api_key"], {"reward": 0.5, "id": "x"}) for _ in range(20)]
        answers = await asyncio.gather(*sent)
        assert sum(answer["counted"] for _, answer in answers) == 1
        assert (await client.post("/rl/end_session", session["api_key"]))[1]["reward"] == 0.5


async def test_idle_sessions_end(tmp_path: Path) -> None:
    async with serving(tmp_path, idle_s=0.05) as client:
        session = await client.start()
        index = SessionIndex(tmp_path)
        await until(lambda: bool(index.refresh()) and index.sessions[session["session_id"]].ended is not None)
        assert index.sessions[session["session_id"]].why == "idle"


async def test_it_is_ready_while_the_engine_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        assert (await client.get("/ready"))[0] == 200
        client.gateway._engine.fault = "away"  # type: ignore[attr-defined]
        assert (await client.get("/ready"))[0] == 503
        assert (await client.get("/health"))[0] == 200
        assert "verl_multiturn_gateway_sessions_total 0" in (await client.get("/metrics"))[1]


async def test_a_full_disk_counts_nothing_and_a_repeat_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with serving(tmp_path, "two") as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        with monkeypatch.context() as patch:
            patch.setattr(journal, "append_lines", full)
            assert (await client.post("/rl/set_reward", key, {"reward": 0.5, "id": "x"}))[0] == 507
            assert (await client.post("/rl/end_session", key))[0] == 507
            assert (await client.post("/rl/start_session", ADMIN, {"task_id": "t"}))[0] == 507
        assert (await client.post("/rl/set_reward", key, {"reward": 0.5, "id": "x"}))[1]["counted"] is True
        assert (await client.post("/rl/end_session", key))[1]["reward"] == 0.5


def runs(folder: Path) -> list[RunFile]:
    return [RunFile.model_validate_json(path.read_text()) for path in folder.glob("run-*.json")]


def stems(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".sessions.jsonl") for path in folder.glob("*.sessions.jsonl"))


async def test_new_files_are_begun_and_a_session_ends_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "LOOK_S", 0.0)
    async with serving(tmp_path, "two", "two") as client:
        files = client.gateway.store._files
        key = (await client.start())["api_key"]
        await client.chat(key)
        first = stems(tmp_path)
        files.current.began -= 25 * 3600
        await until(lambda: len(stems(tmp_path)) == 2)
        assert is_held(tmp_path / f"{first[0]}.sessions.jsonl")
        (second,) = set(stems(tmp_path)) - set(first)
        _, other = await client.session()
        assert (await client.post("/rl/end_session", key))[0] == 200
        await until(lambda: not is_held(tmp_path / f"{first[0]}.sessions.jsonl"))
        assert files.of(first[0]) is None
        # Its files are closed: a reward goes elsewhere, and is its own all the same.
        assert (await client.post("/rl/set_reward", key, {"reward": 0.5}))[0] == 200
        assert (await client.post("/rl/end_session", key))[1]["reward"] == 0.5
        await client.post("/rl/set_reward", other, {"reward": 0.25})
        await until(lambda: any((tmp_path / "join").glob("*.parquet")) if (tmp_path / "join").exists() else False)
    events = [json.loads(line) for line in (tmp_path / f"{first[0]}.sessions.jsonl").read_text().splitlines()]
    assert [each["event"] for each in events] == ["start", "end"]
    assert '"start"' in (tmp_path / f"{second}.sessions.jsonl").read_text()
    assert "lost" not in caplog.text
    records = Records(tmp_path)
    assert sorted(fate.fate for fate in fates_of(records)) == ["collected", "collected"]
    assert records.faults == []


async def test_files_are_begun_when_the_records_are_large(tmp_path: Path) -> None:
    async with serving(tmp_path, "two", rotate_mb=1e-4) as client:
        await client.session()
        await until(lambda: len(stems(tmp_path)) == 2)
        client.gateway.store._files.current.began -= 25 * 3600
        await asyncio.sleep(0.3)
        assert len(stems(tmp_path)) == 2  # nothing began in the new ones


async def test_old_sessions_go_and_their_keys_too(tmp_path: Path) -> None:
    day = 0.5 / 86400
    async with serving(tmp_path, "two", "two", retain_days=day) as client:
        name, key = await client.session(user="u")
        await until(lambda: name not in client.gateway.store.known._index.sessions)
        assert name not in written(tmp_path)
        assert (await client.post("/rl/set_reward", key, {"reward": 1}))[0] == 401
        assert (await client.post("/rl/end_session", ADMIN, {"session_id": name}))[0] == 404
        younger = await client.start()
        assert len(runs(tmp_path)) == 1
        lines = [json.loads(line) for line in written(tmp_path).splitlines()]
        assert [(each["session_id"], each["number"]) for each in lines] == [(younger["session_id"], 1)]


async def test_a_clock_that_jumps_ahead_makes_nothing_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, "two", retain_days=30) as client:
        (stem,) = stems(tmp_path)
        name, _ = await client.session()
        client.gateway.store._files.current.began -= 25 * 3600
        await until(lambda: not is_held(tmp_path / f"{stem}.sessions.jsonl"))
        files, now = client.gateway.store._files, time.time() + 400 * 86400
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now)
            files._cleaned = float("-inf")
            assert await files.clean() is False
        assert name in written(tmp_path)


async def test_the_run_is_described(tmp_path: Path) -> None:
    about = {"tokenizer": {"path": "m"}, "schemas": [], "settings": {"served": "m", "hf_token": "hf_secretsecret"}}
    async with serving(tmp_path, about=about, rewards=(-1.0, 1.0)):
        pass
    (run,) = runs(tmp_path)
    assert stems(tmp_path)[0].startswith(f"{run.start}-")
    assert run.settings["gateway"]["rewards"] == [-1.0, 1.0]
    assert run.settings["hf_token"] == "***"
    assert run.tokenizer == {"path": "m"}
    with pytest.raises(ConfigError, match="about has 'start', expected versions, settings, "):
        async with serving(tmp_path, about={"start": "mine"}):
            pass


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("start_session", {"task_id": "t", "api_key": "x"}, "api_key"),
        ("set_reward", {"reward": 0.5, "interactionid": "chatcmpl-1"}, "interactionid"),
        ("set_reward", {"reward": 0.5, "generation": 0}, "generation"),
        ("end_session", {"reward": 1.0}, "reward"),
    ],
)
async def test_a_field_that_is_not_known_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any], named: str
) -> None:
    async with serving(tmp_path, "two") as client:
        session = await client.start()
        await client.chat(session["api_key"])
        key = ADMIN if path == "start_session" else session["api_key"]
        status, answer = await client.post(f"/rl/{path}", key, body)
        assert (status, repr(named) in answer["error"]["message"]) == (400, True)
        assert '"reward"' not in written(tmp_path)
        assert client.gateway.store.running == 1


async def test_a_body_is_read_as_those_of_the_endpoint(tmp_path: Path) -> None:
    async with serving(tmp_path, "two") as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        url, headers = client.gateway.address + "/rl/set_reward", {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession() as http:
            for data, coding, status in (
                (gzip.compress(b'{"reward": 1}'), "gzip", 200),
                (b'{"reward": 1}', "gzip", 400),
                (b'{"reward": 1}', "br", 415),
                (gzip.compress(b" " * 2_000_000), "gzip", 413),
            ):
                async with http.post(url, data=data, headers={**headers, "Content-Encoding": coding}) as response:
                    assert response.status == status, await response.text()


async def test_a_rule_hides_no_name_in_secret(tmp_path: Path) -> None:
    async with serving(tmp_path, "two", redact=("re:[a-z]+@[a-z.]+",)) as client:
        for body in ({"task_id": "ann@b.de"}, {"task_id": "t", "user": "ann@b.de"}):
            status, answer = await client.post("/rl/start_session", ADMIN, body)
            assert (status, "ann" in json.dumps(answer)) == (400, False)
        key = (await client.start(user="ann"))["api_key"]
        await client.chat(key)
        assert (await client.post("/rl/set_reward", key, {"reward": 1, "id": "ann@b.de"}))[0] == 400
        assert "@" not in written(tmp_path)
    for name in ("user", "task", "session"):
        with pytest.raises(ConfigError, match=f"--redact '{name}' would hide"):
            Gateway(make_run(turns()), Weights(), tmp_path, GatewaySettings(redact=(name,)), ADMIN)


async def test_an_id_counts_once_over_two_gateways_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, "two") as one, serving(tmp_path) as two:
        key = (await one.start())["api_key"]
        await one.chat(key)
        await one.post("/rl/end_session", key)
        for number in range(8):
            bodies = [{"reward": value, "id": f"i{number}"} for value in (0.25, 0.5)]
            answers = await asyncio.gather(
                one.post("/rl/set_reward", key, bodies[0]), two.post("/rl/set_reward", key, bodies[1])
            )
            assert sorted(status for status, _ in answers) == [200, 409]
    events = [json.loads(line)["event"] for line in written(tmp_path).splitlines()]
    assert events.count("reward") == 8


async def test_a_repeated_request_stands_for_the_completion_that_it_named_first(tmp_path: Path) -> None:
    async with serving(tmp_path, "two", "three") as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        body = {"reward": 1, "id": "r1"}
        assert (await client.post("/rl/set_reward", key, body))[1]["counted"] is True
        await client.chat(key)
        assert (await client.post("/rl/set_reward", key, body))[1]["counted"] is False
        assert (await client.post("/rl/end_session", key))[1]["reward"] == 1
        assert (await client.post("/rl/set_reward", key, body))[1]["counted"] is False


async def test_an_id_without_an_interaction_stays_with_the_completion_that_it_first_named(tmp_path: Path) -> None:
    async with serving(tmp_path, "a", "b") as client:
        found = await client.start()
        key, named = found["api_key"], {"reward": 1.0, "id": "x"}
        first = await client.chat(key)
        assert (await client.post("/rl/set_reward", key, named))[1]["counted"] is True
        second = await client.chat(key)  # before the client repeats a request of which it has no answer
        assert (await client.post("/rl/set_reward", key, named))[1]["counted"] is False
        assert (await client.post("/rl/set_reward", key, {"reward": 0.5, "id": "x"}))[0] == 409
        assert (await client.post("/rl/end_session", key))[1]["reward"] == 1.0
        assert (await client.post("/rl/set_reward", key, named))[1]["counted"] is False
        for interaction, counted in ((first, False), (second, True)):  # named, each completion has ids of its own
            status, answer = await client.post("/rl/set_reward", key, {**named, "interaction_id": interaction})
            assert (status, answer["counted"]) == (200, counted)


async def test_its_folder_has_an_end_and_misses_nothing_of_a_trainer(tmp_path: Path) -> None:
    async with serving(tmp_path, "two", "three") as client:
        await client.session()
        await client.start()
    async with serving(tmp_path, "four") as client:
        await client.session()
        records = Records(tmp_path)
        starts = RunDocuments(records).run()["starts"]
        assert [start["ended"] is None for start in starts] == [False, True]
    records = Records(tmp_path)
    assert not records.has_trainer
    assert not {finding.symptom for finding in explain(records)} & OF_TRAINER
    assert all(start["ended"] for start in RunDocuments(records).run()["starts"])
