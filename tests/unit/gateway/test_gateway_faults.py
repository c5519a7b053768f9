"""The gateway where disks are full, the engine is away, gateways are killed, clocks jump and sessions hold secrets."""

import asyncio
import errno
import gzip
import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent_sessions import make_run, turns
from tests.conftest import until
from tests.support.replayed_sessions import replayed
from tests.unit.gateway.test_gateway import ADMIN, serving, stems, written
from verl_multiturn.errors import EngineError
from verl_multiturn.gateway import files as gateway_files
from verl_multiturn.gateway import journal, sessions
from verl_multiturn.records.read.fates import fates_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.sessions import SessionIndex
from verl_multiturn.records.write import line_file
from verl_multiturn.records.write import records as record_files
from verl_multiturn.records.write.locks import is_held
from verl_multiturn.records.write.records import SEEN
from verl_multiturn.records.write.share import NO_SHARE
from verl_multiturn.replay.engine import ReplayEngine
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_LOOK_S", 0.05)
    monkeypatch.setattr(sessions, "_AGAIN_S", 0.05)


def full(*given: Any, **more: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def kept(folder: Path) -> list[dict[str, Any]]:
    return list(Records(folder).records())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def unpacked(folder: Path) -> list[str]:
    """Return the texts of all files but the run's, which has the rule."""
    data = [path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith("run-")]
    return [(gzip.decompress(each) if each[:2] == b"\x1f\x8b" else each).decode("latin-1") for each in data]


def fates(folder: Path) -> list[tuple[str, str]]:
    return [(fate.fate, fate.why) for fate in fates_of(Records(folder))]


@pytest.mark.parametrize("call", ["append", "sync"])
async def test_a_record_that_the_disk_does_not_take_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with serving(tmp_path, "two", most=1) as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        with monkeypatch.context() as patch:
            patch.setattr(line_file, call, full)
            monkeypatch.setattr(sessions, "_AGAIN_S", 3600.0)
            for _ in range(2):
                status, answer = await client.post("/rl/end_session", key)
                assert (status, answer["error"]["code"]) == (507, "not_written")
            assert (await client.post("/rl/start_session", ADMIN, {"task_id": "t"}))[0] == 429  # it is in memory
            assert (await client.completes(key))[0] == 410
        assert (await client.post("/rl/set_reward", key, {"reward": 0.5}))[0] == 200
        status, ended = await client.post("/rl/end_session", key)
        assert (status, ended["completions"], ended["reward"]) == (200, 1, 0.5)
    assert len(kept(tmp_path)) == 1
    assert fates(tmp_path) == [("collected", "")]
    assert [line["event"] for line in Records(tmp_path).lines()] == ["begin", "end"]
    assert Records(tmp_path).faults == []


async def test_the_gateway_ends_it_itself_when_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, "two") as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        with monkeypatch.context() as patch:
            patch.setattr(line_file, "append", full)
            assert (await client.post("/rl/end_session", key))[0] == 507
            assert client.gateway.store.running == 1
        await until(lambda: client.gateway.store.running == 0)
        assert client.gateway.store.counts["dropped"] == 0
    index = SessionIndex(tmp_path)
    index.refresh()
    assert [session.why for session in index.sessions.values()] == ["ended"]
    assert len(kept(tmp_path)) == 1


async def test_a_start_that_is_not_written_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, "two") as client:
        with monkeypatch.context() as patch:
            patch.setattr(journal, "append_lines", full)
            assert (await client.post("/rl/start_session", ADMIN, {"task_id": "t"}))[0] == 507
        assert client.gateway.store.running == 0
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "why", "dropped"),
    [({"share": 0.0}, NO_SHARE, 0), ({"max_gb": 0.0}, "record_max_gb is reached", 1)],
)
async def test_sessions_without_a_record_name_why(
    tmp_path: Path, settings: dict[str, Any], why: str, dropped: int
) -> None:
    async with serving(tmp_path, "two", **settings) as client:
        session = await client.start()
        await client.chat(session["api_key"])
        status, ended = await client.post("/rl/end_session", session["api_key"])
        assert (status, ended["no_record"], ended["completions"]) == (200, why, 1)
        assert json.loads((await client.get("/rl/stats", ADMIN))[1])["dropped"] == dropped
    assert kept(tmp_path) == []
    assert fates(tmp_path) == [("dropped", why)]


async def test_many_sessions_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "_MOST_RECORDS", 4)
    monkeypatch.setattr(sessions, "_AT_ONCE", 4)
    async with serving(tmp_path, *["two"] * 40) as client:
        started = await asyncio.gather(*(client.start() for _ in range(40)))
        await asyncio.gather(*(client.chat(each["api_key"]) for each in started))
    assert len(kept(tmp_path)) == 40
    assert set(fates(tmp_path)) == {("collected", "")}


