"""Calls of the methods of an author's object, as the runtime makes them.

Invariants:
- each call has a task of its own, a synchronous method also a thread of its own;
- whatever the author's code does comes back as a `Probed`: an end by `exit`, too, and a call that never ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_multiturn.calls.invocation import is_coroutine_method
from verl_multiturn.describe import describe, place_of, show
from verl_multiturn.tasks import finish
from verl_multiturn.tools.check import instruments


class HangsError(Exception):
    """A method did not end in time."""


@dataclass(frozen=True)
class Probed:
    """Result of a call of a method: a value or an error, and the seconds that it took."""

    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0

    @property
    def timed_out(self) -> bool:
        """True if the method did not end in time."""
        return isinstance(self.error, HangsError)

    def failure(self, refusals: bool = True) -> str:
        """Return how the call failed, in words; empty where it did not.

        Args:
            refusals: Whether a ValueError is a failure, and not an answer.
        """
        if self.error is None or (isinstance(self.error, ValueError) and not refusals):
            return ""
        if self.timed_out:
            return f"hangs: {self.error}"
        return f"raised {describe(self.error)[:250]}{place_of(self.error)}"


class MethodProbe:
    """An object whose methods are called.

    Args:
        examined: The object.
        methods: Names of the methods.
        kind: What it is, for errors: `tool` or `interaction`.
        timeout_s: Seconds after which a method counts as hanging.
    """

    def __init__(self, examined: Any, methods: Iterable[str], kind: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_coroutine = {method: is_coroutine_method(getattr(examined, method)) for method in methods}
        self._examined = examined
        self._kind = kind

    def kwargs_of(self, method: str, arguments: tuple[Any, ...]) -> Mapping[str, Any]:
        """Return the keyword arguments of a call.

        Args:
            method: Name of the method.
            arguments: Positional arguments of the call.
        """
        return {}

    def invoke(self, method: str, *arguments: Any) -> asyncio.Task[Any]:
        """Start a call of a method, and return its task."""
        call = partial(getattr(self._examined, method), *arguments, **self.kwargs_of(method, arguments))
        run = self._awaited(call) if self.is_coroutine[method] else self._threaded(call)
        return asyncio.create_task(run, name=f"{method} of the {self._kind}")

    async def call(self, method: str, *arguments: Any) -> Probed:
        """Call a method, and return how it ended; one that does not end within `timeout_s` is cancelled."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        task = self.invoke(method, *arguments)
        await asyncio.wait({task}, timeout=self.timeout_s)
        seconds = loop.time() - started
        if not task.done():
            task.cancel()
            return Probed(error=HangsError(f"no answer within {self.timeout_s:g} s"), seconds=seconds)
        if task.cancelled():
            return Probed(error=RuntimeError(f"the {self._kind} was cancelled by its own code"), seconds=seconds)
        error = task.exception()
        if isinstance(error, Exception):
            return Probed(error=error, seconds=seconds)
        return Probed(task.result(), seconds=seconds)

    async def cancel(self, method: str, wait: Callable[[], Awaitable[None]], *arguments: Any) -> tuple[bool, Any]:
        """Start a call, cancel it after `wait`, and return whether it ended, and its value if it returned one."""
        task = self.invoke(method, *arguments)
        await asyncio.sleep(0)
        await wait()
        task.cancel()
        # A thread cannot be cancelled: it gets the time to end by itself.
        await asyncio.wait({task}, timeout=instruments.SETTLE_S if self.is_coroutine[method] else self.timeout_s)
        if not task.done() or task.cancelled() or task.exception() is not None:
            return task.done(), None
        return True, task.result()

    async def _awaited(self, call: Callable[[], Any]) -> Any:
        try:
            return await call()
        except SystemExit as error:
            raise self._exited(error) from error

    def _exited(self, error: SystemExit) -> RuntimeError:
        return RuntimeError(f"the {self._kind} called exit({show(error.code)})")

    async def _threaded(self, call: Callable[[], Any]) -> Any:
        """Run a call in a thread of its own, and wait for its end, also when cancelled."""
        ended: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                ended.set_result(call())
            except SystemExit as error:
                ended.set_exception(self._exited(error))
            except BaseException as error:  # pass it on, in a form that a future accepts
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                ended.set_exception(error if plain else RuntimeError(f"the {self._kind} raised {show(error)}"))

        threading.Thread(target=run, daemon=True, name=f"thread of the {self._kind}").start()
        returned = await finish(asyncio.wrap_future(ended))
        return await returned if inspect.isawaitable(returned) else returned
