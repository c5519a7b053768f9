"""`Invocation`: one call of one method of an author's object.

Invariants:
- each call has a task of its own, so that a call that ignores its cancellation can be abandoned;
- each call of a synchronous method has a thread of its own: on the event loop it would block every conversation of the
  worker, and a pool of threads would be full once a few calls hang;
- a process that the author's code forked never returns to the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl_multiturn.calls.tasks import Alarms, ended, wake
from verl_multiturn.describe import show


def task_name(kind: str, name: str, method: str) -> str:
    """Return the name of a task that runs an author's code, for example `tool 'search': execute`.

    Args:
        kind: One of `KINDS`.
        name: Name of the tool or interaction.
        method: Name of the method.
    """
    return f"{kind} {name!r}: {method}"


KINDS = ("tool", "interaction")
"""Kinds of objects whose authors' code runs in tasks of its own."""

_MOST_FRAMES = 1_000


class TimedOutError(Exception):
    """A method did not return in time. A TimeoutError, in contrast, comes from the author's own code."""


class BusyError(Exception):
    """No slot was free within `queue_timeout_s`; the text is for the model."""


class Invocation:
    """A call of a method of an author's object that is running.

    Args:
        method: The bound method.
        is_coroutine: Whether the method is `async def` (`is_coroutine_method`).
        arguments: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        name: Name of the task, from `task_name`.
    """

    __slots__ = ("_kind", "_task", "_threads", "_workers")

    def __init__(
        self, method: Any, is_coroutine: bool, arguments: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> None:
        self._kind = name.partition(" ")[0]
        self._threads: list[asyncio.Future[Any]] = []
        self._workers: list[threading.Thread] = []
        run = self._awaited(method(*arguments, **kwargs)) if is_coroutine else self._threaded(method, arguments, kwargs)
        self._task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(run, name=name)

    def ended(self, alarms: Alarms) -> asyncio.Future[None]:
        """Return a future that is done when the method has ended or the time is up; `result` then reports which.

        Args:
            alarms: The time limit.
        """
        woken: asyncio.Future[None] = self._task.get_loop().create_future()
        self._task.add_done_callback(partial(wake, woken))
        alarms.add(woken)
        return woken

    @property
    def done(self) -> bool:
        """Return whether the method has ended."""
        return self._task.done()

    def result(self) -> Any:
        """Return the method's return value; call it when the future of `ended` is done.

        Raises:
            TimedOutError: The method has not ended; it is cancelled.
            RuntimeError: The method was cancelled by its own code, or it raised something that is not an Exception.
            Exception: The method raised it.
        """
        if not self._task.done():
            self._task.cancel()
            raise TimedOutError(f"the {self._kind} did not answer in time")
        if self._task.cancelled():
            raise RuntimeError(f"the {self._kind} was cancelled by its own code")
        return self._task.result()

    async def whole(self) -> Any:
        """Return the method's return value. A cancellation is passed on, and raised when the thread has ended."""
        try:
            return await self._task
        finally:
            for thread in self._threads:
                await ended(thread)

    def stop(self) -> list[asyncio.Future[Any]]:
        """Cancel the call, and return its task and its thread as far as they still run."""
        self._task.cancel()
        return [left for left in (self._task, *self._threads) if not left.done()]

    def frames(self) -> list[tuple[str, int]]:
        """Return file and line of each place where the method is now, the outermost first; call it before `result`."""
        found: list[tuple[str, int]] = []
        awaited: Any = self._task.get_coro()
        # An author's awaitable may name itself as what it awaits.
        while (frame := getattr(awaited, "cr_frame", None)) is not None and len(found) < _MOST_FRAMES:
            found.append((frame.f_code.co_filename, frame.f_lineno))
            awaited = awaited.cr_await
        current = sys._current_frames()
        for worker in self._workers:
            if (top := current.get(worker.ident or 0)) is not None:
                walked = [(each.f_code.co_filename, line) for each, line in traceback.walk_stack(top)]
                found += reversed(walked)
        return found

    async def _threaded(self, method: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        thread = self._in_thread(method, arguments, kwargs)
        self._threads.append(thread)
        returned = await asyncio.shield(thread)
        return await self._awaited(returned) if inspect.isawaitable(returned) else returned

    async def _awaited(self, coroutine: Any) -> Any:
        process = os.getpid()
        try:
            return await coroutine
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # a SystemExit, or a library's own class that no `except Exception` catches
            raise self._tamed(error) from error
        finally:
            _stay_in(process)

    def _tamed(self, error: BaseException) -> Exception:
        """Turn an exception that would end the worker into a RuntimeError.

        asyncio would raise a SystemExit out of the event loop, and no caller expects the others.
        """
        if isinstance(error, SystemExit):
            return RuntimeError(f"the {self._kind} called exit({show(error.code)})")
        return RuntimeError(f"the {self._kind} raised {show(error)}")

    def _in_thread(self, function: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> asyncio.Future[Any]:
        """Run a function in a thread of its own, and return a future that ends with the thread."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()
        process = os.getpid()

        def run() -> None:
            value: Any = None
            failure: BaseException | None = None
            try:
                value = function(*arguments, **kwargs)
            except BaseException as error:  # whatever it is, it goes to the waiting coroutine
                failure = error
            _stay_in(process)
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(settle, value, failure)

        def settle(value: Any, failure: BaseException | None) -> None:
            if ended.done():
                return
            if failure is None:
                ended.set_result(value)
            else:
                plain = isinstance(failure, Exception) and not isinstance(failure, StopIteration)
                ended.set_exception(failure if plain else self._tamed(failure))
                ended.exception()  # mark it as retrieved: after a timeout it has no waiter

        name = f"{self._kind} {getattr(function, '__qualname__', function)}"
        worker = threading.Thread(target=run, daemon=True, name=name)
        self._workers.append(worker)
        worker.start()
        return ended


def is_coroutine_method(method: Any) -> bool:
    """Return whether a method is `async def`.

    A plain function that returns a coroutine is not: it may block before it returns.
    """
    return inspect.iscoroutinefunction(method)


def _stay_in(process: int) -> None:
    """End a child process that a tool forked, before it runs its parent's conversations a second time."""
    if os.getpid() != process:
        os._exit(70)
