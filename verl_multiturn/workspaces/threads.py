"""`open_workspace`: a workspace for code that runs in a thread and knows no event loop, such as an agent.

One thread of this process has an event loop, and on it the pools, one for each distinct settings. The other threads ask
it, and wait.

Invariants:
- any number of threads may open workspaces, and several may use one;
- a thread that waits can be interrupted: an exception that is raised in it (`ThreadRunner.interrupt`) comes through
  within `_SLICE_S`, ends the command, and at the end of the `with` block the workspace;
- nothing remains of a workspace whose object is dropped, of a process that ends, or in a fork of the process: a fork
  that opens workspaces has a thread and pools of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.workspace import MAX_FILES_BYTES, CommandResult, Workspace, WorkspacePool, check

T = TypeVar("T")
Kept = TypeVar("Kept", bound="_ClosablePool")
_SLICE_S = 0.2
_CLOSE_S = 10.0


class _ClosablePool(Protocol):
    async def aclose(self) -> None: ...


class ThreadWorkspace:
    """A workspace whose methods wait; `open_workspace` makes it. `Workspace` documents each of them.

    Args:
        keeper: The thread on whose event loop the workspace lives.
        workspace: The workspace, `inner`.
    """

    def __init__(self, keeper: _WorkspaceThread, workspace: Workspace) -> None:
        self.keeper = keeper
        self.inner = workspace
        self._dropped = weakref.finalize(self, keeper.close_soon, workspace)
        self._dropped.atexit = False  # at the interpreter's exit the keeper ends all of them

    @property
    def stopped(self) -> str | None:
        """None while the workspace lives; otherwise the reason of its end, in words for the model."""
        return self.inner.stopped

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command of bash: `Workspace.run`."""
        return self.keeper.wait(self.inner.run(command, timeout_s=timeout_s, cwd=cwd, env=env))

    def put(self, tar: bytes, path: str = ".") -> None:
        """Unpack a tar inside: `Workspace.put`."""
        self.keeper.wait(self.inner.put(tar, path))

    def get(self, *paths: str, path: str = ".", max_bytes: int = MAX_FILES_BYTES) -> bytes:
        """Return a tar of files: `Workspace.get`."""
        return self.keeper.wait(self.inner.get(*paths, path=path, max_bytes=max_bytes))

    def end_processes(self) -> None:
        """End every process that commands started: `Workspace.end_processes`."""
        self.keeper.wait(self.inner.end_processes())

    def close(self) -> None:
        """End the workspace at once; do nothing if it has ended. Its processes end soon after."""
        self._dropped()


@contextlib.contextmanager
def open_workspace(settings: WorkspaceSettings | None = None) -> Iterator[ThreadWorkspace]:
    """Open a workspace, and end it with the block.

    Example:
        with open_workspace(WorkspaceSettings(timeout_s=60)) as workspace:
            print(workspace.run("ls -la").output)

    Args:
        settings: The settings; None for the defaults. Equal settings share a pool.

    Raises:
        ConfigError: A setting cannot work, or workspaces do not work on this machine.
        SandboxError: No workspace could be started.
    """
    wanted = settings or WorkspaceSettings()
    check(wanted)
    keeper = _kept.get()
    workspace = keeper.wait(keeper.open(wanted))
    try:
        yield workspace
    finally:
        workspace.close()


class _WorkspaceThread:
    """The thread with the event loop, and the pools on it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._kept: dict[Hashable, Any] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="workspaces", daemon=True)
        self._thread.start()
        # The finalizers of the pools would close them in another thread than the loop's. The last function that
        # `atexit` got runs first, so make a finalizer before: the first one of a process registers it.
        weakref.finalize(self, int).detach()
        atexit.register(self.end)

    async def open(self, settings: WorkspaceSettings) -> ThreadWorkspace:
        """Open a workspace, on the loop. Whatever becomes of its caller: an object without an owner is closed."""
        pool = self.kept(("pool", settings), lambda: WorkspacePool(settings))
        return ThreadWorkspace(self, await pool.open())

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return the value kept under a key, on the loop; make it at the first call. `end` closes it."""
        if key not in self._kept:
            self._kept[key] = make()
        found: Kept = self._kept[key]
        return found

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work on the loop, and wait for it in a way that an exception raised in this thread comes through."""
        if os.getpid() != self.process:
            work.close()
            raise RuntimeError("this workspace belongs to the process that this one was forked from; open another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=_SLICE_S).done:
                pass
        except BaseException:  # of an interrupt: the command must not go on
            future.cancel()
            raise
        return future.result()

    def close_soon(self, workspace: Workspace) -> None:
        """End a workspace, on the loop; also called by the garbage collector, in any thread."""
        if os.getpid() == self.process:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(workspace.close)

    def end(self) -> None:
        """End all workspaces, the pools and the thread; do nothing in a fork, or when it is called again."""
        atexit.unregister(self.end)
        if os.getpid() == self.process and self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _close(self) -> None:
        await asyncio.gather(*(each.aclose() for each in self._kept.values()), return_exceptions=True)


class _ThreadHolder:
    """The keeper of this process, made at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeper: _WorkspaceThread | None = None

    def get(self) -> _WorkspaceThread:
        with self._lock:
            if self._keeper is None:
                self._keeper = _WorkspaceThread()
            return self._keeper

    def forget(self) -> None:
        """Begin anew in a fork: there is no thread, and another one may have held the lock.

        The loop is not closed, since it shares its epoll descriptor with that of the other process.
        """
        self._lock = threading.Lock()
        self._keeper = None


_kept = _ThreadHolder()
os.register_at_fork(after_in_child=_kept.forget)
