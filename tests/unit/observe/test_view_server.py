"""The viewer's server: its answers, and whom it refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from tests.support.sample_records import sample_run
from tests.support.view_samples import HOSTILE, START, TOKENIZER, write_samples
from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.observe.documents import documents as documents_module
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.view.export import export
from verl_multiturn.observe.view.server import ViewServer
from verl_multiturn.records.read.fates import count, fates_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view")
    write_samples(path)
    return path


@pytest.fixture
async def address(folder: Path) -> AsyncIterator[str]:
    documents = Documents([folder], TOKENIZER)
    documents.refresh()
    server = ViewServer(documents, follow=False)
    yield await server.start(0)
    await server.aclose()


async def get(address: str, path: str = "", **headers: str) -> tuple[int, Any, Any]:
    async with aiohttp.ClientSession() as session, session.get(address + path, headers=headers) as answer:
        text = await answer.text()
        kind = answer.headers["Content-Type"]
        return answer.status, json.loads(text) if kind.startswith("application/json") else text, answer.headers


async def test_the_page_and_its_files(address: str) -> None:
    status, text, headers = await get(address)
    assert (status, text[:15]) == (200, "<!doctype html>")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, text, headers = await get(address, "static/vendor/preact.mjs")
    assert (status, headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Host", "evil.example"),
        ("Host", "127.0.0.1"),
        ("Host", "127.0.0.1:1"),
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Sec-Fetch-Site", "cross-site"),
    ],
)
async def test_other_sites_are_refused(address: str, header: str, value: str) -> None:
    for path in ("", "api/meta", "static/main.js"):
        status, found, headers = await get(address, path, **{header: value})
        assert status == 403
        assert "alone" in found["error"]
        assert headers["Content-Security-Policy"] == "default-src 'none'"


async def test_its_own_page_is_answered(address: str) -> None:
    origin = "/".join(address.split("/")[:3])
    status, _, _ = await get(address, "api/meta", **{"Origin": origin, "Sec-Fetch-Site": "same-origin"})
    assert status == 200


async def test_the_token_is_wanted(address: str) -> None:
    root = "/".join(address.split("/")[:3])
    for path in ("/", "/api/meta", "/wrong/", "/wrong/api/meta", "/wrong/static/main.js", "//"):
        status, found, _ = await get(root, path)
        assert status == 403, path
        assert "lacks the token" in found["error"]


@pytest.mark.parametrize(
    "path",
    [
        "static/../documents.py",
        "static/..%2fdocuments.py",
        "static/%2e%2e/server.py",
        "static//etc/passwd",
        "static/vendor/checksums.txt",
        "static/",
        "steps.jsonl",
        "api/",
        "api/files",
    ],
)
async def test_no_other_file_is_given(address: str, path: str) -> None:
    from yarl import URL

    async with aiohttp.ClientSession() as session, session.get(URL(address + path, encoded=True)) as answer:
        assert answer.status in (403, 404)


async def test_nothing_but_get(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            async with session.request(method, address + "api/meta") as answer:
                assert answer.status == 405


async def test_meta_and_table(address: str) -> None:
    _, meta, _ = await get(address, "api/meta")
    assert (meta["count"], meta["faults"], meta["texts"]) == (62, [], [True])
    assert meta["columns"]["score"] == "number"
    assert not {"file", "offset", "join"} & meta["columns"].keys()
    assert str(TOKENIZER.parent) not in json.dumps(meta["dirs"])
    _, found, _ = await get(address, "api/table?where=uid%3Dsib&sort=number&desc=1&limit=2&offset=1")
    assert found["total"] == 4
    assert [row["number"] for row in found["rows"]] == [2, 1]


@pytest.mark.parametrize("number", [-1, 1, 99])
async def test_a_folder_that_is_not_there_is_told(address: str, number: int) -> None:
    status, found, _ = await get(address, f"api/step?dir={number}&step=1")
    assert (status, found["error"]) == (400, f"dir={number}: there is no such folder; expected 0 to 0")


@pytest.mark.parametrize(
    ("line", "status"), [("OPTIONS *", 403), ("GET /" + "a" * 10_000, 400), ("GET /%ff", 403), ("GET", 400)]
)
async def test_strange_requests_are_refused_quietly(
    address: str, line: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    host = address.split("/")[2]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert (await reader.readline()).split()[1] == str(status).encode()
    writer.close()
    await writer.wait_closed()
    assert [each.getMessage() for each in caplog.records if each.name != "asyncio"] == []


async def test_what_fails_is_said_and_logged_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    documents = Documents([folder])
    documents.refresh()
    server = ViewServer(documents, follow=False)
    address = await server.start(0)
    monkeypatch.setattr(documents, "open", lambda: {}["missing"])
    status, found, headers = await get(address, "api/open")
    assert (status, headers["Cache-Control"]) == (500, "no-store")
    assert found["error"] == "the viewer failed at this; what it failed at stands in its terminal"
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == ["the viewer failed at open"]
    await server.aclose()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("where=nonsense%3D1", "the filter names the column 'nonsense'"),
        ("sort=file%20name", "the table is sorted by 'file name'"),
        ("offset=one", "the request has a strange parameter"),
    ],
)
async def test_a_wrong_question_is_told(address: str, query: str, said: str) -> None:
    status, found, _ = await get(address, f"api/table?{query}")
    assert status == 400
    assert said in found["error"]


async def test_a_record_with_its_join_and_texts(address: str) -> None:
    _, found, _ = await get(address, "api/record?id=sib-1")
    assert found["row"]["fate"] == "trained"
    assert found["record"]["rows"][0]["logprobs"][8] == "nan"
    (joined,) = found["joined"]
    assert joined["old_log_probs"][:3] == [-0.01, -0.49, -1.51]
    assert joined["untrained_tokens"] == [1, 2]
    assert found["pieces"]["1"] == "<|im_start|>"
    status, found, _ = await get(address, "api/record?id=nobody")
    assert (status, found["error"]) == (404, "there is no such conversation in this folder")


async def test_what_has_no_record_has_a_row(address: str) -> None:
    _, found, _ = await get(address, "api/record?id=running")
    assert (found["record"], found["row"]["fate"]) == (None, "open")
    _, found, _ = await get(address, "api/open")
    (shot,) = found["snapshots"]
    assert shot["open"][0]["doing"] == f"call {HOSTILE.replace(chr(0xD83D), chr(0xFFFD))}"


async def test_a_run_and_a_step(address: str) -> None:
    _, found, _ = await get(address, "api/run")
    (run,) = found["dirs"]
    assert run["fates"] == {
        "training": {"trained": 52, "cut": 1, "raised": 1, "open": 4}, "validation": {"validated": 4},
    }  # fmt: skip
    first = run["steps"][0]
    assert (first["conversations"], first["groups"], first["equal_groups"], first["score"]) == (16, 4, 0, 0.25)
    _, found, _ = await get(address, "api/step?dir=0&step=2")
    assert (found["basis"], len(found["conversations"]), found["trainer"]["phases"]) == ("trained", 16, {"gen": 4.0})


async def test_changes_are_those_since_it_was_asked(folder: Path) -> None:
    documents = Documents([folder])
    documents.refresh()
    server = ViewServer(documents, follow=True)
    address = await server.start(0)
    _, found, _ = await get(address, "api/changes")
    assert found == {"version": 0, "follow": True}
    path = folder / f"{START}-other-1-bbbbbbbb.lines.jsonl"
    path.write_text('{"event":"begin","request_id":"n","uid":"n","at":1}\n')
    _, found, _ = await get(address, "api/changes?since=0")
    assert found == {"version": 1, "follow": True}
    _, found, _ = await get(address, "api/record?id=n")
    assert found["row"]["fate"] == "open"
    await server.aclose()
    path.unlink()


def test_a_flipped_bit_costs_one_member(tmp_path: Path) -> None:
    write_samples(tmp_path)
    path = max(tmp_path.glob("*.jsonl.gz"), key=lambda each: each.stat().st_size)
    documents = Documents([tmp_path])
    documents.refresh()
    data = bytearray(path.read_bytes())
    assert gzip.decompress(bytes(data))
    data[40] ^= 1
    path.write_bytes(data)
    broken = [row["request_id"] for row in documents.page("", "began", False, 0, 100)["rows"] if _lost(documents, row)]
    assert 0 < len(broken) < 10
    assert any(f"{path}, offset 0: a gzip member cannot be read" in fault for fault in documents.faults())
    assert documents.record(f"{START}-t1-0-0") is not None


def _lost(documents: Documents, row: dict[str, Any]) -> bool:
    found = documents.record(row["request_id"])
    assert found is not None
    return found["record"] is None and row["fate"] in ("trained", "validated")


def test_a_record_alone_and_a_join_alone(tmp_path: Path) -> None:
    write_samples(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "join").rename(tmp_path / "b" / "join")
    for folder in (tmp_path / "a", tmp_path / "b"):
        documents = Documents([folder])
        documents.refresh()
        for fate, number in count(fates_of(documents.records)).items():
            assert documents.page(f"fate={fate}", "began", False, 0, 1)["total"] == number
        documents.run()
        documents.findings()


def test_one_file_is_shown_as_its_folder_is_without_the_trainers_side(tmp_path: Path) -> None:
    sample_run(tmp_path, start=START)
    (path,) = tmp_path.glob("*.jsonl.gz")
    documents = Documents([path])
    documents.refresh()
    documents.save()
    assert documents.meta()["count"] == 20
    assert [run["start"] for run in documents.meta()["runs"]] == [START]
    assert documents.page("fate=unknown", "began", False, 0, 1)["total"] == 18
    assert documents.record(f"{START}-t1-0-0")["record"]["stop_reason"] == "finished"  # type: ignore[index]
    assert not (tmp_path / "view-index.parquet").exists()


def test_a_wrong_folder_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' cannot be read: it does not exist; expected a file of"):
        Documents([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"--tokenizer '.*' cannot be read .*; name a folder with a tokenizer.json"):
        Documents([tmp_path], tmp_path)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("/", "it is a folder"),
        ("", "it is a folder"),
        (".", "it is a folder"),
        ("nowhere/run.html", "there is no folder 'nowhere'"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["view", "no-folder-of-records", "--export", target])
    assert done.exit_code == 2
    assert f"cannot be written ({why}); name a file in a folder that is there" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_export_tells_what_could_not_be_read(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(folder), "--where", "uid=sib", "--export", str(tmp_path / "a.html")])
    told = json.loads(done.stdout)
    size = (tmp_path / "a.html").stat().st_size
    assert told == {"file": str(tmp_path / "a.html"), "conversations": 4, "bytes": size, "faults": 0}


def test_a_line_that_is_not_what_its_record_says(tmp_path: Path) -> None:
    sample_run(tmp_path, start=START)
    (path,) = tmp_path.glob("*.lines.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"turns":2', b'"turns":9', 1))
    documents = Documents([tmp_path])
    documents.refresh()
    page = documents.page("", "began", False, 0, 50)
    assert {row["turns"] for row in page["rows"]} == {2, None}
    (fault,) = documents.faults()
    assert "says turns 9 for 2; the record is taken" in fault
    export(documents, tmp_path / "run.html")
    assert len(documents.faults()) == 1


def test_findings_are_looked_for_once_for_pages_that_ask_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_run(tmp_path)
    asked = threading.Event()
    looked: list[bool] = []
    explained = documents_module.explain

    def slow(records: Any) -> Any:
        looked.append(documents._finding.locked())
        second.start()
        asked.wait()
        return explained(records)

    def ask() -> None:
        asked.set()
        got.append(documents.findings())

    documents = Documents([tmp_path])
    documents.refresh()
    got: list[dict[str, Any]] = []
    second = threading.Thread(target=ask)
    monkeypatch.setattr(documents_module, "explain", slow)
    got.append(documents.findings())
    second.join()
    assert looked == [True]
    assert got[0] == got[1]
