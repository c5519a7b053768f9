"""The chat loop of verifiers' harness `null`, run in the environment's own process. Runs in verifiers' Python.

verifiers starts a program for each segment of a conversation, that is for each word of the environment: `uv sync`
makes its interpreter at the first, and each start imports the clients of OpenAI and MCP again: seconds of a processor.
A harness may run its loop in the process that asks for it (`Harness.launch` of verifiers). So the program's functions
are called here, with the same arguments. The harness `bash` has a folder and runs commands; it stays a program, started
by this interpreter, which has all that it needs.

Invariants:
- what the loop does is verifiers' own code, `harnesses/utils/core.py`; its arguments and its exit status are those of
  the program;
- a client is closed with its segment.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
import tempfile
import traceback
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.harnesses.utils import compaction, core, mcp
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult, SubprocessRuntime

_CHAT = "verl-multiturn-chat"
"""The first word of the command of a chat program, in the place of an interpreter."""
_asked: ContextVar[Any] = ContextVar("asked")
_clients: ContextVar[list[AsyncOpenAI]] = ContextVar("clients")
_parse_args = core.parse_args
_prepare = SubprocessRuntime.prepare_uv_script


class _Client(AsyncOpenAI):
    """OpenAI's client, which is closed with the segment. Its address is on this machine: it needs no certificates."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs["http_client"] = DefaultAsyncHttpxClient(verify=False, trust_env=False)
        super().__init__(**kwargs)
        _clients.get().append(self)


def install() -> None:
    """Have local runtimes run chat programs in this process, and other scripts by this interpreter where it can."""
    # The bundled program has all of these in one module.
    for module, names in (
        (
            compaction,
            "Compactor bound_tool_message compactable discover_threshold estimated_tokens is_context_overflow",
        ),
        (mcp, "call_mcp connect_mcp"),
    ):
        for name in names.split():
            setattr(core, name, getattr(module, name))
    compaction.chat = core.chat
    core.AsyncOpenAI = _Client
    core.parse_args = _asked.get
    SubprocessRuntime.prepare_uv_script = _prepared
    SubprocessRuntime.run_program = _run_program


async def _prepared(
    self: SubprocessRuntime, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
) -> list[str]:
    data = script.encode() if isinstance(script, str) else script
    if not _has_all(data.decode(errors="replace")):
        found: list[str] = await _prepare(self, script, env, activate=activate)
        return found
    path = Path(tempfile.gettempdir()) / f"script-{hashlib.sha256(data).hexdigest()[:16]}.py"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        made.write_bytes(data)
        made.replace(path)
    return [_CHAT if script == CHAT_PROGRAM_SOURCE else sys.executable, str(path)]


def _has_all(script: str) -> bool:
    """Return whether this interpreter has all that a script's own header asks for, by name and pinned version."""
    header = re.search(r"^# dependencies = \[(.*?)\]$", script, re.MULTILINE | re.DOTALL)
    for needed in re.findall(r'"([^"]+)"', header[1]) if header else ():
        name, _, version = needed.partition("==")
        try:
            found = importlib.metadata.version(re.split(r"[\[<>=!~; ]", name)[0])
        except importlib.metadata.PackageNotFoundError:
            return False
        if version and found != version:
            return False
    return True


async def _run_program(self: SubprocessRuntime, argv: list[str], env: dict[str, str]) -> ProgramResult:
    if argv[0] != _CHAT:
        return await self.run(argv, env)
    if "--bash" in argv:
        return await self.run([sys.executable, *argv[1:]], env)
    return await _chat(argv[2:], Path(str(self.workdir)))


async def _chat(arguments: list[str], folder: Path) -> ProgramResult:
    """Run a segment; return how its program would have ended."""
    clients: list[AsyncOpenAI] = []
    _clients.set(clients)
    try:
        _asked.set(_parsed(arguments, folder))
        await core.main()
    except SystemExit as ended:
        return ProgramResult(ended.code if isinstance(ended.code, int) else 1, "", traceback.format_exc())
    except Exception:  # the program would have ended with it
        return ProgramResult(1, "", traceback.format_exc())
    finally:
        for client in clients:
            await client.close()
    return ProgramResult(0, "", "")


def _parsed(arguments: list[str], folder: Path) -> Any:
    saved, sys.argv = sys.argv, [_CHAT, *arguments]
    try:
        parsed = _parse_args()
    finally:
        sys.argv = saved
    if parsed.initial_messages_file:
        parsed.initial_messages_file = str(folder / parsed.initial_messages_file)
    return parsed
