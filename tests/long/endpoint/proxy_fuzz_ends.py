"""Agents that end badly and strangers that take room, for `benchmarks.proxy_fuzz`.

Real processes: commands whose result is not a plain file, that kill or stop their keeper, that close their folder; and
an endpoint in a process that may open few files, with silent, dripping and refused connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.long.endpoint.proxy_fuzz_agents import Fuzzed
from tests.long.endpoint.proxy_fuzz_checks import Findings
from tests.long.endpoint.proxy_fuzz_http import Clients
from tests.long.endpoint.proxy_fuzz_wire import PATHS, Ask
from verl_multiturn.cli.serve import ScriptedModel, scripted_run
from verl_multiturn.errors import AgentContractError
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.process_runner import ProcessRunner
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.rollout.limits import Limits

_NO_FILE, _UNREADABLE = "is no plain file", "cannot be read"
_ENDS = {
    "os.mkdir(result)": _NO_FILE,
    "os.mkfifo(result)": _NO_FILE,
    "os.symlink('/etc/passwd', result)": _NO_FILE,
    "os.symlink(result, result)": _NO_FILE,
    "import socket; socket.socket(socket.AF_UNIX).bind(result)": _NO_FILE,
    "open(result, 'w').truncate(2**40)": "more than 4 MiB",
    "shutil.rmtree(folder); open(folder, 'w')": _UNREADABLE,
    "open(result, 'w').write('[' * 100000)": "has no JSON",
    "shutil.rmtree(folder)": "returned",
    "os.makedirs(folder + '/a/b'); os.chmod(folder + '/a', 0)": "returned",
    "os.kill(os.getppid(), 9); time.sleep(1e6)": "exited",
    "os.kill(os.getppid(), 19); open(folder + '/stopped', 'w'); time.sleep(1e6)": "timed_out",
}
"""A command's actions in its folder, and how that has to end."""
_COMMAND = [
    sys.executable,
    "-ISc",
    "import json, os, shutil, sys, time\n"
    "result = sys.argv[2]\nfolder = os.path.dirname(result)\nexec(json.load(open(sys.argv[1]))['script'])",
    "{row}",
    "{result}",
]
_FILES, _STRANGERS = 256, 400
_SENT = (b"", b"POST /v1/chat", b"POST /v1/messages HTTP/1.1\r\nhost: h\r\nauthorization: Bearer x\r\n\r\n",
         b"GET /nowhere HTTP/1.1\r\nhost: h\r\n\r\n")  # fmt: skip


async def ask_late(played: Fuzzed, clients: Clients, findings: Findings) -> None:
    """Ask after the agent's return: everything is refused."""
    for path in PATHS:
        ask = Ask(path, [{"role": "user", "content": "late"}])
        reply = await clients.post(path, ask.body())
        played.requests += 1
        if reply.status != 400 or b"session is over" not in reply.body:
            findings.add(
                "violations", f"{played.session.id}: {path} after the return: {reply.status} {reply.body!r:.200}"
            )


async def play_ends(findings: Findings) -> int:
    """Run commands that end badly, and return how many; none may leave its folder."""
    runner = ProcessRunner(None, _COMMAND, "command")
    with tempfile.TemporaryDirectory() as above, patch.object(tempfile, "tempdir", above):
        await asyncio.gather(*(_end(runner, script, ending, above, findings) for script, ending in _ENDS.items()))
        await runner.aclose()
        if left := os.listdir(above):
            findings.add("violations", f"folders of agents are left: {left}")
    return len(_ENDS)


def _has_stopped(above: str) -> bool:
    return any(Path(above).glob("*/stopped"))


async def _end(runner: ProcessRunner, script: str, ending: str, above: str, findings: Findings) -> None:
    address = SessionAddress("http://127.0.0.1:1/v1", "key", "http://127.0.0.1:1", script)
    time_up = asyncio.Event()
    told: list[bool] = []
    running = asyncio.ensure_future(runner.run({"script": script}, address, time_up, lambda: told.append(True)))
    while ending == "timed_out" and not running.done():
        if _has_stopped(above):
            time_up.set()
        await asyncio.sleep(0.01)
    try:
        said = (await running).kind
    except AgentContractError as error:
        said = str(error)
    if ending not in said:
        findings.add("violations", f"a command that does {script!r} ends with {said!r}, expected {ending!r}")
    if ending not in ("exited", "timed_out") and told != [True]:
        findings.add("violations", f"the end of a command that does {script!r} was told {len(told)} times")


async def play_strangers(seed: int, findings: Findings) -> int:
    """Connect strangers to an endpoint that may open few files, and return how many; its session has to be served."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.long.endpoint.proxy_fuzz_ends",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    said = json.loads(await process.stdout.readline())
    chance, strangers = random.Random(seed), []
    clients = Clients(said["port"], said["key"])
    for number in range(_STRANGERS):
        strangers.append(stranger := socket.create_connection(("127.0.0.1", said["port"])))
        stranger.sendall(chance.choice(_SENT))
        if chance.random() < 0.2:
            stranger.shutdown(socket.SHUT_WR)
        if number % 50 == 49:
            reply = await clients.post(PATHS[0], Ask(PATHS[0], [{"role": "user", "content": str(number)}]).body())
            if reply.status != 200:
                findings.add("violations", f"with {number + 1} strangers: {reply.status} {reply.body!r:.200}")
    clients.close()
    for stranger in strangers:
        stranger.close()
    _, wrong = await process.communicate(b"")
    if wrong:
        findings.add("violations", f"the endpoint with few files wrote {wrong[-300:]!r}")
    return len(strangers)


async def _serve() -> None:
    """Be the endpoint that may open few files."""
    run = scripted_run(ScriptedModel([]), Limits(prompt_length=10_000, response_length=10_000))
    async with ProxyServer() as server:
        access = server.open(AgentSession("s", run, {}))
        print(json.dumps({"port": int(server.address.rpartition(":")[2]), "key": access.api_key}), flush=True)
        reading = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        while not reading.done():
            with open(os.devnull):  # noqa: ASYNC230  # this has to work
                await asyncio.sleep(0.005)
    run.renderer.close()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    asyncio.run(_serve())
