"""One sandbox, seen from the parent: cells in, text out.

Invariant: the only trusted word about a sandbox is its supervisor's; what the code prints is text. No more than
`FLOOD_BYTES` of output are read for one cell, and no more of it kept than is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from verl_multiturn.sandbox.cell import NONCE_BYTES, PACKET_BYTES
from verl_multiturn.sandbox.groups import Group
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.output import Output
from verl_multiturn.sandbox.settings import SandboxSettings
from verl_multiturn.sandbox.supervisor import DONE, MAX_OPEN_FILES

FLOOD_BYTES = 8 * 2**20
MAX_CODE_BYTES = PACKET_BYTES - NONCE_BYTES


@dataclass(frozen=True)
class CellResult:
    """What a cell did.

    Attributes:
        output: what it printed, the value of its last expression, its error; shortened.
        stopped: None when the sandbox lives on; else why it ended, in words for the model.
    """

    output: str
    stopped: str | None = None


class Sandbox:
    """State that survives from one `run` to the next, until one of them ends it or `kill` does.

    Args:
        settings: its limits.
        number: its name between the parent and the zygote.
        on_change: called when it is ready, and when it has ended.
        group: its control group, where there is one.

    Attributes:
        number: as given.
        stopped: None while it lives; else why it ended, in words for the model.
        is_ready: whether it takes cells.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        number: int,
        on_change: Callable[[Sandbox], None],
        group: Group | None = None,
    ) -> None:
        self._settings = settings
        self.number = number
        self._on_change = on_change
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._output = Output(settings.output_characters)
        self._done: asyncio.Future[None] | None = None
        self.stopped: str | None = None
        self.is_ready = False
        self._gone = asyncio.Event()
        self._output_fd, self._their_output_fd = os.pipe()
        try:
            self._control, self._their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            os.close(self._output_fd)
            os.close(self._their_output_fd)
            raise
        self._control.setblocking(False)
        os.set_blocking(self._output_fd, False)
        self._loop.add_reader(self._control, self._on_control)
        self._loop.add_reader(self._output_fd, self._on_output)

    @property
    def guest_fds(self) -> list[int]:
        """What the zygote is sent."""
        return [self._their_control.fileno(), self._their_output_fd, *(self._group.fds if self._group else [])]

    def close_guest_fds(self) -> None:
        """The zygote has them, or never will."""
        self._their_control.close()
        if self._group is not None:
            self._group.close_fds()
        if self._their_output_fd >= 0:
            os.close(self._their_output_fd)
            self._their_output_fd = -1

    async def run(self, code: str) -> CellResult:
        """Run one cell. When that ends the sandbox, no process of it is left; cancelled, it kills the sandbox.

        Raises:
            ValueError: the code is too long.
            SandboxError: a cell is still running.
        """
        encoded = code.encode("utf-8", "replace")
        if len(encoded) > MAX_CODE_BYTES:
            raise ValueError(f"the code has {len(encoded)} bytes; at most {MAX_CODE_BYTES} are allowed")
        if self._done is not None:
            raise SandboxError("a sandbox runs one cell at a time")
        if self.stopped is None:
            await self._run(encoded)
        if self.stopped is not None:
            await self.wait_gone()
        return CellResult(self._output.take(), self.stopped)

    async def _run(self, code: bytes) -> None:
        self._done = self._loop.create_future()
        try:
            self._control.send(os.urandom(NONCE_BYTES) + code)
            async with asyncio.timeout(self._settings.timeout_s):
                await self._done
        except TimeoutError:
            self._end(f"the code was stopped after {self._settings.timeout_s:g} s")
        except OSError as error:
            self._end(f"the sandbox is lost: {error}")
        except BaseException:  # a cancellation too: the code does not go on, then raised
            self.kill()
            raise
        finally:
            self._done = None

    def kill(self, reason: str = "the sandbox was closed") -> None:
        """End it at once."""
        self._end(reason)

    @property
    def is_gone(self) -> bool:
        """Whether none of its processes is left."""
        return self._gone.is_set()

    async def wait_gone(self) -> None:
        """Wait until none of its processes is left."""
        await self._gone.wait()

    def set_gone(self) -> None:
        """The zygote has waited for the last process."""
        for _ in range(2):  # the supervisor's last words may still lie in the socket: `done`, `end`
            if self.stopped is None:
                self._on_control()
        self.kill("the sandbox is lost: it ended without a word")
        self.remove_group()
        self._gone.set()

    def remove_group(self) -> None:
        """None of its processes is left in there."""
        if self._group is not None:
            self._group.remove()

    def _on_control(self) -> None:
        try:
            packet = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet == DONE:
            self._read_output()
            if self.is_ready:
                self._wake()
            elif self.stopped is None:
                self.is_ready = True
                self._on_change(self)
        else:
            reason = packet.decode("utf-8", "replace").removeprefix("end ")
            self._end(self._in_words(reason))

    def _on_output(self) -> None:
        try:
            chunk = os.read(self._output_fd, 65536)
        except BlockingIOError:
            return
        self._output.add(chunk)
        if not chunk:
            self._loop.remove_reader(self._output_fd)
        elif self._output.total > FLOOD_BYTES:
            self._end(f"the code was stopped: it printed more than {FLOOD_BYTES // 2**20} MB")

    def _read_output(self) -> None:
        """What lies in the pipe; the code that wrote it has ended, or does not matter."""
        with contextlib.suppress(BlockingIOError):
            while self.stopped is None and self._output.total <= FLOOD_BYTES:
                chunk = os.read(self._output_fd, 65536)
                if not chunk:
                    return
                self._output.add(chunk)

    def _wake(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _end(self, reason: str) -> None:
        if self.stopped is not None:
            return
        self._read_output()
        self.stopped = reason
        self.close_files()
        self._wake()
        self._on_change(self)

    def close_files(self) -> None:
        """Give our descriptors back; the supervisor ends when it sees that."""
        if self._output_fd < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._control)
            self._loop.remove_reader(self._output_fd)
        self._control.close()
        os.close(self._output_fd)
        self._output_fd = -1
        self.close_guest_fds()

    def _in_words(self, reason: str) -> str:
        kind, _, detail = reason.partition(" ")
        settings = self._settings
        if kind == "memory":
            return f"the code was stopped: it used more than {settings.memory_mb} MB of memory"
        if kind == "processes":
            return f"the code was stopped: it started more than {settings.processes} processes and threads"
        if kind == "files":
            return f"the code was stopped: it had more than {MAX_OPEN_FILES} files, pipes and sockets open"
        if kind == "cpu":
            return f"the code was stopped after {settings.cpu_s} s of CPU time"
        if kind == "exit":
            return f"the Python process ended with exit code {detail}"
        if kind == "signal":
            with contextlib.suppress(ValueError):
                detail = signal.Signals(int(detail)).name
            return f"the Python process was killed by signal {detail}"
        return f"the sandbox is lost: {reason or 'it ended without a word'}"
