"""One call of one method of a tool, and what it returned.

Invariants:
- a call has a task of its own, so that one that ignores its cancellation can be left behind;
- a synchronous method runs in a thread of its own: it would hold up every conversation of the worker, and a pool would
  be full once a few calls hang;
- a process that a tool forked never returns into the worker's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.tasks import Alarms, wake
from verl_multiturn.tools.base import ToolResponse

logger = logging.getLogger(__name__)

METRICS_CHARACTERS = 100_000
"""Of the metrics that one call returns."""
_DEEPEST = 20

TASK_PREFIX = "tool "
"""Of the names of tasks that run a tool's code: `tool 'name': method`."""


class TimedOutError(Exception):
    """A tool did not answer in time; apart from a TimeoutError of the tool's own."""


@dataclass(slots=True)
class CallAnswer:
    """What `execute` returned."""

    text: str
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    truncated: bool = False
    """Whether the text lost its middle to `response_characters`."""


class Invocation:
    """A method at work.

    Args:
        is_coroutine: as `is_coroutine_method` says of it.
        name: of the task, begins with `TASK_PREFIX`.
    """

    __slots__ = ("_task", "_threads")

    def __init__(
        self, method: Any, is_coroutine: bool, arguments: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> None:
        self._threads: list[asyncio.Future[Any]] = []
        run = _awaited(method(*arguments, **kwargs)) if is_coroutine else self._threaded(method, arguments, kwargs)
        self._task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(run, name=name)

    def ended(self, alarms: Alarms) -> asyncio.Future[None]:
        """To be awaited once: done when the method has ended, or the time is up; then `result` says which."""
        woken: asyncio.Future[None] = self._task.get_loop().create_future()
        self._task.add_done_callback(partial(wake, woken))
        alarms.add(woken)
        return woken

    def result(self) -> Any:
        """What the method returned.

        Raises:
            TimedOutError: nothing yet; it is told to stop.
            Exception: what it raised.
        """
        if not self._task.done():
            self._task.cancel()
            raise TimedOutError("the tool did not answer in time")
        if self._task.cancelled():
            raise RuntimeError("the tool was cancelled by its own code")
        return self._task.result()

    def stop(self) -> list[asyncio.Future[Any]]:
        """Cancel it; what of it is still at work."""
        self._task.cancel()
        return [left for left in (self._task, *self._threads) if not left.done()]

    async def _threaded(self, method: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        thread = _in_thread(method, arguments, kwargs)
        self._threads.append(thread)
        returned = await asyncio.shield(thread)
        return await _awaited(returned) if inspect.isawaitable(returned) else returned


def is_coroutine_method(method: Any) -> bool:
    """Whether a method is `async def`; a plain wrapper around one is not, since it may block before it calls it."""
    return inspect.iscoroutinefunction(method)


async def _awaited(coroutine: Any) -> Any:
    process = os.getpid()
    try:
        return await coroutine
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # a SystemExit, or what a library derives so that nobody catches it
        raise _tamed(error) from error
    finally:
        _stay_in(process)


def _tamed(error: BaseException) -> Exception:
    """What would end a worker: asyncio takes a SystemExit to the event loop, and nobody expects the rest."""
    if isinstance(error, SystemExit):
        return RuntimeError(f"the tool called exit({show(error.code)})")
    return RuntimeError(f"the tool raised {show(error)}")


def _stay_in(process: int) -> None:
    """End a child that a tool forked, before it goes on with the conversations of its parent."""
    if os.getpid() != process:
        os._exit(70)


def _in_thread(function: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> asyncio.Future[Any]:
    """Run a function in a thread of its own; the future ends with it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()
    process = os.getpid()

    def run() -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function(*arguments, **kwargs)
        except BaseException as error:  # handed over to the waiting coroutine, whatever it is
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
            ended.set_exception(failure if plain else _tamed(failure))
            ended.exception()  # looked at: after a timeout nobody waits for it

    threading.Thread(target=run, daemon=True, name=f"tool {getattr(function, '__qualname__', function)}").start()
    return ended


def read_answer(name: str, returned: Any, most_characters: int, foreign: bool = False) -> CallAnswer:
    """What `execute` returned, its text within `most_characters`.

    Args:
        foreign: whether the tool was written for another loop: a reward or metrics that are none are left out.

    Raises:
        ToolContractError: it is none of `ToolResponse`, `str`, or one of these with a reward and metrics.
    """
    if isinstance(returned, ToolResponse) and type(returned.text) is str and not returned.image:  # most do
        return CallAnswer(shorten(returned.text, most_characters), truncated=len(returned.text) > most_characters)
    response, reward, metrics = returned if isinstance(returned, tuple) and len(returned) == 3 else (returned, 0.0, {})
    text: Any = response if isinstance(response, str) else getattr(response, "text", response)
    if text is None and hasattr(response, "text"):
        text = ""  # verl's ToolResponse without text
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
    text = str.__str__(text)  # of a subclass, whose methods are the author's
    short = shorten(text, most_characters)
    metrics = plain_metrics(name, metrics or {})
    return CallAnswer(short, number or 0.0, metrics, tuple(images or ()), truncated=len(text) > most_characters)


def read_reward(name: str, method: str, value: Any, foreign: bool = False) -> float | None:
    """A reward as a number that training can use; None for NaN, what is infinite, and what no float holds.

    Args:
        foreign: whether the tool was written for another loop; then None also for what is no number.

    Raises:
        ToolContractError: it is no number.
    """
    if not isinstance(value, Real) and not foreign:
        remedy = "; return value.item()" if callable(getattr(type(value), "item", None)) else ""
        raise ToolContractError(f"tool {name!r}: the reward of {method} must be a number, got {show(value)}{remedy}")
    try:
        if isinstance(value, Real) and math.isfinite(number := float(value)):
            return number
    except Exception:  # of a number of the author's own; an integer that no float holds
        pass
    _warn_once(name, f"the reward of {method} is no finite number and is left out", f": {show(value)}")
    return None


class _Budget:
    """How much of a value is kept."""

    def __init__(self, characters: int) -> None:
        self.left = characters

    def takes(self, characters: int) -> bool:
        """Whether there was room for so many; they are counted off. What has none takes the room of one."""
        self.left -= max(1, characters)
        return self.left >= 0


def plain_metrics(name: str, metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """Metrics that can be written down, in a copy of its own: what is no JSON becomes text, and what is more than
    `METRICS_CHARACTERS` is left out."""
    budget, plain = _Budget(METRICS_CHARACTERS), {}
    for key, value in metrics.items():
        text = _key(key)
        copied = _plain(value, budget, _DEEPEST) if budget.takes(len(text)) else None
        if budget.left < 0:
            what = f"metrics of over {METRICS_CHARACTERS:,} characters are left out"
            _warn_once(name, what, f", from {text[:100]!r} on; return numbers, and keep the rest elsewhere")
            break
        plain[text] = copied
    return plain


def _plain(value: Any, budget: _Budget, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value if budget.takes(4) else None
    if isinstance(value, str):
        text = str.__str__(value)
        return text if budget.takes(len(text)) else None
    if isinstance(value, Real):
        budget.takes(8)
        try:
            return int(value) if isinstance(value, Integral) and abs(int(value)) < 2**63 else float(value)
        except Exception:  # of a number of the author's own; an integer that no float holds
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


def _warn_once(name: str, what: str, detail: str) -> None:
    if (name, what) not in _warned:
        _warned.add((name, what))
        logger.warning("tool %r: %s%s (said once)", name, what, detail)


def shorten(text: str, most_characters: int) -> str:
    """A text that tokenizers and files take, without its middle where it is longer."""
    if len(text) > most_characters:
        half = most_characters // 2
        text = f"{text[:half]}\n…[{len(text) - 2 * half} characters left out]…\n{text[-half:]}"
    # A lone surrogate is no text.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
