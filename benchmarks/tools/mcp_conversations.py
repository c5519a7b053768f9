"""MCP servers with a state, one for each conversation: are states mixed, is a process left, and what does a start take?

    python -m benchmarks.mcp_conversations

Two servers of others, in pinned versions, each installed into a temporary folder: `@modelcontextprotocol/server-memory`
from npm, and `mcp-server-sqlite` from PyPI, in an environment of its own. 128 conversations, at most 16 at once, write
words of their own in three turns, with pauses as for an engine, and read all that their server knows. Every eighth is
cancelled in its second turn. Then a worker with 16 open servers is killed. At last the same servers are shared by all
conversations of a worker (`per: worker`): a conversation reads what another one wrote, and `check-tool` says so.

Without npm, or where a registry cannot be reached, the server's part is null, and `holds` is false.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from verl_multiturn import load_tools
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.checking.examination import Grade
from verl_multiturn.checking.server_state import ServerState
from verl_multiturn.checking.tool_contract import check_tool
from verl_multiturn.checking.trial_calls import ToolProbe
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession

MEMORY = "2026.8.31"
SQLITE = ("mcp-server-sqlite==2025.4.25", "mcp==1.30.0")
INSTALL_S = 600
AT_ONCE = 16
PAUSE_S = 0.4
START_MS = 50.0
"""Most milliseconds of the median start of a conversation that found a ready server."""


@dataclass(frozen=True)
class KnownServer:
    """A server: its entry for one conversation and for all, and what a conversation calls."""

    own: dict[str, Any]
    shared: dict[str, Any]
    examined: str
    """Name of the tool that `check-tool` examines."""
    arguments: dict[str, Any]

    def begins(self) -> list[ToolCall]:
        """Return the calls before the first turn."""
        return [] if self.examined == "create_entities" else [_call("create_table", query="CREATE TABLE words (word)")]

    def writes(self, word: str) -> ToolCall:
        """Return the call that writes a word."""
        if self.examined == "create_entities":
            return _call("create_entities", entities=[{"name": word, "entityType": "word", "observations": [word]}])
        return _call("write_query", query=f"INSERT INTO words VALUES ('{word}')")

    def reads(self) -> ToolCall:
        """Return the call that reads all that the server knows."""
        if self.examined == "create_entities":
            return _call("read_graph")
        return _call("read_query", query="SELECT word FROM words")


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments), f"call-{time.monotonic_ns()}")


def memory(folder: Path) -> KnownServer:
    """Install server-memory, and return it.

    Args:
        folder: An empty folder, or one that has it.
    """
    package = f"@modelcontextprotocol/server-memory@{MEMORY}"
    program = folder / "node_modules" / "@modelcontextprotocol" / "server-memory" / "dist" / "index.js"
    if not program.is_file():
        npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), package]
        subprocess.run(npm, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL, timeout=INSTALL_S)
    both = {"command": "node", "args": [str(program)]}
    return KnownServer(
        {**both, "env": {"MEMORY_FILE_PATH": "${conversation.folder}/memory.json"}},
        {**both, "env": {"MEMORY_FILE_PATH": str(folder / "shared.json")}},
        "create_entities",
        {"entities": [{"name": "example", "entityType": "word", "observations": ["example"]}]},
    )


def sqlite(folder: Path) -> KnownServer:
    """Install mcp-server-sqlite into an environment of its own, and return it.

    Args:
        folder: An empty folder, or one that has it.
    """
    command = str(folder / "bin" / "mcp-server-sqlite")
    if not Path(command).is_file():
        venv.create(folder, with_pip=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *SQLITE]
        subprocess.run(pip, check=True, stdout=sys.stderr, timeout=INSTALL_S)
    return KnownServer(
        {"command": command, "args": ["--db-path", "${conversation.folder}/words.db"]},
        {"command": command, "args": ["--db-path", str(folder / "shared.db")]},
        "create_table",
        {"query": "CREATE TABLE IF NOT EXISTS example (word)"},
    )


@dataclass
class Seen:
    """What was seen of the conversations of one server."""

    mixed: int = 0
    failed: int = 0
    killed: int = 0
    ready_ms: list[float] = field(default_factory=list)
    other_ms: list[float] = field(default_factory=list)
    connections: list[object] = field(default_factory=list)


def _tools(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"mcp": settings}]}))
    return load_tools(path)


async def _converse(index: int, server: KnownServer, tools: dict[str, Any], seen: Seen) -> None:
    name, began = f"conversation-{index}", time.monotonic()
    async with ToolSession(name, tools, {}, Gates(Gate, 60.0), 100) as session:
        ended = time.monotonic()
        connection = next(iter(tools.values())).server.connection_of(name)
        was_ready = connection.started_at is not None and connection.started_at <= began
        (seen.ready_ms if was_ready else seen.other_ms).append(1000 * (ended - began))
        seen.connections.append(connection)
        results = await session.execute(server.begins())
        for turn in range(3):
            await asyncio.sleep(PAUSE_S)
            results += await session.execute([server.writes(f"of{index}turn{turn}")])
        results += await session.execute([server.reads()])
    seen.failed += any(result.status is not CallStatus.OK for result in results)
    words = {f"of{index}turn{turn}" for turn in range(3)}
    found = set(results[-1].text.replace("'", '"').split('"'))
    seen.mixed += {word for word in found if word.startswith("of") and "turn" in word} != words


async def play(server: KnownServer, folder: Path, conversations: int, ready: int) -> tuple[Seen, float]:
    """Play conversations with a server for each, and return what was seen, and the seconds.

    Args:
        server: The server.
        folder: Folder of the YAML.
        conversations: Their number.
        ready: Servers that are kept ready.
    """
    seen, began = Seen(), time.monotonic()
    tools = await asyncio.to_thread(_tools, folder, {**server.own, "per": "conversation", "ready": ready})
    seats = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> None:
        async with seats:
            playing = asyncio.ensure_future(_converse(index, server, tools, seen))
            if index % 8 == 7:
                while not playing.done() and _entered(tools, index) is None:  # noqa: ASYNC110 a server sets no event
                    await asyncio.sleep(0.01)
                await asyncio.sleep(1.5 * PAUSE_S)
                playing.cancel()
                seen.killed += 1
            await asyncio.wait({playing})
            if not playing.cancelled():
                playing.result()

    await asyncio.gather(*(one(index) for index in range(conversations)))
    seconds = time.monotonic() - began
    await next(iter(tools.values())).aclose()
    return seen, seconds


def _entered(tools: dict[str, Any], index: int) -> object:
    return next(iter(tools.values())).server.connection_of(f"conversation-{index}")


async def _hold(server: KnownServer, folder: Path) -> None:
    """Open 16 servers, report it, and wait to be killed."""
    tools = _tools(folder, {**server.own, "per": "conversation"})
    for index in range(AT_ONCE):
        session = ToolSession(f"held-{index}", tools, {}, Gates(Gate, 60.0), 100)
        await session.__aenter__()
        await session.execute(server.begins())
    print("open", flush=True)
    await asyncio.sleep(3600)


def left_by_a_kill(name: str, folder: Path, temporary: Path) -> int:
    """Kill a worker with 16 open servers, and return how many processes and folders it left.

    Args:
        name: Name of the server.
        folder: Its folder.
        temporary: Folder of the worker's temporary files.
    """
    command = [sys.executable, "-m", "benchmarks.mcp_conversations", "--hold", name, str(folder)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    for line in worker.stdout:
        if line == "open\n":
            break
    assert count_left(folder, temporary) > AT_ONCE, "the servers are there"
    worker.kill()
    worker.communicate()
    return count_left(folder, temporary, 10.0)


def count_left(folder: Path, temporary: Path, wait_s: float = 0.0) -> int:
    """Return how many processes of a server, and folders of conversations, are there.

    Args:
        folder: Folder of the server, which is in the command line of each.
        temporary: Folder of temporary files.
        wait_s: Seconds to wait for them to end.
    """
    until = time.monotonic() + wait_s
    while True:
        mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        running = [
            process.pid
            for process in psutil.process_iter(["cmdline", "status"])
            if process.pid not in mine
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and any(str(folder) in part for part in process.info["cmdline"] or ())
        ]
        found = len(running) + len(list(temporary.glob("verl-multiturn-mcp-*")))
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


async def leak_under_worker(server: KnownServer, folder: Path) -> bool:
    """Return whether a conversation reads what another one wrote, where all share the server."""
    tools = await asyncio.to_thread(_tools, folder, server.shared)
    texts = []
    for index in range(2):
        async with ToolSession(f"r{index}", tools, {}, Gates(Gate, 60.0), 100) as session:
            await session.execute(server.begins())
            await session.execute([server.writes(f"of{index}")])
            texts += [result.text for result in await session.execute([server.reads()])]
    await next(iter(tools.values())).aclose()
    return "of0" in texts[1]


def examine(server: KnownServer, folder: Path) -> tuple[bool, str]:
    """Return whether `check-tool` names the leak under `worker`, and nothing else, and its words of the own servers."""
    tool = _tools(folder, server.shared)[server.examined]
    problems = [finding for finding in check_tool(tool, server.arguments) if finding.verdict is Grade.PROBLEM]
    for finding in problems:
        print(f"{finding.check}: {finding.found}; {finding.remedy}")
    named = [(finding.check, "per: conversation" in finding.remedy) for finding in problems]
    own = _tools(folder, {**server.own, "per": "conversation"})[server.examined]

    async def look() -> str:
        try:
            return await ServerState(ToolProbe(own, {}, None), server.arguments).run()
        finally:
            await own.aclose()

    return named == [("isolation", True)], asyncio.run(look())


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None


def measure(name: str, folder: Path, temporary: Path, conversations: int) -> dict[str, Any] | None:
    """Measure one server; None where it cannot be installed.

    Args:
        name: `memory` or `sqlite`.
        folder: An empty folder for the server.
        temporary: Folder of temporary files of this process.
        conversations: Number of conversations.
    """
    if name == "memory" and shutil.which("npm") is None:
        print("there is no npm on this machine; install Node.js to measure server-memory")
        return None
    try:
        server = _SERVERS[name](folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name} cannot be installed: {error}")
        return None
    (folder / "server.json").write_text(json.dumps(asdict(server)))
    seen, seconds = asyncio.run(play(server, folder, conversations, 4))
    left = count_left(folder, temporary, 10.0)
    without, seconds_without = asyncio.run(play(server, folder, conversations, 0))
    left += count_left(folder, temporary, 10.0) + left_by_a_kill(name, folder, temporary)
    is_named, own_named = examine(server, folder)
    return {
        "mixed": seen.mixed + without.mixed,
        "failed": seen.failed + without.failed,
        "killed": seen.killed + without.killed,
        "left": left,
        "servers_of_two": len(seen.connections) - len({id(connection) for connection in seen.connections}),
        "found_ready": len(seen.ready_ms),
        "ready_start_ms": _median(seen.ready_ms),
        "other_start_ms": _median(seen.other_ms),
        "start_ms_without_pool": _median(without.other_ms),
        "seconds": round(seconds, 1),
        "seconds_without_pool": round(seconds_without, 1),
        "leaks_under_worker": asyncio.run(leak_under_worker(server, folder)),
        "leak_named": is_named,
        "own_named": own_named,
    }


_SERVERS = {"memory": memory, "sqlite": sqlite}


def main() -> None:
    """Measure both servers, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="where the servers are installed, and kept; else a temporary one")
    parser.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.hold is not None:
        name, folder = options.hold[0], Path(options.hold[1])
        held = json.loads((folder / "server.json").read_text())
        asyncio.run(_hold(KnownServer(**held), folder))
    with tempfile.TemporaryDirectory(prefix="mcp-conversations-") as root:
        temporary = Path(root) / "temporary"
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        found = {}
        for name in _SERVERS:
            (folder := (options.folder or Path(root)).absolute() / name).mkdir(parents=True, exist_ok=True)
            for file in folder.glob("shared.*"):
                file.unlink()
            found[name] = measure(name, folder, temporary, options.conversations)
            print(json.dumps({name: found[name]}))
    parts = [part for part in found.values() if part is not None]
    right = {"mixed": 0, "failed": 0, "left": 0, "servers_of_two": 0, "leaks_under_worker": True, "leak_named": True}
    holds = len(parts) == len(found) and all(
        all(part[key] == value for key, value in right.items())
        and not part["own_named"]
        and part["ready_start_ms"] is not None
        and part["ready_start_ms"] <= START_MS
        for part in parts
    )
    summed = {key: sum(part[key] for part in parts) for key in ("mixed", "left")}
    print(json.dumps({"conversations": options.conversations, "at_once": AT_ONCE, **summed, **found, "holds": holds}))


if __name__ == "__main__":
    main()
