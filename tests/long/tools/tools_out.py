"""Tools that go out to other programs and come back: schemas, sessions at once, killed clients, real clients.

    python -m benchmarks.tools_out [--schemas 5000] [--sessions 64] [--seed 0] [--without-program]

- Schemas: random ones go out through `verl-multiturn mcp`, over stdio and HTTP and in both kinds of the protocol's
  versions, and come back through our own client, an `mcp` entry of a tool YAML. They are compared as text: order, 1 and
  1.0, absent and empty are different.
- Sessions: clients of a till, all at once on one server, each with a session of its own: by the protocol, or by a name
  in the address. Each payment must answer with the balance of its own session. Some clients end their session, some are
  killed, and some are gone while a call runs.
- Clients: the official SDK over stdio and over HTTP, and an agent program of `scripts/harnesses`, unmodified, whose
  model is scripted.

A2A has its own keys; they are null where its SDK is not installed. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.long.tools.out_schemas import random_schema
from verl_multiturn.tools.loading.registry import build_tools

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "verl_multiturn.cli", "mcp")
TOOLS = "tests.long.tools.out_tools"
BUDGET = 1000
_BATCH = 1000
_PAYMENTS = 10
_WAIT_S = 120.0
MODERN = "2026-07-28"


def environment() -> dict[str, str]:
    """Return the environment of a server, which finds this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def write_yaml(folder: Path, *entries: dict[str, Any]) -> Path:
    """Write a tool YAML, and return its path."""
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}), encoding="utf-8")
    return path


def till(folder: Path, **limits: Any) -> Path:
    """Write the YAML of a till, whose log is `log` in the folder."""
    entry = {"class_name": f"{TOOLS}.Till", "config": {"log": str(folder / "log")}}
    return write_yaml(folder, {**entry, **({"limits": limits} if limits else {})})


def kwargs() -> list[str]:
    """Return the option for a session's budget."""
    return ["--kwargs", json.dumps({"till": {"create_kwargs": {"budget": BUDGET}}})]


@asynccontextmanager
async def http_server(*arguments: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Start a server on a free port; give its address and its process, which is ended by SIGTERM if it runs."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, "--http", "0", stdout=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    try:
        while line := (await process.stdout.readline()).decode():  # what the tools print comes before
            if found := re.findall(r"http://\S+(?=;)", line):
                break
        yield found[0], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), _WAIT_S)


# ------------------------------------------------------------------------------------------------------- schemas


async def round_trip(count: int, seed: int) -> dict[str, int]:
    """Send random schemas out and take them back, in batches; return how many came back changed."""
    draw, changed, went = random.Random(seed), 0, 0
    for batch, begin in enumerate(range(0, count, _BATCH)):
        schemas = [random_schema(draw, f"tool_{number}") for number in range(begin, min(count, begin + _BATCH))]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lines = "".join(json.dumps(schema) + "\n" for schema in schemas)
            (folder / "schemas").write_text(lines, encoding="utf-8")
            entry = {"toolset": f"{TOOLS}.listed", "config": {"path": str(folder / "schemas")}}
            back = await asyncio.to_thread(_over_stdio, write_yaml(folder, entry)) if batch % 2 == 0 else None
            back = back or await _over_http(write_yaml(folder, entry), f"/batch{batch}" if batch % 4 == 1 else "")
        went += len(back)
        changed += sum(json.dumps(one) != json.dumps(other) for one, other in zip(schemas, back, strict=True))
    return {"mcp_schemas": went, "mcp_changed": changed}


def _over_stdio(path: Path) -> list[dict[str, Any]]:
    command, *arguments = COMMAND
    settings = {"command": command, "args": [*arguments, str(path)], "env": {"PYTHONPATH": str(ROOT)}}
    return _listed(settings)


async def _over_http(path: Path, name: str) -> list[dict[str, Any]]:
    async with http_server(str(path)) as (address, _):
        return await asyncio.to_thread(_listed, {"url": address + name})


def _listed(settings: dict[str, Any]) -> list[dict[str, Any]]:
    patient = {**settings, "start_timeout_s": 10 * _WAIT_S}  # a busy machine is no fault
    return [tool.tool_schema.as_dict() for tool in build_tools({"mcp": patient}, "tools[0]")]


# ------------------------------------------------------------------------------------------------------ sessions


async def pay(client: Client, payments: int, draw: random.Random) -> int:
    """Pay into a client's own till, and return how many answers were another session's, or none at all."""
    balance, mixed = BUDGET, 0
    for number in range(1, payments + 1):
        amount = draw.randrange(1, 1_000_000)
        balance += amount
        answer = await client.call_tool("till", {"amount": amount})
        mixed += text_of(answer) != f"{number} payments, {balance} cents"
    return mixed


def text_of(answer: Any) -> str:
    """Return the text of an answer; "" without one."""
    return "".join(getattr(part, "text", "") for part in answer.content)


