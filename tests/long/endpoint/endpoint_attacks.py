"""Hostile requests and hostile ends of agents at each door of the endpoint: each has the one expected outcome.

    python -m benchmarks.endpoint_attacks [--doors serve training gateway]

`endpoint_requests` and `endpoint_ends` are the tables. The doors are `serve`, the command in a process of its own;
`training`, the endpoint and the runners of agents as an agent loop has them; and `gateway`, in a process of its own,
whose agents are programs that nobody watches (`gateway_programs`), with its own routes (`gateway_requests`). At the
latter two an honest session asks meanwhile.

For each door: `requests`, and `ends` with their runners; `unexpected`, outcomes that are not those of the table;
`server_errors`, answers of 5xx; `foreign`, requests of an attacker in the honest session, or answers that it did not
get; `violations` of the certificate.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from tests.long.endpoint.endpoint_ends import ENDS, HostileEnd
from tests.long.endpoint.endpoint_requests import (
    REQUESTS,
    RESPONSES,
    HostileRequest,
    Target,
    http,
    statuses_of,
)
from tests.long.endpoint.gateway_children import Client, gateway
from tests.long.endpoint.gateway_ledger import stored_records
from tests.long.endpoint.gateway_programs import AT_GATEWAY, Ended
from tests.long.endpoint.gateway_requests import ASKED, ENDED, FRESH
from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.cli import main as cli
from verl_multiturn.cli.serve import ScriptedModel, scripted_run
from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.records.read.sessions import SessionIndex
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.outcome import Outcome

DOORS = ("serve", "training", "gateway")
KINDS = ("unexpected", "server_errors", "foreign", "violations")
"""Figures that have to be 0."""
_AT_ONCE = 8
_HONEST = 20
_AGENT = "tests.long.endpoint.endpoint_ends:play"
_STATUS = {"finished": 0, "AgentContractError": 2, "ConfigError": 2}
"""Exit status of `serve` after an agent; 1: its session did not end well."""
_LIMITS = Limits(prompt_length=100_000, response_length=100_000)

Figures = dict[str, int]


def measure(doors: Sequence[str] = DOORS, console: Console | None = None) -> dict[str, Figures]:
    """Return the figures of each door.

    Args:
        doors: Names of doors.
        console: Where unexpected outcomes are shown; None: nowhere.
    """
    shown, found = console or Console(quiet=True), {}
    for door in doors:
        found[door] = asyncio.run({"serve": _at_serve, "training": _at_training, "gateway": _at_gateway}[door](shown))
        if door == "serve":
            _serve_ends(found[door], shown)
    return found


async def _at_serve(console: Console) -> Figures:
    """Send the requests to the command `serve`, which waits for an agent in a process of its own."""
    figures = _nothing()
    command = [sys.executable, "-m", "verl_multiturn.cli", "serve"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    words = (await process.stdout.readuntil(b"ANTHROPIC_BASE_URL")).decode()
    found = re.search(r"127\.0\.0\.1:(\d+)/v1\s+export OPENAI_API_KEY=(\S+)", words)
    assert found is not None, words
    await send(REQUESTS, Target(int(found[1]), found[2]), figures, console)
    process.send_signal(signal.SIGINT)
    said, _ = await process.communicate()
    figures["violations"] += b" 0 violations" not in said
    return figures


def _serve_ends(figures: Figures, console: Console) -> None:
    """Let the command `serve` run each agent that a thread can run; it needs the main thread, for its signals."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        for end in (end for end in ENDS if end.only is None):
            row = {"prompt": [{"role": "user", "content": "x"}], "extra_info": {"source": end.source}}
            path.write_text(json.dumps(row), encoding="utf-8")
            done = CliRunner().invoke(cli.app, ["serve", "--agent", _AGENT, "--row", str(path)])
            figures["ends"] += 1
            figures["violations"] += "certificate:" in done.output and " 0 violations" not in done.output
            expected = _STATUS.get(end.ends.split()[0], 1)
            if done.exit_code != expected:
                said = f"serve, an agent that {end.name}: {done.exit_code}, {done.output[-300:]!r}"
                _unexpected(figures, console, said, expected)


async def _at_training(console: Console) -> Figures:
    """Send the requests to a session of an endpoint beside an honest one, and run the agents by both runners."""
    figures = _nothing()
    run = scripted_run(ScriptedModel([]), _LIMITS)
    async with ProxyServer() as server:
        attacked, honest = AgentSession("attacked", run, {}), AgentSession("honest", run, {})
        port = int(server.address.rpartition(":")[2])
        own = Target(port, server.open(honest).api_key)
        statuses = asyncio.ensure_future(_honest(own))
        target = Target(port, server.open(attacked).api_key, other="resp_" + await _first_id(honest))
        await send(REQUESTS, target, figures, console)
        answered = await statuses
        asked = len(honest.journal.requests())
        figures["foreign"] += abs(asked - len(answered)) + sum(status != (200,) for status in answered)
        figures["unexpected"] += bool(attacked.failed) + bool(honest.failed)
    run.renderer.close()
    for runner in ("thread", "process"):
        ends = [end for end in ENDS if end.only in (None, runner)]
        async with _endpoints(runner) as play:
            await _each(ends, lambda end, play=play: _played(end, play, figures, console))
    return figures


