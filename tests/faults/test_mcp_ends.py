"""Ends of MCP connections that come at a bad moment: before the start, in its failure, in a process that was forked."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.servers.starting import children, until
from verl_multiturn.tools.services.mcp_connection import ServerAwayError, ServerConnection
from verl_multiturn.tools.services.mcp_listing import ToolListing
from verl_multiturn.tools.services.mcp_settings import McpSettings

SILENT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.read()
pathlib.Path(sys.argv[1]).touch()
time.sleep(3600)
"""
"""A server that answers nothing, and neither the end of its input nor a signal ends it."""

FORK = """
import os, signal, threading
from verl_multiturn.tools.services import mcp_loop

held, forked = threading.Event(), threading.Event()

def hold():
    with mcp_loop._lock:
        held.set()
        forked.wait()

async def answer():
    return 7

threading.Thread(target=hold).start()
held.wait()
if (child := os.fork()) == 0:
    signal.alarm(60)
    os._exit(mcp_loop.from_outside(answer()))
forked.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

GARBAGE = """
import gc, os, sys, time
import psutil
from verl_multiturn.tools.mcp_tools import mcp_tools
from verl_multiturn.tools.services.mcp_loop import from_outside

given = {"command": "python", "args": [sys.argv[1]], "per": "conversation", "ready": 1}
tools = mcp_tools(given, "here")

async def converse(servers):
    servers.enter("r1", "add")
    await servers.wait("r1", "add", None)

def is_there(each):
    try:
        return each.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

if (child := os.fork()) == 0:
    from_outside(converse(tools[0].server._servers))
    me = psutil.Process()
    began = len(me.children())
    del tools
    gc.collect()
    for _ in range(6000):
        if not (left := list(filter(is_there, me.children()))):
            break
        time.sleep(0.1)
    os._exit(0 if began and not left else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def connect(path: Path, start_timeout_s: float) -> ServerConnection:
    settings = McpSettings(command="python", args=["-c", SILENT, str(path)], start_timeout_s=start_timeout_s)
    return ServerConnection(settings, "here", ToolListing())


async def test_who_waits_for_a_server_that_is_stopped_before_it_began_gets_an_error(tmp_path: Path) -> None:
    connection = connect(tmp_path / "end", 60)
    connection.stop()
    async with asyncio.timeout(60):
        with pytest.raises(ServerAwayError, match="it was closed"):
            await asyncio.shield(connection.opened)


async def test_a_server_that_ends_after_a_failed_start_is_stopped_again_and_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    connection = connect(tmp_path / "end", 1.0)

    async def ends() -> bool:
        return (tmp_path / "end").exists()

    await until(ends)
    assert children() - before, "it has not ended yet"
    connection.stop()
    done, _ = await asyncio.wait({connection.owner}, timeout=60)
    assert done
    assert children() <= before
    with pytest.raises(ServerAwayError, match="no answer within 1 s"):
        await connection.opened


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(FORK, "7", id="while the loop's lock was held"),
        pytest.param(GARBAGE, "0", id="where the tools are garbage"),
    ],
)
def test_a_process_that_was_forked_has_a_loop_and_servers_of_its_own(script: str, expected: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", script, str(ROOT / "tests" / "servers" / "notes.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == [expected], done.stderr
