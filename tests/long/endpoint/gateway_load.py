"""Does a gateway hold: hostile requests, an engine that is away, a full disk, many sessions, kills?

    python -m benchmarks.gateway [--requests N] [--sessions N] [--kills N] [--seed N] [--parts NAME …] [--control]

Gateway and engine are processes of their own; no model. Each part has a folder of its own:

- `attack`: hostile requests beside honest sessions: `requests`, by `statuses`; `server_errors`, answers of 5xx;
  `foreign`, sessions read, rewarded or ended by another key; `twice`, rewards counted again; `lost`, what honest
  clients did not get;
- `away`: the engine is killed: `away_not_503`, answers that are not 503 with `Retry-After`; `not_recovered`;
- `full`: a disk without room (`disk`: how it was made so): `full_not_507`; `lost` after there is room again;
- `crowd`: `sessions` at once: `crowd_refused`, requests that were not answered well;
- `idle`: as many sessions that nobody ends: `not_idle`, those without an end after the idle limit;
- `latency`: a completion of `p50_engine_ms` by the engine's client and `p50_gateway_ms` by the gateway, in turn;
  `added_p50_ms`, the median of their differences, and `added_p50_ms_crowd` while other sessions are open; `cpu_ms`, the
  gateway's processor time of one, which a busy machine hardly changes;
- `kills`: SIGKILL of gateway, engine and writer under load: `lost`, `twice`, `unknown` of what a 2xx of `end_session`
  and `set_reward` acknowledged; `violations` of the certificate.

`--control` puts faults in, and shows that the figures see each. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.long.endpoint.gateway_attacked import attack
from tests.long.endpoint.gateway_children import Answer, Child, Client, engine, gateway
from tests.long.endpoint.gateway_kills import kill
from tests.long.endpoint.gateway_ledger import Ledger, RewardName
from tests.support.gateway_process import WEIGHTS
from verl_multiturn.gateway.engine import DeployedEngine
from verl_multiturn.records.read.sessions import SessionIndex
from verl_multiturn.rollout.engines.protocol import Ask
from verl_multiturn.rollout.scripted_chat import tiny_codec, tiny_tokenizer

REQUESTS, SESSIONS, KILLS = 10_000, 1000, 30
PARTS = ("attack", "away", "full", "crowd", "idle", "latency", "kills")
ZERO = (
    "server_errors", "foreign", "twice", "lost", "unknown", "violations", "not_ended",
    "away_not_503", "not_recovered", "full_not_507", "crowd_refused", "not_idle",
)  # fmt: skip
"""Figures that have to be 0."""
MOST_ADDED_MS = 3.0
_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_RECOVERY_S, _IDLE_S = 120.0, 1.0
_TIMED = 200
_BY_SESSION = 20
"""Timed requests of one session."""
_ROOM = 1 << 20
_ID = "an id longer than those that use up the room"

Figures = dict[str, Any]
Report = Callable[[str], None]


def measure(
    parts: Sequence[str] = PARTS,
    requests: int = REQUESTS,
    sessions: int = SESSIONS,
    kills: int = KILLS,
    seed: int = 0,
    report: Report = print,
) -> dict[str, Figures]:
    """Return the figures of each part.

    Args:
        parts: Names of parts.
        requests: Hostile requests.
        sessions: Sessions at once.
        kills: Number of kills.
        seed: Draws requests and kills.
        report: Gets a line for each problem.
    """
    works: dict[str, Callable[[Path], Awaitable[tuple[Figures, list[str]]]]] = {
        "attack": lambda folder: attacked(folder, requests, seed),
        "away": away,
        "full": full,
        "crowd": lambda folder: crowd(folder, sessions),
        "idle": lambda folder: idle(folder, sessions),
        "latency": lambda folder: latency(folder, sessions),
        "kills": lambda folder: killed(folder, kills, seed),
    }
    found = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            found[part], problems = asyncio.run(works[part](Path(folder)))  # type: ignore[arg-type]
        for problem in problems[:20]:
            report(f"{part}: {problem}")
    return found


def faults_in(found: dict[str, Figures]) -> int:
    """Return the sum of all figures that have to be 0."""
    return sum(figures.get(name, 0) for figures in found.values() for name in ZERO)


async def attacked(folder: Path, requests: int, seed: int, *options: str) -> tuple[Figures, list[str]]:
    """Send hostile requests."""
    siege = await attack(folder, requests, seed, *options)
    named = {name: siege.found[name] for name in ("requests", "server_errors", "foreign", "twice", "lost")}
    return {
        **named,
        "statuses": {str(status): siege.statuses[status] for status in sorted(siege.statuses)},
    }, siege.problems


async def killed(
    folder: Path, kills: int, seed: int, *options: str, among: Sequence[str] = ("gateway", "engine", "writer")
) -> tuple[Figures, list[str]]:
    """Kill gateway, engine and writer under load."""
    found = await kill(folder, kills, seed, *options, among=among)
    names = ("ends", "rewards", "unanswered", "cut_sessions", "not_ended", "server_errors", "lost", "twice", "unknown")
    kinds = {name: count for name, count in sorted(found.counts.items()) if name.startswith("kills_")}
    return {**kinds, **{name: found.counts[name] for name in (*names, "violations")}}, found.problems


async def away(folder: Path) -> tuple[Figures, list[str]]:
    """Kill the engine, ask in each protocol, and start the engine again."""
    figures, problems = Counter[str](away_requests=0, away_not_503=0, not_recovered=0, lost=0), []

    def expect(is_right: bool, figure: str, problem: object) -> None:
        figures[figure] += not is_right
        problems.extend([] if is_right else [f"{figure}: {problem}"])

    async with (
        engine() as behind,
        gateway(folder, "--engine", behind.address) as front,
        Client(front.address) as client,
    ):
        old = (await client.start()).body["api_key"]
        expect((await client.chat(old)).status == 200, "lost", "no completion before")
        await behind.kill()
        new = (await client.start()).body["api_key"]
        for key, path, stream in itertools.product((old, new), _PATHS, (False, True)):
            answer = await client.chat(key, f"{path} {stream}", path=path, stream=stream)
            figures["away_requests"] += 1
            expect(answer.status == 503 and bool(answer.retry_after), "away_not_503", (path, stream, answer))
        answer = await client.get("/ready")
        expect(answer.status == 503 and bool(answer.retry_after), "away_not_503", answer)
        expect((await client.get("/health")).status == 200, "lost", "/health")
        expect((await client.reward(old, 0.5, id="x")).status == 200, "lost", "a reward while the engine is away")
        await behind.start()
        for key in (old, new):
            answer = await _until(lambda key=key: client.chat(key), 200)
            expect(answer.status == 200, "not_recovered", answer)
        expect((await _until(lambda: client.get("/ready"), 200)).status == 200, "not_recovered", "/ready")
        for key, completions in ((old, 2), (new, 1)):
            answer = await client.end(key)
            is_whole = answer.status == 200 and answer.body["completions"] == completions
            expect(is_whole, "lost", f"an end after the engine was away: {answer}")
        await front.stop()
    return dict(figures), problems


async def full(folder: Path) -> tuple[Figures, list[str]]:
    """Fill the disk, write what has to be refused, make room, and write it again."""
    figures, problems = Counter[str](full_requests=0, full_not_507=0, lost=0), []
    ledger = Ledger()
    with _small_disk(folder) as made:
        async with gateway(folder) as front, Client(front.address) as client:
            begun = [(await client.start()).body for _ in range(3)]
            for each in begun:
                await client.chat(each["api_key"])
            with _without_room(folder, made, front):
                await _use_up(client, begun[0], ledger)
                for each in begun:
                    answers = [
                        await client.reward(each["api_key"], 0.5, id=_ID),
                        await client.end(each["api_key"]),
                        await client.start(),
                    ]
                    figures["full_requests"] += len(answers)
                    wrong = [answer for answer in answers if answer.status != 507]
                    figures["full_not_507"] += len(wrong)
                    problems += map(str, wrong)
            for each in begun:
                name = RewardName(each["session_id"], "", _ID)
                rewarded = await client.reward(each["api_key"], 0.5, id=_ID)
                ended = await client.end(each["api_key"])
                if (rewarded.status, ended.status) != (200, 200) or not rewarded.body["counted"]:
                    figures["lost"] += 1
                    problems.append(f"with room again: {rewarded}, {ended}")
                ledger.reward(name, 0.5, is_acknowledged=rewarded.status == 200)
                if ended.status == 200:
                    ledger.end(each["session_id"], 1)
            await front.stop()
        compared = ledger.compare(folder)
        figures.update(compared.figures)
        problems += [*compared.lost, *compared.twice, *compared.unknown]
    return {**figures, "disk": made}, problems


async def _use_up(client: Client, started: Mapping[str, str], ledger: Ledger) -> None:
    """Reward until not even the rest of a page of the disk has room for a line."""
    for length in (400, 1):
        for number in range(100, 1000):
            id_ = f"{number}" + "x" * length
            answer = await client.reward(started["api_key"], 0.0, id=id_)
            name = RewardName(started["session_id"], "", id_)
            ledger.reward(name, 0.0, is_acknowledged=answer.status == 200)
            if answer.status != 200:
                break


async def crowd(folder: Path, sessions: int) -> tuple[Figures, list[str]]:
    """Open sessions at once; in each ask, reward and end, all at the same time."""
    problems: list[str] = []
    ledger = Ledger()
    async with gateway(folder, "--most", str(sessions)) as front, Client(front.address) as client:
        before = time.perf_counter()
        started = await asyncio.gather(*(client.start(f"t{number % 50}") for number in range(sessions)))
        refused = [answer for answer in started if answer.status != 201]
        one_more = await client.start()
        if not refused and (one_more.status != 429 or not one_more.retry_after):
            refused.append(one_more)
        running = (await client.get("/rl/stats")).body["running"]

        async def play(key: str, session_id: str) -> list[Answer]:
            answers = [await client.chat(key), await client.reward(key, 0.5, id="x"), await client.end(key)]
            ledger.reward(RewardName(session_id, "", "x"), 0.5, is_acknowledged=answers[1].status == 200)
            if answers[2].status == 200:
                ledger.end(session_id, answers[2].body["completions"])
            return [answer for answer in answers if answer.status != 200]

        known = [(answer.body["api_key"], answer.body["session_id"]) for answer in started if answer.status == 201]
        refused += itertools.chain(*await asyncio.gather(*itertools.starmap(play, known)))
        seconds = time.perf_counter() - before
        await front.stop()
    compared = ledger.compare(folder)
    problems += [*map(str, refused), *compared.lost, *compared.twice, *compared.unknown]
    figures = {"sessions": running, "crowd_refused": len(refused), "crowd_s": round(seconds, 1)}
    return {**figures, **compared.figures}, problems


async def idle(folder: Path, sessions: int) -> tuple[Figures, list[str]]:
    """Start sessions, ask in each, and leave them."""
    async with gateway(folder, "--most", str(sessions), "--idle-s", str(_IDLE_S)) as front:
        async with Client(front.address) as client:
            keys = [(await client.start()).body["api_key"] for _ in range(sessions)]
            await asyncio.gather(*(client.chat(key) for key in keys))
            ended = await _until(lambda: client.get("/rl/stats"), lambda answer: answer.body["running"] == 0)
        await front.stop()
    index = SessionIndex(folder)
    index.refresh()
    left = [each.session_id for each in index.sessions.values() if each.why != "idle"]
    problems = [] if ended.body["running"] == 0 else [f"{ended.body['running']} sessions are open for too long"]
    return {"idle_sessions": len(index.sessions), "not_idle": len(left) + len(problems)}, [*problems, *left]


async def latency(folder: Path, sessions: int) -> tuple[Figures, list[str]]:
    """Ask the engine by its client and by the gateway, in turn; then again while other sessions are open."""
    figures: Figures = {}
    options = ("--most", str(sessions + _TIMED))
    async with engine() as behind, gateway(folder, "--engine", behind.address, *options) as front:
        alone = DeployedEngine(behind.address, WEIGHTS)
        async with Client(front.address) as client:
            await _timed(alone, client, _BY_SESSION)
            assert front.process is not None
            before = _seconds(front.process.pid)
            own, by_gateway = await _timed(alone, client, _TIMED)
            figures["cpu_ms"] = round(1000 * (_seconds(front.process.pid) - before) / _TIMED, 2)
            figures["p50_engine_ms"] = _milliseconds(own)
            figures["p50_gateway_ms"] = _milliseconds(by_gateway)
            figures["added_p50_ms"] = _milliseconds([b - a for a, b in zip(own, by_gateway, strict=True)])
            figures["ratio"] = round(statistics.median(by_gateway) / statistics.median(own), 2)
            for _ in range(sessions):
                await client.chat((await client.start()).body["api_key"])
            own, by_gateway = await _timed(alone, client, _TIMED)
            figures["added_p50_ms_crowd"] = _milliseconds([b - a for a, b in zip(own, by_gateway, strict=True)])
        await alone.aclose()
        await front.kill()
    return figures, []


async def _timed(alone: DeployedEngine, client: Client, requests: int) -> tuple[list[float], list[float]]:
    """Return the seconds of requests to the engine, and to the gateway, in turn."""
    codec, own, by_gateway = tiny_codec(tiny_tokenizer()), [], []
    for number in range(requests):
        if number % _BY_SESSION == 0:
            key = (await client.start()).body["api_key"]
        text = f"What is {number} and {number}?"
        ids = codec.initial([{"role": "user", "content": text}], [])
        began = time.perf_counter()
        await alone.generate(Ask("timed", ids, {}, 8))
        between = time.perf_counter()
        answer = await client.chat(key, text)
        ended = time.perf_counter()
        assert answer.status == 200, answer
        own.append(between - began)
        by_gateway.append(ended - between)
    return own, by_gateway


def _seconds(process: int) -> float:
    """Return the processor time of a process."""
    used = psutil.Process(process).cpu_times()
    return float(used.user + used.system)


def _milliseconds(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 2)


async def _until(ask: Callable[[], Awaitable[Answer]], wanted: int | Callable[[Answer], bool]) -> Answer:
    """Repeat a request until it has an answer, or for too long; return the last one."""
    until = time.monotonic() + _RECOVERY_S
    while True:
        answer = await ask()
        is_there = answer.status == wanted if isinstance(wanted, int) else wanted(answer)
        if is_there or time.monotonic() > until:
            return answer
        await asyncio.sleep(0.2)


@contextmanager
def _small_disk(folder: Path) -> Iterator[str]:
    """Make a folder a small disk where that is allowed; yields how it can be filled: `tmpfs`, or `limit` of a file."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield "tmpfs" if is_mounted else "limit"
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def _without_room(folder: Path, made: str, front: Child) -> Iterator[None]:
    """Leave no room to a gateway: its disk is full, or no file may grow (EFBIG)."""
    if made == "limit":
        assert front.process is not None
        former = resource.prlimit(front.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        yield
        resource.prlimit(front.process.pid, resource.RLIMIT_FSIZE, former)
        return
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            for size in (4096, 1):
                while True:
                    file.write(b"x" * size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    yield
    filler.unlink()
    os.sync()


CONTROLS: Sequence[tuple[str, str, str]] = (
    ("any_key", "attack", "foreign"),
    ("other_status", "attack", "server_errors"),
    ("counted_again", "attack", "twice"),
    ("unsynced", "writer", "lost"),
    ("early", "gateway", "lost"),
    ("two_ends", "gateway", "twice"),
)
"""A fault, the part that has to see it (or the kind of kills), and the figure that shows it."""


def control(requests: int = 600, kills: int = 4, seed: int = 0, only: Sequence[str] = ()) -> dict[str, int]:
    """Put each fault in, and return its figure, which is above 0 where the fault is seen.

    Args:
        requests: Hostile requests.
        kills: Number of kills.
        seed: Draws requests and kills.
        only: Names of faults; none: all.
    """
    found = {}
    for fault, part, figure in CONTROLS:
        if only and fault not in only:
            continue
        with tempfile.TemporaryDirectory() as name:
            options = ("--fault", fault)
            if part == "attack":
                figures, _ = asyncio.run(attacked(Path(name), requests, seed, *options))
            else:
                figures, _ = asyncio.run(killed(Path(name), kills, seed, *options, among=[part]))
        found[fault] = figures[figure]
    return found
