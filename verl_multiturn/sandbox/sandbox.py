"""One sandbox as the parent process sees it: cells go in, text comes out, and a value where a cell is to have one.

Invariants:
- only the supervisor's packets give the state of a sandbox; the code's output is text and nothing else;
- a cell's value comes with the packet that ends the cell, and never from its output. A cell that did not
  come to its end has none;
- a packet about another cell than the last one that was sent counts for nothing;
- not much more than `FLOOD_BYTES` of output are read for one cell, and only the part that is shown is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from verl_multiturn.sandbox.control_groups import ControlGroup
from verl_multiturn.sandbox.guest.cell import NONCE_BYTES, PACKET_BYTES, PLAIN, VALUE_BYTES, WITH_VALUE
from verl_multiturn.sandbox.guest.supervisor import DONE, MAX_OPEN_FILES, MAX_WATCHES
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.output import BoundedOutput
from verl_multiturn.sandbox.settings import SandboxSettings

FLOOD_BYTES = 8 * 2**20
"""Bytes of output after which a cell is stopped."""
MAX_CODE_BYTES = PACKET_BYTES - NONCE_BYTES - 1
"""Length of the longest code of one cell, in bytes of UTF-8."""


@dataclass(frozen=True)
class CellResult:
    """Result of one cell.

    Attributes:
        output: The text that the cell printed, the value of its last expression and its error, shortened.
        stopped: None while the sandbox lives on; otherwise the reason of its end, in words for the model.
        value: The value of the cell, if one was requested and it came to its end; otherwise empty.
    """

    output: str
    stopped: str | None = None
    value: bytes = b""


class Sandbox:
    """A Python process whose variables and files stay from one `run` to the next, until a cell or `kill` ends it.

    Args:
        settings: The limits of the sandbox.
        number: The number by which the parent and the zygote name the sandbox.
        on_change: Called when the sandbox is ready, and when it has ended.
        group: The control group of the sandbox, where there is one.

    Attributes:
        number: As given.
        stopped: None while the sandbox lives; otherwise the reason of its end, in words for the model.
        is_lost: True once it ended with the pool or its zygote, whatever ran in it.
        is_ready: True once the sandbox takes cells.

    Raises:
        OSError: No descriptor remains.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        number: int,
        on_change: Callable[[Sandbox], None],
        group: ControlGroup | None = None,
    ) -> None:
        self._settings = settings
        self.number = number
        self._on_change = on_change
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._output = BoundedOutput(settings.output_characters)
        self._value = b""
        self._done: asyncio.Future[None] | None = None
        self._nonce = b""
        self.stopped: str | None = None
        self.is_lost = False
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
        """Descriptors that the zygote gets: the control socket, the pipe for the output, those of the group."""
        return [self._their_control.fileno(), self._their_output_fd, *(self._group.fds if self._group else [])]

    def close_guest_fds(self) -> None:
        """Close our copies of `guest_fds`: the zygote has its own, or will never get any."""
        self._their_control.close()
        if self._group is not None:
            self._group.close_fds()
        if self._their_output_fd >= 0:
            os.close(self._their_output_fd)
            self._their_output_fd = -1

    async def run(self, code: str, *, with_value: bool = False) -> CellResult:
        """Run one cell.

        If the cell ends the sandbox, or if the sandbox had ended before, this returns when no process of it remains. If
        this is cancelled, it kills the sandbox.

        Args:
            code: The source of the cell; at most `MAX_CODE_BYTES` in UTF-8.
            with_value: Ask for the value of the last expression, a `bytes` object of at most `VALUE_BYTES`, instead of
                printing it. It is the word of whatever code runs in this sandbox.

        Returns:
            The output, the value, and why the sandbox ended if it did.

        Raises:
            ValueError: The code is too long.
            SandboxError: Another cell is still running.
        """
        encoded = code.encode("utf-8", "replace")
        if len(encoded) > MAX_CODE_BYTES:
            raise ValueError(f"the code has {len(encoded)} bytes; at most {MAX_CODE_BYTES} are allowed")
        if self._done is not None:
            raise SandboxError("a sandbox runs one cell at a time")
        if self.stopped is None:
            await self._run((WITH_VALUE if with_value else PLAIN) + encoded)
        if self.stopped is not None:
            await self.wait_gone()
            return CellResult(self._output.take(), self.stopped)
        return CellResult(self._output.take(), value=self._value if with_value else b"")

    async def _run(self, packet: bytes) -> None:
        self._done = self._loop.create_future()
        try:
            self._send(packet)
            async with asyncio.timeout(self._settings.timeout_s):
                await self._done
        except TimeoutError:
            self._end(f"the code was stopped after {self._settings.timeout_s:g} s")
        except OSError as error:
            self._end(f"the sandbox is lost: {error}")
        except BaseException:  # also when cancelled: the code must not go on
            self.kill()
            raise
        finally:
            self._done = None

    def _send(self, packet: bytes) -> None:
        self._nonce = os.urandom(NONCE_BYTES)
        self._control.send(self._nonce + packet)

    def interrupt(self) -> None:
        """Send an empty cell behind the one that runs; do nothing when none runs.

        A cell that watches its channel can so learn that it shall end. Its value is lost: `run` returns after the empty
        cell. Any other cell runs on, and `run` waits for both.
        """
        if self._done is not None and not self._done.done() and self.stopped is None:
            with contextlib.suppress(OSError):  # it has ended, or reads nothing: its time limit will end it
                self._send(PLAIN)

    def kill(self, reason: str = "the sandbox was closed", *, is_lost: bool = False) -> None:
        """End the sandbox at once; do nothing if it has ended.

        Args:
            reason: The value of `stopped` from now on.
            is_lost: The value of the attribute `is_lost` from now on.
        """
        if self.stopped is None:
            self.is_lost = is_lost
        self._end(reason)

    @property
    def is_gone(self) -> bool:
        """True once no process of the sandbox remains."""
        return self._gone.is_set()

    async def wait_gone(self) -> None:
        """Wait until no process of the sandbox remains."""
        await self._gone.wait()

    def set_gone(self) -> None:
        """Note that no process of the sandbox remains: the zygote has waited for the last one."""
        for _ in range(2):  # the supervisor's last packets may still lie in the socket: `done`, `end`
            if self.stopped is None:
                self._on_control()
        self.kill("the sandbox is lost: it ended without a word")
        self.remove_group()
        self._gone.set()

    def remove_group(self) -> None:
        """Remove the control group, in which no process remains; do nothing without a group."""
        if self._group is not None:
            self._group.remove()

    def _on_control(self) -> None:
        try:
            packet = self._control.recv(len(DONE) + NONCE_BYTES + VALUE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet.startswith(DONE):
            nonce, value = packet[len(DONE) :][:NONCE_BYTES], packet[len(DONE) + NONCE_BYTES :]
            self._read_output()
            if self.is_ready and nonce == self._nonce:
                self._value = value
                self._wake()
            elif not self.is_ready and self.stopped is None:
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
        """Read the rest in the pipe of the output."""
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
        """Close our descriptors; the supervisor ends when it sees its control socket closed."""
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
        if kind == "watches":
            return f"the code was stopped: it watched more than {MAX_WATCHES} files by epoll"
        if kind == "cpu":
            return f"the code was stopped after {settings.cpu_s} s of CPU time"
        if kind == "exit":
            return f"the Python process ended with exit code {detail}"
        if kind == "signal":
            with contextlib.suppress(ValueError):
                detail = signal.Signals(int(detail)).name
            return f"the Python process was killed by signal {detail}"
        return f"the sandbox is lost: {reason or 'it ended without a word'}"
