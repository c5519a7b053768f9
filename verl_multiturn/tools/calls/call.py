"""One call of one method of a tool or an interaction, and the reading of what a tool returned.

Invariants:
- each call has a task of its own, so that a call that ignores its cancellation can be left behind;
- each call of a synchronous method has a thread of its own: on the event loop it would block every conversation of the
  worker, and a pool of threads would be full once a few calls hang;
- a process that a tool forked never returns to the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

from verl_multiturn.chat.clipping import shorten
from verl_multiturn.describe import show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.reward_numbers import USABLE, NoNumberError, UnusableNumberError, as_reward, plain_scalar
from verl_multiturn.tasks import Alarms, ended, wake
from verl_multiturn.tools.base import ToolResponse

logger = logging.getLogger(__name__)

METRICS_CHARACTERS = 100_000
"""Largest number of characters in the metrics that one call returns."""
_DEEPEST = 20


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


class TimedOutError(Exception):
    """A tool did not answer in time. A TimeoutError, in contrast, comes from the tool's own code."""


@dataclass(slots=True)
class CallAnswer:
    """Answer of `execute` to one call, checked and within its limits."""

    text: str
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    truncated: bool = False
    """True if the text lost its middle, because it was longer than `response_characters`."""


class Invocation:
    """A call of a method of a tool or an interaction that is running.

    Args:
        method: The bound method.
        is_coroutine: Whether the method is `async def` (`is_coroutine_method`).
        arguments: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        name: Name of the task, from `task_name`.
    """

    __slots__ = ("_kind", "_task", "_threads")

    def __init__(
        self, method: Any, is_coroutine: bool, arguments: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> None:
        self._kind = name.partition(" ")[0]
        self._threads: list[asyncio.Future[Any]] = []
        run = self._awaited(method(*arguments, **kwargs)) if is_coroutine else self._threaded(method, arguments, kwargs)
        self._task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(run, name=name)

    def ended(self, alarms: Alarms) -> asyncio.Future[None]:
        """Return a future that is done when the method has ended or the time is up; `result` then says which.

        Args:
            alarms: The time limit.
        """
        woken: asyncio.Future[None] = self._task.get_loop().create_future()
        self._task.add_done_callback(partial(wake, woken))
        alarms.add(woken)
        return woken

    @property
    def done(self) -> bool:
        """Tell whether the method has ended."""
        return self._task.done()

    def result(self) -> Any:
        """Return the method's return value; call it when the future of `ended` is done.

        Raises:
            TimedOutError: The method has not ended; it is cancelled.
            RuntimeError: The method was cancelled by its own code, or it raised something that is no Exception.
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
                ended.exception()  # mark it as retrieved: after a timeout nobody waits for it

        threading.Thread(
            target=run, daemon=True, name=f"{self._kind} {getattr(function, '__qualname__', function)}"
        ).start()
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


def read_answer(name: str, returned: Any, most_characters: int, foreign: bool = False) -> CallAnswer:
    """Read what `execute` returned.

    Args:
        name: The tool's name, for errors.
        returned: The return value.
        most_characters: Largest number of characters in the answer's text; a longer text loses its middle.
        foreign: Whether the tool was written for another agent loop (`is_foreign`). Then a reward that is no number,
            and metrics that are no dict, are left out; otherwise they are errors.

    Raises:
        ToolContractError: The value is none of `ToolResponse`, `str`, or one of these with a reward and metrics; or the
            response holds a video, or images that are no list.
    """
    if isinstance(returned, ToolResponse) and type(returned.text) is str and not returned.image:  # the usual case
        return CallAnswer(shorten(returned.text, most_characters), truncated=len(returned.text) > most_characters)
    response, reward, metrics = returned if isinstance(returned, tuple) and len(returned) == 3 else (returned, 0.0, {})
    text: Any = response if isinstance(response, str) else getattr(response, "text", response)
    if text is None and hasattr(response, "text"):
        text = ""  # verl's ToolResponse has None for no text
    if getattr(response, "video", None):
        raise ToolContractError(f"tool {name!r}: videos in a tool's response are not supported; return images")
    images = getattr(response, "image", None)
    if not isinstance(images, list | tuple | None):
        raise ToolContractError(f"tool {name!r}: `image` must be a list of images, got {show(images)}")
    if foreign and not isinstance(metrics, dict | None):
        metrics = None
    if not isinstance(text, str) or not isinstance(metrics, dict | None):
        raise ToolContractError(
            f"tool {name!r}: execute must return ToolResponse, str, or (response, reward, metrics); "
            f"got {show(returned)}"
        )
    number = None if reward is None else read_reward(name, "execute", reward, foreign)
    text = str.__str__(text)  # a plain str: a subclass may have methods of the author's
    short = shorten(text, most_characters)
    metrics = plain_metrics(name, metrics or {})
    return CallAnswer(short, number or 0.0, metrics, tuple(images or ()), truncated=len(text) > most_characters)


def read_reward(name: str, method: str, value: Any, foreign: bool = False) -> float | None:
    """Return a reward as a float; None for NaN, an infinite number, or one that is too large.

    The log names the tool once for each method whose reward is left out.

    Args:
        name: The tool's name, for errors.
        method: The method that returned the reward, for errors.
        value: The reward.
        foreign: Whether the tool was written for another agent loop (`is_foreign`). Then the result is None, and no
            error, for a value that is no number.

    Raises:
        ToolContractError: The value is no number.
    """
    try:
        return as_reward(value)
    except NoNumberError as error:
        if not foreign:
            raise ToolContractError(f"tool {name!r}: the reward of {method} must be a number, {error}") from None
    except UnusableNumberError:
        pass
    _warn_once(f"tool {name!r}", f"the reward of {method} is no {USABLE} and is left out", f": {show(value)}")
    return None


class _Budget:
    """Characters of a value that may still be kept.

    Args:
        characters: Their number at first.
    """

    def __init__(self, characters: int) -> None:
        self.left = characters

    def takes(self, characters: int) -> bool:
        """Use up some characters, at least one, and return whether there was room for them."""
        self.left -= max(1, characters)
        return self.left >= 0


def plain_metrics(name: str, metrics: Mapping[Any, Any], kind: str = "tool") -> dict[str, Any]:
    """Return a copy of a tool's metrics that can be written as JSON.

    A value that is no JSON becomes text. Metrics beyond `METRICS_CHARACTERS` in all are left out; the log says so once.

    Args:
        name: The tool's name, for the log.
        metrics: The metrics as the tool returned them.
        kind: One of `KINDS`, for the log.
    """
    budget, plain = _Budget(METRICS_CHARACTERS), {}
    for key, value in metrics.items():
        text = _key(key)
        copied = _plain(value, budget, _DEEPEST) if budget.takes(len(text)) else None
        if budget.left < 0:
            what = f"metrics of over {METRICS_CHARACTERS:,} characters are left out"
            _warn_once(
                f"{kind} {name!r}", what, f", from {text[:100]!r} on; return numbers, and keep the rest elsewhere"
            )
            break
        plain[text] = copied
    return plain


def _plain(value: Any, budget: _Budget, depth: int) -> Any:
    value = plain_scalar(value)
    if value is None or isinstance(value, bool):
        return value if budget.takes(4) else None
    if isinstance(value, str):
        text = str.__str__(value)
        return text if budget.takes(len(text)) else None
    if isinstance(value, Real):
        budget.takes(8)
        try:
            return int(value) if isinstance(value, Integral) and abs(int(value)) < 2**63 else float(value)
        except Exception:  # the author's own class of numbers, or an integer too large for a float
            return show(value)
    budget.takes(2)
    if depth and isinstance(value, dict):
        pairs: dict[str, Any] = {}
        for key, item in value.items():
            text = _key(key)
            if not budget.takes(len(text)):
                break
            pairs[text] = _plain(item, budget, depth - 1)
        return pairs
    if depth and isinstance(value, list | tuple):
        items: list[Any] = []
        for item in value:
            if budget.left < 0:
                break
            items.append(_plain(item, budget, depth - 1))
        return items
    text = show(value)
    return text if budget.takes(len(text)) else None


def _key(key: Any) -> str:
    return str.__str__(key) if isinstance(key, str) else show(key)


_warned: set[tuple[str, str]] = set()


def _warn_once(whose: str, what: str, detail: str) -> None:
    if (whose, what) not in _warned:
        _warned.add((whose, what))
        logger.warning("%s: %s%s (said once)", whose, what, detail)