async def sessions(count: int, seed: int) -> dict[str, int]:
    """Play sessions at once: on one server over HTTP, and as processes; some clients are killed."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = till(folder)
        to_kill = max(1, count // 16)
        over_http, processes = count - 4 * to_kill, to_kill
        async with http_server(str(path), *kwargs(), "--idle-s", "20") as (address, _):
            mixed = await asyncio.gather(*(play(address, n, random.Random(draw.random())) for n in range(over_http)))
            named = [f"{address}/killed-{number}" for number in range(to_kill)]
            killed = await kill_clients([*[address] * to_kill, *named, *[str(path)] * to_kill])
            mixed += await asyncio.gather(*(_process(path, random.Random(draw.random())) for _ in range(processes)))
            # Those whose client is gone end when they were not used for long enough.
            await _until(lambda: not unreleased(folder / "log"))
            mixed += await asyncio.gather(*(play(address, n, draw) for n in (1, 5)))  # open at the end
        lines = (folder / "log").read_text(encoding="utf-8").split("\n")
        released = Counter(line.split()[1] for line in lines if line.startswith("release"))
        created = [line.split()[1] for line in lines if line.startswith("create")]
    return {
        "sessions": len(created),
        "killed": killed,
        "mixed": sum(mixed),
        "released_once": sum(released[each] == 1 for each in created),
        "not_released": sum(not released[each] for each in created),
        "released_twice": sum(times > 1 for times in released.values()),
    }


def unreleased(log: Path) -> set[str]:
    """Return the ids of the sessions in a log that were created and not released."""
    words = [line.split() for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    return {line[1] for line in words if line[0] == "create"} - {line[1] for line in words if line[0] == "release"}


async def _until(holds: Any) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(_WAIT_S):
        while not holds():  # noqa: ASYNC110  # it is another process that makes it hold
            await asyncio.sleep(0.1)


async def play(address: str, number: int, draw: random.Random) -> int:
    """Play one session over HTTP: every third by a name in the address, the others by the protocol; half end it."""
    named = number % 3 == 0
    transport = streamable_http_client(address + f"/till-{number}" * named, terminate_on_close=number % 2 == 0)
    async with Client(transport, mode=MODERN if named else "auto") as client:
        return await pay(client, _PAYMENTS, draw)


async def _process(path: Path, draw: random.Random) -> int:
    """Play one session over stdio."""
    async with Client(stdio_client(parameters(path))) as client:
        return await pay(client, _PAYMENTS, draw)


def parameters(path: Path, *arguments: str) -> StdioServerParameters:
    """Return the command of a server over stdio, for the SDK's client."""
    command, *given = COMMAND
    return StdioServerParameters(
        command=command, args=[*given, str(path), *kwargs(), *arguments], env={"PYTHONPATH": str(ROOT)}
    )


async def kill_clients(targets: Sequence[str]) -> int:
    """Start clients in one process, kill it while a call of each runs, and return their number."""
    program = [sys.executable, "-m", "tests.long.tools.out_client", *targets]
    process = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE, env=environment(), cwd=ROOT)
    assert process.stdout is not None
    said = await process.stdout.readline()
    process.kill()
    await process.wait()
    assert said == b"calls\n", said
    return len(targets)


# ------------------------------------------------------------------------------------------------------- clients


async def real_clients(with_program: bool) -> dict[str, Any]:
    """Let real clients use a server, and return whether each got the answers."""
    with tempfile.TemporaryDirectory() as name:
        path = till(Path(name))
        async with Client(stdio_client(parameters(path)), mode="legacy") as client:
            stdio = await pay(client, 3, random.Random(0)) == 0
        async with http_server(str(path), *kwargs()) as (address, _), Client(address) as client:
            http = await pay(client, 3, random.Random(0)) == 0
    return {"sdk_stdio": stdio, "sdk_http": http, "agent_program": await _agent_program() if with_program else None}


async def _agent_program() -> dict[str, Any] | None:
    """Run Qwen Code with a server of ours, and return whether it called the tool; None where it cannot be installed."""
    if shutil.which("npm") is None:
        return None
    from dataclasses import replace

    from scripts.harnesses.policies import TASK, reader
    from scripts.harnesses.programs import PROGRAMS, Endpoint
    from scripts.harnesses.running import run_program
    from tests.support.template_play import template_of

    (program,) = [each for each in PROGRAMS if each.name == "qwen_code"]
    with tempfile.TemporaryDirectory() as name:
        path = write_yaml(Path(name), {"function": f"{TOOLS}.read_lot"})
        command, *given = COMMAND

        def setup(home: Path, endpoint: Endpoint) -> dict[str, str]:
            more = dict(program.setup(home, endpoint))
            settings = home / ".qwen" / "settings.json"
            server = {"command": command, "args": [*given, str(path)], "env": {"PYTHONPATH": str(ROOT)}, "trust": True}
            known = json.loads(settings.read_text(encoding="utf-8"))
            settings.write_text(json.dumps({**known, "mcpServers": {"lots": server}}), encoding="utf-8")
            return more

        with_mcp = replace(program, name="qwen_code.mcp", policy=reader("mcp__lots__read_lot"), setup=setup)
        assert TASK in with_mcp.command
        await asyncio.to_thread(with_mcp.environment.make)
        report = await run_program(with_mcp, template_of("qwen3"), 120.0)
    problem = {"problem": report["problem"]} if "problem" in report else {}
    return {"name": "qwen_code", "tool_ran": report["tool_ran"], "violations": report["violations"], **problem}


# ----------------------------------------------------------------------------------------------------------- all


async def measure(schemas: int, count: int, seed: int, with_program: bool = True) -> dict[str, Any]:
    """Return all figures."""
    found: dict[str, Any] = {**await round_trip(schemas, seed), **await sessions(count, seed)}
    found["clients"] = await real_clients(with_program)
    a2a: dict[str, Any] = {"a2a_schemas": None, "a2a_changed": None}
    module = "tests.long.tools.a2a_schemas"
    if importlib.util.find_spec("a2a") is not None and importlib.util.find_spec(module) is not None:
        with contextlib.suppress(ImportError):
            a2a |= importlib.import_module(module).a2a_schemas(min(schemas, 1000), seed)
    return found | a2a
