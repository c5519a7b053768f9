"""The event loop of all MCP connections of a process, in a thread of its own.

Why a thread: the YAML of tools is read while no loop runs, or within a loop that must not wait, and the server that
listed its tools there has to serve the conversations later. A server starts and stops off the conversations' loop, too.

Invariants:
- there is one such loop in a process, made at its first use; a process that was forked makes one of its own;
- whoever waits for it may be cancelled, and then the work on the loop is cancelled;
- when the process ends by itself, connections close first.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_S = 5.0


class _Closes(Protocol):
    async def close(self) -> None: ...


class _Thread:
    """The thread and its loop."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.open: set[_Closes] = set()
        """Those that have connections; changed on the loop only."""
        threading.Thread(target=self._run, daemon=True, name="MCP servers").start()
        atexit.register(self._close)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _close(self) -> None:
        if self.process != os.getpid() or not self.open:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._close_all(), self.loop).result(_CLOSE_S)
        except Exception as error:  # the process ends either way, and the guards end the servers
            logger.warning("MCP servers were not closed: %s", describe(error))

    async def _close_all(self) -> None:
        await asyncio.gather(*(each.close() for each in list(self.open)))


_lock = threading.RLock()  # the garbage collector may call `let_go` while it is held
_thread: _Thread | None = None


def _running() -> _Thread:
    global _thread
    with _lock:
        if _thread is None:
            _thread = _Thread()
        return _thread


def _forget() -> None:
    """Forget the parent's thread, in a process that was forked, and the lock, which it may have held."""
    global _lock, _thread
    _lock, _thread = threading.RLock(), None


os.register_at_fork(after_in_child=_forget)


def note_open(opened: _Closes, is_open: bool) -> None:
    """Note, on the loop, whether something has connections, which then are closed at the end of the process."""
    (_running().open.add if is_open else _running().open.discard)(opened)


async def on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop of the connections, and return its result to the running one.

    If this is cancelled, so is the coroutine, and this waits for its end: the next call finds what it left.
    """
    here, loop = asyncio.get_running_loop(), _running().loop
    ended: asyncio.Future[asyncio.Task[T]] = here.create_future()
    begun: list[asyncio.Task[T]] = []

    def begin() -> None:
        begun.append(loop.create_task(coroutine))
        begun[0].add_done_callback(report)

    def report(task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: perhaps nobody waits any more
        with contextlib.suppress(RuntimeError):  # the caller's loop has ended
            here.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(task))

    loop.call_soon_threadsafe(begin)
    try:
        return (await asyncio.shield(ended)).result()
    except asyncio.CancelledError:
        if not ended.done():
            loop.call_soon_threadsafe(lambda: begun[0].cancel())
            await ended
        raise


def from_outside(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop of the connections, and wait for its result; may be called while a loop runs."""
    return asyncio.run_coroutine_threadsafe(coroutine, _running().loop).result()


def soon(function: Any, *arguments: Any) -> None:
    """Call a function on the loop, after the functions that were sent there before; nothing can stop it any more."""
    _running().loop.call_soon_threadsafe(function, *arguments)


def let_go(function: Any) -> None:
    """Call a function on the loop that closes something, if there is the loop: otherwise nothing is open."""
    if _thread is not None:
        _thread.loop.call_soon_threadsafe(function)