async def test_the_writer_of_records_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "_MOST_RECORDS", 0)
    async with serving(tmp_path, "two") as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        assert (await client.post("/rl/end_session", key))[0] == 503
        client.gateway.store._files.current.recorder.writer._background._most = 8
        assert (await client.post("/rl/end_session", key))[0] == 200
    assert len(kept(tmp_path)) == 1


async def test_a_client_that_leaves_while_its_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, "two") as client:
        session = await client.start()
        await client.chat(session["api_key"])
        store = client.gateway.store
        found = store.known.find(session["api_key"], None)
        files, held = store._files.current, asyncio.Event()
        append = files.journal.append

        async def slow(line: Mapping[str, Any]) -> None:
            await append(line)
            await held.wait()

        monkeypatch.setattr(files.journal, "append", slow)
        leaving = asyncio.ensure_future(store.end(found))
        await until(lambda: '"end"' in written(tmp_path))
        leaving.cancel()
        await asyncio.wait({leaving})
        held.set()
        assert (await client.post("/rl/end_session", session["api_key"]))[1]["completions"] == 1
    assert written(tmp_path).count('"end"') == 1
    assert len(kept(tmp_path)) == 1


async def test_a_session_whose_time_is_up_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, longest_s=0.05) as client:
        await client.start()
        await until(lambda: client.gateway.store.running == 0)
    index = SessionIndex(tmp_path)
    index.refresh()
    assert [session.why for session in index.sessions.values()] == ["late"]


class Leaving:
    """An engine that is away for a while."""

    def __init__(self, *said: str) -> None:
        self._engine, self.is_away = ScriptedEngine(turns(*said)), False

    async def generate(self, ask: Ask) -> Generation:
        if self.is_away:
            raise EngineError("connection refused")
        return await self._engine.generate(ask)


async def test_a_session_goes_on_when_the_engine_is_back(tmp_path: Path) -> None:
    engine = Leaving("two", "three", "four")
    async with serving(tmp_path, engine=engine) as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        engine.is_away = True
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            status, answer, headers = await client.completes(key, path)
            assert (status, headers.get("Retry-After")) == (503, "5"), answer
        other = (await client.start())["api_key"]
        engine.is_away = False
        await client.chat(key)
        await client.chat(other)
        assert (await client.post("/rl/end_session", key))[1]["completions"] == 2
    records = kept(tmp_path)
    assert [(record["valid"], len(record["generations"])) for record in records] == [(True, 2), (True, 1)]
    refused = [request["refused"] for request in records[0]["session"]["requests"]]
    assert refused == [None, *["engine_away"] * 3, None]
    for record in records:
        stage = ReplayEngine()
        assert await replayed(record, make_run(stage), stage) == []


