"""Sessions of several users behind the real endpoint, one of whom is forgotten: what is found before and after.

Each session has markers of its own in a prompt, an answer, a tool result, a reward's id and its log. All files
are searched unpacked (gzip, Parquet, JSON, the index in the cache), and so are the texts of all `ids`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.gateway_samples import START, GatewaySamples
from verl_multiturn.cli.serve import ScriptedModel, scripted_run
from verl_multiturn.proxy.agents.end import AgentEnd
from verl_multiturn.proxy.endpoint import session_end
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.records.write.forgetting import forget_user
from verl_multiturn.records.write.session_joins import join_sessions
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer

KINDS = ("prompt", "answer", "tool", "reward", "log")


def marker(kind: str, number: int) -> str:
    """Return the text that marks a session's part."""
    return f"mk-{kind}-{number:04d}-km"


def forgotten(folder: Path, sessions: int = 200, users: int = 5) -> dict[str, Any]:
    """Write the sessions, forget the first user, and return what was found; the benchmark prints it.

    Args:
        folder: An empty folder for records and cache.
        sessions: How many there are.
        users: How many users they are of.
    """
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    records = folder / "records"
    asyncio.run(_written(records, sessions, users))
    join_sessions(records, START)
    _index(records)
    owners = {number: number % users for number in range(sessions)}
    before = _found(folder, sessions)
    began = time.monotonic()
    result = forget_user(records, _user(0))
    seconds = time.monotonic() - began
    _index(records)
    after = _found(folder, sessions)
    every = {(kind, number) for number in owners for kind in KINDS}
    own = {(kind, number) for kind, number in every if owners[number] == 0}
    checks = list(verify_files([records]))
    return {
        "sessions": sessions,
        "users": users,
        "forgotten": len(result.sessions),
        "found_before": len(before["files"]),
        "missing_before": len(every - before["files"]),
        "decoded_before": len(before["ids"]),
        "own_after": len((after["files"] | after["ids"]) & own),
        "names_after": after["names"],
        "others_missing": len(every - own - after["files"]),
        "others_decoded_missing": len(before["ids"] - own - after["ids"]),
        "violations": sum(1 if each.verified is None else len(each.verified.violations) for each in checks),
        "records": len(checks),
        "faults": len(Records(records).faults),
        "forget_seconds": round(seconds, 2),
    }


def is_right(found: Mapping[str, Any]) -> bool:
    """Return whether all was found before, and nothing of the user and all of the others after."""
    wrong = ("missing_before", "own_after", "names_after", "others_missing", "others_decoded_missing", "violations")
    share = found["sessions"] // found["users"]
    right = found["forgotten"] == share and found["records"] == found["sessions"] - share and found["decoded_before"]
    return bool(right) and not any(found[name] for name in (*wrong, "faults"))


def _user(number: int) -> str:
    return f"user-{number}-resu"


async def _written(folder: Path, sessions: int, users: int) -> None:
    made = GatewaySamples(folder)
    server = ProxyServer()
    await server.start()
    try:
        async with aiohttp.ClientSession() as client:
            for number in range(sessions):
                if number == sessions // 2:
                    made.close()
                    made.rotate()
                await _session(made, server, client, number, _user(number % users))
    finally:
        await server.aclose()
        made.close()


async def _session(
    made: GatewaySamples, server: ProxyServer, client: aiohttp.ClientSession, number: int, user: str
) -> None:
    """Play a session of two requests over HTTP, and write it as a gateway does."""
    name, task = f"session-{number}-{user}", f"task-{number % 20}"
    run = scripted_run(ScriptedModel(["I look it up.", f"It is {marker('answer', number)}."]), Limits(10_000, 10_000))
    made.begin(name, user, task, number)
    life = Life(name, group=task, number=number, loop="gateway", task=task, user=user, model=["aa", "bb"])
    life.began = time.time()
    session = AgentSession(name, run, {})
    address = server.open(session)
    messages = [{"role": "user", "content": f"Say {marker('prompt', number)}."}]
    for said in (f"The tool says {marker('tool', number)}.", ""):
        headers = {"Authorization": f"Bearer {address.api_key}"}
        body = {"model": "policy", "messages": messages}
        async with client.post(f"{address.base_url}/chat/completions", json=body, headers=headers) as response:
            answer = (await response.json())["choices"][0]["message"]
        messages = [*messages, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": said}]
    session.returned()
    await session.closed()
    await server.close_session(address)
    receipts = session.receipts()
    outcome = await session_end(session, AgentEnd("raised", problem=marker("log", number)), run)
    life.complete(outcome, receipts, {}, {}, None, False)
    line = {"request_id": name, "uid": task, "number": number, "validation": False, "step": 0}
    made.writer.keep(partial(record_of, life), {**line, "at": life.ended})
    names = [turn.completion or "" for turn in outcome.turns]
    made.write("end", name, completions=names, why="ended", at=time.time())
    made.write("reward", name, reward=1.0, id=marker("reward", number), at=time.time())
    run.renderer.close()


def _index(records: Path) -> None:
    index = Index(Records(records))
    index.refresh()
    index.save()


def _found(folder: Path, sessions: int) -> dict[str, Any]:
    """Return which markers lie in the texts of all files, which in decoded ids, and how often the user's name does."""
    texts = [_text(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    whole, decoded = "\0".join(texts), "\0".join(_decoded(folder / "records"))
    every = [(kind, number) for number in range(sessions) for kind in KINDS]
    return {
        "files": {each for each in every if marker(*each) in whole},
        "ids": {each for each in every if marker(*each) in decoded},
        "names": whole.count(_user(0)),
    }


def _text(path: Path) -> str:
    """Return all text of a file, unpacked; its name as well."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".index":  # a line of JSON, and a Parquet file behind it
        first, _, packed = data.partition(b"\n")
        data = first + repr(pq.read_table(pa.BufferReader(packed)).to_pylist()).encode()
    elif path.suffix == ".parquet":
        data = repr(pq.read_table(path).to_pylist()).encode()
    return path.name + "\0" + data.decode(errors="replace")


def _decoded(records: Path) -> list[str]:
    tokenizer = tiny_tokenizer()
    found = []
    for path in sorted(records.glob("*.jsonl.gz")):
        for text in gzip.decompress(path.read_bytes()).splitlines():
            record = json.loads(text)
            held = [each["ids"] for each in [*record["rows"], *record["generations"]] if each["ids"]]
            found += [tokenizer.decode(ids) for ids in held]
    return found
