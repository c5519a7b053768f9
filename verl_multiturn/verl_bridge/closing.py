"""The end of a process that has tools: they are closed, on the event loop that they were used on.

Ray kills the actors of a run that ends. Seen with Ray 2.60: after `ray.shutdown`, the driver's end or its crash, and
`ray.kill`, an actor runs neither its `atexit` functions nor signal handlers nor the `finally` of its tasks; only when
its last handle is dropped do `atexit` functions run. So our trainers ask the agent-loop workers to close their tools
once training is over, also when it failed. What nobody can ask any more, since the driver was killed, ends by itself:
the processes of MCP servers, of sandboxes and of `WorkerPool` follow the process that started them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from verl_multiturn.describe import describe
from verl_multiturn.tools.closing import CLOSE_S, close_tools

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class _Opened:
    """The tools that are in use on one event loop."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self.tools = tools
        self.loop = asyncio.get_running_loop()
        self.closing: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Begin to close them, from within the loop."""
        if self.closing is None:
            self.closing = self.loop.create_task(close_tools(self.tools))

    def close_at_exit(self) -> None:
        """Close them from outside the loop, which may be at work in another thread, be at rest, or be closed."""
        if self.closing is not None or self.loop.is_closed():
            return
        with contextlib.suppress(Exception):  # the process ends either way
            if self.loop.is_running():
                asyncio.run_coroutine_threadsafe(close_tools(self.tools), self.loop).result(2 * CLOSE_S)
            else:
                self.loop.run_until_complete(close_tools(self.tools))


_opened: list[_Opened] = []


def close_at_end(tools: Mapping[str, Any]) -> None:
    """Note tools that are used on the running event loop, to be closed when this process ends or is asked to."""
    opened = _Opened(tools)
    _opened.append(opened)
    atexit.register(opened.close_at_exit)


def close_workers(workers: Sequence[Any]) -> None:
    """Close the tools of agent-loop workers, within twice `CLOSE_S`. Raises nothing: the run is over."""
    until = time.monotonic() + 2 * CLOSE_S

    def ask(function: Any) -> list[Any]:
        answers = [worker.__ray_call__.remote(function) for worker in workers]
        return list(ray.get(answers, timeout=max(0.1, until - time.monotonic())))

    try:
        ask(_begin)
        while not all(ask(_has_ended)):
            if time.monotonic() > until:
                raise TimeoutError(f"not within {2 * CLOSE_S:g} s")
            time.sleep(_POLL_S)
    except (RayError, TimeoutError) as error:
        logger.warning("the tools of the agent-loop workers were not closed: %s", describe(error))


def _begin(worker: Any) -> None:
    for opened in _opened:
        opened.begin()


def _has_ended(worker: Any) -> bool:
    return all(opened.closing is not None and opened.closing.done() for opened in _opened)


class ClosingMixin:
    """Goes before a trainer class of verl: when it has ended, the tools of the agent-loop workers are closed."""

    def fit(self, agent_loop_manager: Any) -> Any:
        """verl's fit."""
        try:
            return super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            close_workers(agent_loop_manager.agent_loop_workers)
