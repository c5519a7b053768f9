"""Closing of tools and interactions when a process ends, on the event loop on which they were used.

Ray kills the actors of a run that ends. Seen with Ray 2.60: after `ray.shutdown`, the end or crash of the driver, and
`ray.kill`, an actor runs neither its `atexit` functions nor signal handlers nor the `finally` of its tasks. Only when
its last handle is dropped do its `atexit` functions run. So our trainers ask the agent-loop workers to close their
tools once training is over, also when it failed. When the driver was killed, this request never comes. Then the
processes of MCP servers, of sandboxes and of `WorkerPool` end by themselves, with the process that started them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from verl_multiturn.calls.closing import CLOSE_S, close_all
from verl_multiturn.calls.per_loop import PerLoop
from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class _OpenObjects:
    """Tools and interactions that are in use on one event loop."""

    def __init__(self) -> None:
        self.tools: list[Any] = []
        self.loop = asyncio.get_running_loop()
        self.closing: list[asyncio.Future[None]] = []
        atexit.register(self.close_at_exit)

    def begin(self) -> None:
        """Begin to close the tools; called within the loop."""
        if self.tools:
            self.closing.append(self.loop.create_task(self.close()))

    async def close(self) -> None:
        """Close the tools."""
        tools, self.tools = self.tools, []
        await close_all(tools)

    def close_at_exit(self) -> None:
        """Close the tools from outside the loop, which may be running in another thread, stopped, or closed."""
        if not self.tools or self.loop.is_closed():
            return
        with contextlib.suppress(Exception):  # the process ends either way
            if self.loop.is_running():
                asyncio.run_coroutine_threadsafe(self.close(), self.loop).result(2 * CLOSE_S)
            else:
                self.loop.run_until_complete(self.close())

    def has_ended(self) -> bool:
        """Return whether all tools are closed."""
        return not self.tools and all(closing.done() for closing in self.closing)


_opened = PerLoop(_OpenObjects.close)


def close_at_end(tools: Sequence[Any]) -> None:
    """Register the tools of the running event loop; they are closed at the process's exit or on request.

    Args:
        tools: The tools and interactions.
    """
    _opened.get(_OpenObjects).tools.extend(tools)


def close_workers(workers: Sequence[Any]) -> None:
    """Close the tools of agent-loop workers, within twice `CLOSE_S` seconds.

    The run is over by then, so a worker that fails or is late is only logged.

    Args:
        workers: Ray handles of the agent-loop workers.
    """
    until = time.monotonic() + 2 * CLOSE_S

    def ask(function: Any) -> list[Any]:
        answers = [worker.__ray_call__.remote(function) for worker in workers]
        return list(ray.get(answers, timeout=max(0.1, until - time.monotonic())))

    try:
        ask(_begin)
        while not all(ask(_has_ended)):
            if time.monotonic() > until:
                raise TimeoutError(f"they did not close within {2 * CLOSE_S:g} s")
            time.sleep(_POLL_S)
    except (RayError, TimeoutError) as error:
        logger.warning("the tools of the agent-loop workers were not closed: %s", describe(error))


def _begin(worker: Any) -> None:
    for opened in _opened.everywhere():
        opened.begin()


def _has_ended(worker: Any) -> bool:
    return all(opened.has_ended() for opened in _opened.everywhere())
