"""Pool of sandboxes for one event loop. Some are kept ready; each one serves one conversation only.

    async with SandboxPool(settings) as pool:
        sandbox = await pool.acquire()
        result = await sandbox.run("print(1 + 1)")     # may be called many times: variables stay
        sandbox.kill()

Why a zygote: to start bubblewrap and a fresh Python costs 30 ms for each call, more with packages. Here both are
started once, in a process that never runs untrusted code: the zygote (`zygote.py`). A sandbox is two forks of the
zygote and costs a few milliseconds:
- the supervisor (`supervisor.py`) makes new namespaces (pid, mount, network, ipc, uts, cgroup) and a private file
  system;
- the worker (`confine.py`) runs the code, in a user namespace below the supervisor's and without rights.

A sandbox serves one conversation. A one-shot call is a sandbox that is killed after one cell. So two conversations
share no process, no writable file, no socket and no variable. They share read-only files, and the modules that the
zygote had loaded.

Remaining risks, since all sandboxes run on one kernel (docs/reference/sandbox-limits.md):
- conversations can notice each other through load, and through locks on read-only files that both see;
- the address spaces of all sandboxes have the same layout;
- kernel memory other than that of pipes and sockets is bounded by time only;
- the supervisor looks every 20 ms, so it sees growth in between only at the next look.

Invariants:
- a conversation never gets a sandbox that ran code before;
- every await can be cancelled: `run` then kills its sandbox, and `acquire` leaves the sandbox to the next caller;
- all work is done by callbacks on the event loop that uses the pool: no threads, no tasks;
- a pool that is dropped without `aclose` is closed by the garbage collector or at the interpreter's exit.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import weakref
from collections import deque
from contextlib import nullcontext, suppress
from types import TracebackType

from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.processes.resumption import kept_running
from verl_multiturn.sandbox.control_groups import make_group
from verl_multiturn.sandbox.launch import Launch, SandboxError
from verl_multiturn.sandbox.sandbox import Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings

_STARTING = 8
"""Largest number of sandboxes that are being started at the same time."""
_CLOSE_S = 30.0
"""Seconds that `aclose` waits for the zygote to end by itself before it is killed."""


class SandboxPool:
    """A pool of sandboxes with the same settings.

    The first `acquire` on an event loop starts the zygote. A later one starts it again, if the zygote died. Processes
    of a closed event loop are ended when the pool is used on another one.

    Args:
        settings: The settings of every sandbox of the pool.
        spares_worker: Whether a limit of memory, processes or files that is exceeded ends the other processes of a
            sandbox first, and the sandbox only where that does not help. For a worker that runs no code of a model.
    """

    def __init__(self, settings: SandboxSettings, *, spares_worker: bool = False) -> None:
        self._settings = settings
        self._spares_worker = spares_worker
        self._zygotes = PerLoop(_PoolZygote.aclose, _PoolZygote.close_now)

    async def acquire(self) -> Sandbox:
        """Return a sandbox that has run no code yet; the caller ends it with `kill`.

        Raises:
            SandboxError: No sandbox could be started.
        """
        kept = self._zygotes.get(_PoolZygote)
        async with kept.start_lock:
            zygote = kept.zygote
            if zygote is None or zygote.failed:
                kept.close_now()
                zygote = kept.zygote = await _RunningZygote.start(self._settings, self._spares_worker)
                # The zygote holds no reference to the pool, so the garbage collector finds a dropped pool.
                kept.finalizer = weakref.finalize(self, zygote.close_now)
        return await zygote.acquire()

    async def aclose(self) -> None:
        """End every sandbox, and return when no process, descriptor or folder remains."""
        for kept in self._zygotes.everywhere():
            await kept.aclose()

    def close_now(self) -> None:
        """Kill every sandbox at once, without an await; blocks for the milliseconds that this takes.

        Use it where the event loop has ended; elsewhere `aclose`.
        """
        for kept in self._zygotes.everywhere():
            kept.close_now()

    async def __aenter__(self) -> SandboxPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _PoolZygote:
    """The zygote that a pool has on one event loop; None: it is started when a sandbox is requested."""

    def __init__(self) -> None:
        self.loop, self.start_lock = asyncio.get_running_loop(), asyncio.Lock()
        self.zygote: _RunningZygote | None = None
        self.finalizer: weakref.finalize[[], SandboxPool] | None = None

    async def aclose(self) -> None:
        is_ours = self.loop is asyncio.get_running_loop()
        async with self.start_lock if is_ours else nullcontext():  # a zygote that is being started is closed, too
            if self.zygote is not None:
                await self.zygote.aclose()
            self.close_now()

    def close_now(self) -> None:
        if self.finalizer is not None:
            self.finalizer()
        self.zygote = None


class _RunningZygote:
    """A running zygote and the sandboxes that it forked.

    A sandbox is in one of these places, and in `_sandboxes` until it is gone:

        _outbox ("spawn") → _starting → _ready → the caller of `acquire`, who waited in `_waiting` if none was ready
    """

    def __init__(self, settings: SandboxSettings, launch: Launch, spares_worker: bool) -> None:
        self._settings = settings
        self._spares_worker = spares_worker
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._process_id = os.getpid()
        self._numbers = itertools.count()
        self._sandboxes: dict[int, Sandbox] = {}
        self._starting: set[Sandbox] = set()
        self._ready: deque[Sandbox] = deque()
        self._waiting: deque[asyncio.Future[Sandbox]] = deque()
        self._outbox: deque[tuple[bytes, Sandbox | None]] = deque()
        self.failed = ""
        """Reason why this zygote takes no more requests; empty while it takes some."""
        launch.channel.setblocking(False)
        self._loop.add_reader(launch.channel, self._on_packet)

    @classmethod
    async def start(cls, settings: SandboxSettings, spares_worker: bool) -> _RunningZygote:
        try:
            launch = Launch(settings, spares_worker)
        except OSError as error:  # no free descriptor, process or memory
            raise SandboxError(f"no sandbox could be started: {error}") from error
        try:
            if launch.info_fd is not None:
                await _readable(launch.info_fd)
                launch.let_go()
            await _readable(launch.channel.fileno())
            packet = launch.channel.recv(4096)
            if packet != b"ready":
                raise SandboxError(packet.decode("utf-8", "replace") or launch.problem())
            return cls(settings, launch, spares_worker)
        except BaseException:  # also when cancelled: leave no process behind
            launch.close()
            raise

    async def acquire(self) -> Sandbox:
        if self.failed:
            raise SandboxError(self.failed)
        if self._ready:
            sandbox = self._ready.popleft()
            self._start_more()
            return sandbox
        waiter: asyncio.Future[Sandbox] = self._loop.create_future()
        self._waiting.append(waiter)
        self._start_more()
        try:
            with kept_running(self._launch.process):  # unprotected code may stop the zygote
                return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.cancelled() and waiter.exception() is None:
                self._offer(waiter.result())
            raise

    def _start_more(self, spare: int | None = None) -> None:
        """Start a sandbox for each waiting caller, and `spare` more (None: `settings.pool`) to keep ready."""
        wanted = len(self._waiting) + (self._settings.pool if spare is None else spare)
        while len(self._starting) < _STARTING and len(self._starting) + len(self._ready) < wanted:
            group = make_group(self._settings, self._spares_worker)
            try:
                sandbox = Sandbox(self._settings, next(self._numbers), self._on_change, group)
            except OSError as error:  # no descriptor is free; sandboxes that end give theirs back
                if group is not None:
                    group.remove()
                self._refuse(f"cannot start a sandbox: {error}")
                return
            self._sandboxes[sandbox.number] = sandbox
            self._starting.add(sandbox)
            self._send(b"spawn %d" % sandbox.number, sandbox)

    def _on_change(self, sandbox: Sandbox) -> None:
        if self.failed:
            return
        if sandbox.stopped is None:
            self._starting.discard(sandbox)
            self._offer(sandbox)
            self._start_more()
            return
        self._send(b"kill %d" % sandbox.number)
        if sandbox in self._ready:
            self._ready.remove(sandbox)
        elif sandbox in self._starting:
            self._starting.discard(sandbox)
            self._refuse(sandbox.stopped)
            self._start_more(spare=0)  # only for waiting callers: a start may never succeed

    def _offer(self, sandbox: Sandbox) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(sandbox)
                return
        self._ready.append(sandbox)

    def _refuse(self, reason: str) -> None:
        if self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(SandboxError(reason))

    def _send(self, packet: bytes, sandbox: Sandbox | None = None) -> None:
        if not self.failed:
            self._outbox.append((packet, sandbox))
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            packet, sandbox = self._outbox[0]
            try:
                if sandbox is None:
                    self._launch.channel.send(packet)
                elif sandbox.stopped is None:
                    socket.send_fds(self._launch.channel, [packet], sandbox.guest_fds)
            except BlockingIOError:
                self._loop.add_writer(self._launch.channel, self._flush)
                return
            except OSError as error:
                self._fail(f"the zygote is lost: {error}")
                return
            self._outbox.popleft()
            if sandbox is not None:
                sandbox.close_guest_fds()
                if sandbox.stopped is not None:  # killed before the zygote heard of it
                    self._gone(sandbox.number)
        self._loop.remove_writer(self._launch.channel)

    def _on_packet(self) -> None:
        try:
            packet = self._launch.channel.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._fail(f"the zygote is lost: {self._launch.problem()}")
            return
        self._gone(int(packet.split()[1]))

    def _gone(self, number: int) -> None:
        self._sandboxes.pop(number).set_gone()

    def _fail(self, reason: str) -> None:
        """Give up everything, since the zygote has ended and all that it forked with it."""
        self._end(self._let_go(reason))

    def close_now(self) -> None:
        if not self.failed and os.getpid() == self._process_id:  # a fork of our process owns none of this
            self._end(self._let_go("the pool was closed"))

    async def aclose(self) -> None:
        if self.failed:
            return
        sandboxes = self._let_go("the pool was closed")
        try:
            # The zygote ends when the channel closes. bubblewrap ends after the last process of the namespace.
            process_fd = os.pidfd_open(self._launch.process.pid)
            try:
                with suppress(OSError):  # it has ended
                    self._launch.channel.shutdown(socket.SHUT_RDWR)  # a fork of our process may have a copy
                self._launch.channel.close()
                async with asyncio.timeout(_CLOSE_S):
                    await _readable(process_fd)
            finally:
                os.close(process_fd)
        except TimeoutError:
            pass
        finally:
            self._end(sandboxes)

    def _end(self, sandboxes: list[Sandbox]) -> None:
        """Kill the zygote if it has not ended by itself, and mark its sandboxes as gone."""
        self._launch.close()
        for sandbox in sandboxes:
            if self._loop.is_closed():
                sandbox.remove_group()
            else:
                sandbox.set_gone()

    def _let_go(self, reason: str) -> list[Sandbox]:
        """Close our descriptors, remove our callbacks, refuse all waiting callers; return the sandboxes so far."""
        self.failed = reason
        sandboxes = list(self._sandboxes.values())
        self._sandboxes.clear()
        self._outbox.clear()
        if self._loop.is_closed():  # no callback can run any more
            for sandbox in sandboxes:
                sandbox.close_files()
            return sandboxes
        self._loop.remove_reader(self._launch.channel)
        self._loop.remove_writer(self._launch.channel)
        for sandbox in sandboxes:
            sandbox.kill(reason, is_lost=True)
        while self._waiting:
            self._refuse(reason)
        return sandboxes


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    event: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if event.done() else event.set_result(None))
    try:
        await event
    finally:
        loop.remove_reader(fd)
