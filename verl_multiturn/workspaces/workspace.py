"""One workspace, and the pool that opens them: a folder and a shell of one conversation, in a sandbox.

A workspace is one sandbox, whose worker runs no code of the model but our driver (`driver.py`). The driver starts each
command in a shell of its own. From one command to the next stay the files, and the processes that a command started
and did not end; `cd` and variables do not.

Invariants:
- a command that is late, that prints without end, or whose caller gives up ends, and with it every other process of the
  workspace; the files stay;
- the output of a workspace (text, a number, bytes) may come from any program that ran in it. Nothing of it is trusted;
- a program can end its own workspace and cannot affect another one. The end is reported in words for the model
  (`CommandResult.stopped`, `WorkspaceError`). A failure of the pool itself raises `SandboxError`, an outage; so does
  the end of a workspace in which no command has run yet, since only we can have ended it;
- one workspace runs one command at a time; further ones wait.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import marshal
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from verl_multiturn.calls.tasks import keep
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.launch import check as check_sandbox
from verl_multiturn.sandbox.output import BoundedOutput
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.sandbox import MAX_CODE_BYTES, Sandbox
from verl_multiturn.workspaces.driver import FLOOD_BYTES, PIECE_BYTES
from verl_multiturn.workspaces.settings import ANSWER_GRACE_S, WorkspaceSettings

T = TypeVar("T")
logger = logging.getLogger(__name__)
FOLDER = "/tmp/workspace"
"""The folder of a workspace, as commands see it."""
MAX_COMMAND_BYTES = 90_000
"""Length of the longest command, in bytes of UTF-8."""
MAX_FILES_BYTES = 32 * 2**20
"""Length of the longest tar that `get` asks for, where its caller does not name another one."""
_COMPILED = marshal.dumps(
    compile(Path(__file__).with_name("driver.py").read_text(encoding="utf-8"), "<driver>", "exec")
)
_DRIVER = f"import base64, marshal\nexec(marshal.loads(base64.b64decode({base64.b64encode(_COMPILED)!r})))"
"""The driver as a cell. It is compiled here, once: in each workspace that would take longer than all else."""
_UPLOAD_BYTES = MAX_COMMAND_BYTES
_PIECES_S = 10 * ANSWER_GRACE_S
"""Seconds for all pieces of an answer together: a driver that a command has written into may take its time."""
_SHELL = "/bin/bash"
_DEAF = "it no longer answers"
_GIVEN_UP = "nobody waits for this any more"
_NOT_RUN = 126
"""Exit status of a command that cannot be started, as in a shell."""
_ENVIRONMENT = {
    "PWD": FOLDER,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PYTHONUNBUFFERED": "1",  # so that a command that is late shows its output
}


class WorkspaceError(MultiTurnError, RuntimeError):
    """A program has ended its workspace, or its files cannot be read: not an outage. The text is for a model."""


@dataclass(frozen=True)
class CommandResult:
    """Result of one command. All of it is the word of the workspace.

    Attributes:
        output: Its standard output and error, shortened.
        exit_code: Exit status of its shell, 128 + N after signal N; None where the shell did not end by itself.
        timed_out: Whether it was late.
        stopped: None while the workspace lives on; otherwise the reason of its end, in words for the model.
    """

    output: str
    exit_code: int | None = None
    timed_out: bool = False
    stopped: str | None = None


class Workspace:
    """A folder and a shell; `WorkspacePool.open` makes it, and `close` ends it.

    Args:
        sandbox: A sandbox that has run no code yet.
        settings: The settings.
    """

    def __init__(self, sandbox: Sandbox, settings: WorkspaceSettings) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._lock = asyncio.Lock()
        self._is_untouched = True
        """False from the first command on, or from `close`: until then, only a failure of ours can end it."""
        self._is_given_up = False
        """True while the driver shall end its work, since its caller is gone."""

    @property
    def stopped(self) -> str | None:
        """None while the workspace lives; otherwise the reason of its end, in words for the model."""
        reason = self._sandbox.stopped
        return None if reason is None else _in_words(reason)

    async def run(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command of bash, and return its output and how it ended.

        When the call is cancelled, the command ends, with all other processes of the workspace; the files stay.

        Args:
            command: The command, of one line or many; at most `MAX_COMMAND_BYTES`.
            timeout_s: Seconds for it; None for the settings'.
            cwd: The folder that it starts in, absolute or seen from the workspace's folder; None for that.
            env: Variables, beside those that are there.

        Raises:
            ConfigError: `timeout_s` is not above 0, or above the settings' `longest_timeout_s`.
            SandboxError: The pool has failed, or was closed.
        """
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        longest_s = max(self._settings.timeout_s, self._settings.longest_timeout_s)
        if not 0 < limit_s <= longest_s:
            raise ConfigError(f"timeout_s {limit_s!r} of a command: expected a number above 0, at most {longest_s:g}")
        variables = dict(env or {})
        if problem := _cannot_run(command, cwd or "", variables):
            return CommandResult(f"bash: {problem}\n", _NOT_RUN, stopped=self.stopped)
        self._is_untouched = self._is_untouched and self.stopped is not None
        request = {
            "command": command,
            "cwd": cwd or "",
            "environment": variables,
            "timeout_s": limit_s,
            "kept": 4 * (self._settings.output_characters // 2),  # a character has at most four bytes in UTF-8
        }
        try:
            header, body = await self._alone(self._fetch("run", request, limit_s))
        except WorkspaceError as error:
            return CommandResult("", stopped=str(error))
        output = BoundedOutput(self._settings.output_characters)
        output.add(body)
        output.total = max(len(body), _number(header, "total"))
        text = output.take()
        if header.get("made_room") is True:
            text = "[no further process could start, so all that were left have been ended]\n" + text
        if header.get("flooded") is True:
            text += f"\n[the command was stopped: it printed more than {FLOOD_BYTES // 2**20} MB]\n"
        _tell_unended(header)
        code = header.get("exit_code")
        return CommandResult(text, code if type(code) is int else None, header.get("timed_out") is True)

    async def put(self, tar: bytes, path: str = ".") -> None:
        """Unpack a tar inside the workspace. Nothing is unpacked on the host.

        Args:
            tar: The tar, compressed or not. A leading `/` of a name is cut off, and a name that leads out of `path` is
                an error.
            path: The folder for it, absolute or seen from the workspace's folder; made if it is not there.

        Raises:
            WorkspaceError: The workspace has ended, or the tar cannot be unpacked: it is none, or the disk is full.
            SandboxError: The pool has failed, or was closed.
        """
        most = self._settings.memory_mb * 2**20 // 4
        if len(tar) > most:
            raise WorkspaceError(f"the tar has {len(tar)} bytes; a quarter of memory_mb, {most}, is allowed")
        header = await self._alone(self._put(tar, path))
        if "error" in header:
            raise WorkspaceError(f"the files cannot be unpacked into {path!r}: {str(header['error'])[:500]}")

    async def _put(self, tar: bytes, path: str) -> dict[str, Any]:
        await self._call("begin_upload()", ANSWER_GRACE_S)
        for start in range(0, len(tar), _UPLOAD_BYTES):
            data = base64.b64encode(tar[start : start + _UPLOAD_BYTES]).decode()
            await self._call(f"upload({data!r})", ANSWER_GRACE_S)
        return (await self._fetch("unpack", {"path": path}, ANSWER_GRACE_S))[0]

    async def get(self, *paths: str, path: str = ".", max_bytes: int = MAX_FILES_BYTES) -> bytes:
        """Return a tar of files, made inside the workspace; read it with `tars.read_tar`, and never unpack it.

        A file that is not there, or cannot be read, is not in the tar.

        Args:
            paths: Files and folders, seen from `path`; without any, all that is in `path`.
            path: A folder, absolute or seen from the workspace's folder.
            max_bytes: Length of the longest tar.

        Raises:
            WorkspaceError: The workspace has ended, or the tar would be too long.
            SandboxError: The pool has failed, or was closed.
        """
        request = {"path": path, "names": list(paths) or ["."], "most": max_bytes}
        header, body = await self._alone(self._fetch("pack", request, ANSWER_GRACE_S, max_bytes))
        if "error" in header:
            raise WorkspaceError(f"the files are {str(header['error'])[:100]}: more than {max_bytes} bytes")
        return body

    async def end_processes(self) -> None:
        """End every process of earlier commands, against its resistance; the files stay.

        Raises:
            WorkspaceError: The workspace has ended.
            SandboxError: The pool has failed, or was closed.
        """
        header, _ = await self._alone(self._fetch("end_processes", {}, 0.0))
        _tell_unended(header)

    def close(self) -> None:
        """End the workspace at once, with its processes and files; do nothing if it has ended."""
        self._is_untouched = False
        self._sandbox.kill("the workspace was closed")

    async def wait_gone(self) -> None:
        """Wait until no process of the workspace remains; only after it has ended."""
        await self._sandbox.wait_gone()

    async def __aenter__(self) -> Workspace:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        await self.wait_gone()

    async def set_up(self) -> None:
        """Send the driver; only `WorkspacePool.open` calls this, once.

        Raises:
            SandboxError: The sandbox ended meanwhile.
        """
        request = _encoded({"folder": FOLDER, "environment": _ENVIRONMENT})
        result = await self._sandbox.run(f"{_DRIVER}\nset_up({request!r})", with_value=True)
        if not result.value:
            self.close()
            raise SandboxError(f"a workspace cannot be prepared: {result.stopped or result.output[-500:]}")

    async def _alone(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work with the driver, one caller at a time.

        A cancellation must not end the sandbox in the middle of a cell. So it makes the driver give its work up, and
        the next caller waits until it has.
        """
        try:
            await self._lock.acquire()
        except BaseException:  # a cancellation, too: it goes on
            work.close()
            raise
        self._is_given_up = False
        working = asyncio.ensure_future(work)
        working.add_done_callback(lambda _: self._lock.release())
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if not working.done():
                self._is_given_up = True
                self._sandbox.interrupt()
                late = asyncio.get_running_loop().call_later(ANSWER_GRACE_S, self._sandbox.kill, _DEAF)
                working.add_done_callback(lambda _: late.cancel())
                keep(working)
            raise

    async def _fetch(
        self, function: str, request: Mapping[str, Any], limit_s: float, most: int | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Call a function of the driver, and return the header and the body of its whole answer."""
        value = await self._call(f"{function}({_encoded(request)!r})", limit_s + ANSWER_GRACE_S)
        line, _, first = value.partition(b"\n")
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise self._spoilt()
        length = _number(header, "bytes")
        longest = 8 * self._settings.output_characters if most is None else most
        body = bytearray(first)
        now = asyncio.get_running_loop().time
        deadline = now() + _PIECES_S
        while len(body) < length <= longest:
            more = await self._call(f"piece({len(line) + 1 + len(body)})", min(ANSWER_GRACE_S, deadline - now()))
            if len(more) != min(PIECE_BYTES, length - len(body)):
                raise self._spoilt()
            body += more
        if len(body) != length:
            raise self._spoilt()
        return header, bytes(body)

    async def _call(self, code: str, limit_s: float) -> bytes:
        """Run a cell of ours, and return its value.

        Raises:
            WorkspaceError: The workspace has ended.
            SandboxError: The pool has failed, or was closed.
        """
        if self._is_given_up:
            raise WorkspaceError(_GIVEN_UP)
        late = asyncio.get_running_loop().call_later(limit_s, self._sandbox.kill, _DEAF)
        try:
            result = await self._sandbox.run(code, with_value=True)
        finally:
            late.cancel()
        if result.stopped is not None:
            if self._sandbox.is_lost or self._is_untouched:
                raise SandboxError(f"a workspace is lost: {result.stopped}")
            raise WorkspaceError(_in_words(result.stopped))
        if self._is_given_up:
            raise WorkspaceError(_GIVEN_UP)
        if not result.value:
            raise self._spoilt()
        return result.value

    def _spoilt(self) -> WorkspaceError:
        """End the workspace, whose driver broke the protocol; return the error that reports it."""
        self._sandbox.kill("a command spoilt the process that starts the commands")
        return WorkspaceError(_in_words(self._sandbox.stopped or ""))


def check(settings: WorkspaceSettings) -> None:
    """Check that workspaces work on this machine, by starting a sandbox of them; once per process and settings.

    Args:
        settings: The settings of the workspaces.

    Raises:
        ConfigError: They do not work here; the text has the reason and the remedy.
        SandboxError: As in `launch.check`.
    """
    if not os.access(_SHELL, os.X_OK):
        raise ConfigError(f"a workspace needs {_SHELL!r}, which is not there; install bash")
    check_sandbox(settings.of_sandbox())


class WorkspacePool:
    """A pool of workspaces with the same settings, on one event loop.

    Args:
        settings: The settings of every workspace.
    """

    def __init__(self, settings: WorkspaceSettings) -> None:
        self._settings = settings
        self._pool = SandboxPool(settings.of_sandbox(), spares_worker=True)

    async def open(self) -> Workspace:
        """Return a new workspace; the caller ends it with `close`.

        Raises:
            SandboxError: No workspace could be started.
        """
        workspace = Workspace(await self._pool.acquire(), self._settings)
        try:
            await workspace.set_up()
        except BaseException:  # also a cancellation: it would stay open otherwise
            workspace.close()
            raise
        return workspace

    async def aclose(self) -> None:
        """End every workspace, and return when no process, descriptor or folder remains."""
        await self._pool.aclose()

    def close_now(self) -> None:
        """Kill every workspace at once, without an await; for where the event loop has ended."""
        self._pool.close_now()

    async def __aenter__(self) -> WorkspacePool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _cannot_run(command: str, cwd: str, variables: Mapping[str, str]) -> str:
    """Return why a command cannot be handed over, in words for the model; empty if it can."""
    if any("\0" in text for text in (command, cwd)):
        return "a command cannot hold a NUL character"
    if problem := not_variables(variables):
        return problem
    size = len(json.dumps([command, cwd, variables], ensure_ascii=False).encode("utf-8", "replace"))
    if size > MAX_COMMAND_BYTES:
        return f"the command has {size} bytes; at most {MAX_COMMAND_BYTES} are allowed, write longer files in parts"
    return ""


def not_variables(variables: Mapping[str, str]) -> str:
    """Return why a command cannot have these variables; empty if it can."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            return f"the variable {name!r}: expected a name, without '=', and no NUL character in name or value"
    return ""


def _encoded(request: Mapping[str, Any]) -> str:
    text = base64.b64encode(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace")).decode()
    assert len(text) < MAX_CODE_BYTES
    return text


def _number(header: Mapping[str, Any], name: str) -> int:
    value = header.get(name)
    return value if type(value) is int and value >= 0 else 0


def _tell_unended(header: Mapping[str, Any]) -> None:
    """Warn of processes that were killed and are still there."""
    if unended := header.get("unended"):
        logger.warning(
            "processes of a workspace were killed, and were still there after 10 s: %s; they hold its memory until the "
            "kernel lets them go. Look what they wait for, such as a disk that hangs",
            show(unended, 500),
        )


def _in_words(reason: str) -> str:
    """Return why a workspace ended, in words for the model, from its sandbox's reason."""
    return "the workspace ended: " + reason.replace("the Python process", "the process that starts the commands")