async def _at_gateway(console: Console) -> Figures:
    """Send the requests to a gateway beside an honest session, and let programs play sessions that end badly."""
    figures = _nothing()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with gateway(folder) as front, Client(front.address) as client:
            honest, attacked, fresh, asked, ended = [(await client.start()).body for _ in range(5)]
            own = Target(front.port, honest["api_key"])
            first = str((await client.chat(own.key, path=RESPONSES)).body["id"])
            statuses = asyncio.ensure_future(_honest(own))
            for each in (asked, ended):
                await client.chat(each["api_key"])
            await client.end(ended["api_key"])
            for requests, session, other in (
                (REQUESTS, attacked, first),
                (FRESH, fresh, honest["session_id"]),
                (ASKED, asked, first),
                (ENDED, ended, first),
            ):
                await send(requests, Target(front.port, session["api_key"], other), figures, console)
            answered = await statuses
            found = (await client.end(own.key)).body
            expected = {"session_id": honest["session_id"], "completions": len(answered) + 1, "reward": None}
            figures["foreign"] += sum(status != (200,) for status in answered)
            figures["foreign"] += {key: found.get(key) for key in expected} != expected
            programs = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.long.endpoint.gateway_programs", front.address, stdout=-1
            )
            played, _ = await programs.communicate()
            figures["unexpected"] += await front.stop() != 0
        _gateway_ends(folder, [json.loads(line) for line in played.splitlines()], figures, console)
    return figures


def _gateway_ends(folder: Path, played: Sequence[dict[str, Any]], figures: Figures, console: Console) -> None:
    """Compare the ends of programs, and check all records of a gateway that has ended."""
    index = SessionIndex(folder)
    index.refresh()
    for each in played:
        figures["ends"] += 1
        session, expected = index.sessions[each["session_id"]], AT_GATEWAY[each["name"]]
        completions = None if expected.completions is None else sum(map(bool, session.completions))
        found = Ended(each["reward"], session.why, completions)
        if found != expected:
            _unexpected(figures, console, f"gateway, a program that {each['name']}: {found}", expected)
    records = list(stored_records(folder))
    figures["unexpected"] += len({record["request_id"] for record in records} ^ index.sessions.keys())
    figures["violations"] += sum(len(verify_record(record).violations) for record in records)


async def _honest(target: Target) -> list[tuple[int, ...]]:
    return [await statuses_of(target.port, http()(target), 1) for _ in range(_HONEST)]


async def _first_id(session: AgentSession) -> str:
    while not session.forest.completions:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    return next(iter(session.forest.completions))


@asynccontextmanager
async def _endpoints(runner: Any) -> AsyncIterator[Any]:
    """Give what runs an agent of `endpoint_ends` by a runner, as an agent loop does."""
    agents = build_runner(ProxySettings(agent=_AGENT, runner=runner))
    opened: list[Endpoint] = []

    async def play(end: HostileEnd) -> tuple[Outcome, list[Receipt]]:
        run, watch = scripted_run(ScriptedModel([]), _LIMITS), Outages().of("agent", OutageLimits(mode="mask"), 600.0)
        opened.append(endpoint := Endpoint(run, agents, ProxyServer(), end.wall_clock_s, watch=watch))
        row = {"raw_prompt": [{"role": "user", "content": "x"}], "extra_info": {"source": end.source}}
        return await endpoint.run(end.name, row, {})

    try:
        yield play
    finally:
        for endpoint in opened:
            await endpoint.aclose()


async def _played(end: HostileEnd, play: Any, figures: Figures, console: Console) -> None:
    figures["ends"] += 1
    try:
        outcome, receipts = await play(end)
    except MultiTurnError as error:
        found = type(error).__name__
    else:
        found = f"{outcome.stop_reason} {outcome.session.end}"
        verdict = verify_record(record_of(Life(outcome.request_id, outcome=outcome, generations=receipts)))
        figures["violations"] += len(verdict.violations)
    if found != end.ends:
        _unexpected(figures, console, f"training, an agent that {end.name}: {found}", end.ends)


async def send(requests: Sequence[HostileRequest], target: Target, figures: Figures, console: Console) -> None:
    """Send hostile requests, each on a connection of its own, and count their answers.

    Args:
        requests: The requests.
        target: Where they go.
        figures: Counts are added here.
        console: Where unexpected answers are shown.
    """

    async def one(request: HostileRequest) -> None:
        got = await statuses_of(target.port, request.written(target), len(request.statuses))
        figures["requests"] += 1
        figures["server_errors"] += sum(status >= 500 for status in got)
        if got != request.statuses:
            _unexpected(figures, console, f"{request.name}: {got}", request.statuses)

    await _each(requests, one)


async def _each(items: Sequence[Any], do: Any) -> None:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Any) -> None:
        async with places:
            await do(item)

    await asyncio.gather(*map(one, items))


def _unexpected(figures: Figures, console: Console, said: str, expected: object) -> None:
    figures["unexpected"] += 1
    console.print(f"{said}; expected {expected}", highlight=False, markup=False)


def _nothing() -> Figures:
    return dict.fromkeys(("requests", "ends", *KINDS), 0)


def is_right(found: dict[str, Figures]) -> bool:
    """Return whether every door was attacked, and held."""
    return all(
        each["requests"] >= len(REQUESTS) and each["ends"] >= 40 and not any(each[kind] for kind in KINDS)
        for each in found.values()
    )