async def test_sessions_that_a_kill_left_are_lost_by_name(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    async with serving(before, "two", "two") as client:
        _, ended = await client.session()
        running = (await client.start())["api_key"]
        await client.chat(running)
        shutil.copytree(before, after)  # as a kill leaves it
    async with serving(after) as client:
        assert (await client.post("/rl/set_reward", ended, {"reward": 0.5}))[0] == 200
        assert (await client.completes(ended))[0] == 410
        answers = [
            await client.post("/rl/end_session", running),
            await client.post("/rl/set_reward", running, {"reward": 0.5}),
            (await client.completes(running))[:2],
            (await client.completes(running, "/v1/messages"))[:2],
        ]
        assert [status for status, _ in answers] == [410] * 4
        assert all("lost in a restart" in json.dumps(answer) for _, answer in answers)
        assert (await client.completes("no-key"))[0] == 401
    assert [fate for fate, _ in fates(after)] == ["collected", "lost"]


async def test_a_restart_after_the_clock_was_put_back_is_the_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    starts = []
    for hours in (0, 0, -3, -2):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        async with serving(tmp_path) as client:
            starts.append(client.gateway.store._files.start)
    assert starts == sorted(set(starts))


async def test_two_gateways_on_one_folder(tmp_path: Path) -> None:
    async with serving(tmp_path, "two") as one, serving(tmp_path, "two") as two:
        key = (await one.start())["api_key"]
        await one.chat(key)
        for status, answer in (
            await two.post("/rl/end_session", key),
            await two.post("/rl/set_reward", key, {"reward": 0.5}),
            (await two.completes(key))[:2],
        ):
            assert (status, "another gateway" in json.dumps(answer)) == (409, True)
        await one.post("/rl/end_session", key)
        assert (await two.post("/rl/end_session", key))[1]["completions"] == 1
        counted = [
            (await each.post("/rl/set_reward", key, {"reward": 0.5, "id": "x"}))[1]["counted"]
            for each in (one, two, one, two)
        ]
        assert counted == [True, False, False, False]
        assert (await two.post("/rl/set_reward", key, {"reward": 1, "id": "x"}))[0] == 409
        for value, each in ((0.1, two), (0.2, one), (0.3, two)):
            assert (await each.post("/rl/set_reward", key, {"reward": value}))[0] == 200
            assert (await one.post("/rl/end_session", key))[1]["reward"] == 0.5 + value
        numbers = [(await each.start())["session_id"] for each in (one, two, one)]
    index = SessionIndex(tmp_path)
    index.refresh()
    assert [index.sessions[name].number for name in numbers] == [1, 2, 3]
    assert len(stems(tmp_path)) == 2
    assert Records(tmp_path).faults == []


async def test_a_clock_that_is_put_back_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    async with serving(tmp_path, "two") as client:
        key = (await client.start())["api_key"]
        await client.chat(key)
        for hours, reward in ((0, 0.1), (-1, 0.2), (5, 0.3), (-2, 0.4)):
            monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
            assert (await client.post("/rl/set_reward", key, {"reward": reward}))[0] == 200
        assert (await client.post("/rl/end_session", key))[1]["reward"] == 0.4
    times = [json.loads(line)["at"] for line in written(tmp_path).splitlines()]
    assert times == sorted(set(times))


SECRET = "4711-22"
"""The text that a rule hides; the tokenizer cuts it."""


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
QUESTION = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": f"the code is {SECRET}"}, QUESTION],
        [
            QUESTION,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": f"it is {SECRET}."},
        ],
        [QUESTION, {"role": "assistant", "content": SECRET}, QUESTION],
        None,
    ],
)
async def test_of_a_session_whose_ids_show_a_secret_counts_are_kept_alone(tmp_path: Path, messages: Any) -> None:
    ids = tiny_tokenizer().encode(SECRET, add_special_tokens=False)
    assert len(ids) > 1
    said = "no" if messages else f"it is {SECRET}"
    async with serving(tmp_path, "two", said, redact=[r"re:\d{4}-\d\d"]) as client:
        await client.session(user="other")
        key = (await client.start(user="u"))["api_key"]
        assert (await client.completes(key, messages=messages))[0] == 200
        status, ended = await client.post("/rl/end_session", key)
        assert (status, ended["no_record"], ended["completions"]) == (200, SEEN, 1)
        assert (await client.post("/rl/set_reward", key, {"reward": 0.5}))[0] == 200
    (record,) = kept(tmp_path)
    assert record["session"]["user"] == "other"
    texts = unpacked(tmp_path)
    wanted = [SECRET, json.dumps(ids)[1:-1].replace(" ", "")]
    assert not any(each in text.replace(" ", "") for text in texts for each in wanted)
    lines = [line for line in Records(tmp_path).lines() if line["why"] == SEEN]
    assert [(line["event"], line["summary"]["turns"]) for line in lines] == [("end", 1)]
    assert sorted(fate for fate, _ in fates(tmp_path)) == ["collected", "dropped"]


async def test_the_end_of_many_idle_sessions_reads_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def refresh(index: SessionIndex) -> set[str]:
        nonlocal looks
        looks += 1
        return own(index)

    own = SessionIndex.refresh
    async with serving(tmp_path, idle_s=3600.0) as client:
        store = client.gateway.store
        await asyncio.gather(*(store.start("t", None, {}) for _ in range(100)))
        monkeypatch.setattr(SessionIndex, "refresh", refresh)
        monkeypatch.setattr(store, "_settings", replace(store._settings, idle_s=0.001))
        await until(lambda: store.running == 0)
        assert looks <= 3  # of the care for files
    assert set(fates(tmp_path)) == {("collected", "")}


async def test_a_disk_that_is_full_when_new_files_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def none(path: Path) -> None:
        nonlocal tries
        tries += 1
        full()

    async with serving(tmp_path, "two", "two") as client:
        await client.session()
        before = names(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(gateway_files, "SessionJournal", none)
            client.gateway.store._files.current.began -= 25 * 3600
            await until(lambda: tries > 2)
            await client.session()
            assert names(tmp_path) == before
        await until(lambda: len(stems(tmp_path)) == 2)


async def test_files_that_another_gateway_removes_are_forgotten_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, "two") as one:
        old, _ = await one.session()
    threads: dict[int, set[str]] = {}
    own = SessionIndex._read_on

    def read_on(index: SessionIndex, path: Path) -> list[str]:
        found = list(own(index, path))
        threads.setdefault(threading.get_ident(), set()).update(found)
        return found

    async with serving(tmp_path, "two") as client:
        name, key = await client.session()
        (stem,) = {stem for stem in stems(tmp_path) if not is_held(tmp_path / f"{stem}.sessions.jsonl")}
        monkeypatch.setattr(SessionIndex, "_read_on", read_on)
        (tmp_path / f"{stem}.sessions.jsonl").unlink()
        assert (await client.post("/rl/set_reward", key, {"reward": 0.5}))[0] == 200
        await until(lambda: old not in client.gateway.store.known._index.sessions)
        assert client.gateway.store.known._index.sessions[name].reward == 0.5
        (other,) = (seen for thread, seen in threads.items() if thread != threading.get_ident())
        assert name in other
