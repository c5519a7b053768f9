"""`ThreadRunner`: each agent in a thread of its own, with an event loop of its own if it is asynchronous.

A client that blocks must not block the loop that answers it. So an agent never runs on the worker's loop, and no agent
waits for another one's thread.

Invariants:
- nothing of the process is changed: no environment variable, no default executor, no signal handler;
- a thread cannot be killed. When the time is up, an asynchronous agent is cancelled; later an exception is raised in
  the thread, which reaches Python code but no call that blocks. A thread that still runs after that is *stuck*: it is
  abandoned and counted. It ends when it next asks the model, since its secret is dead, or with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from verl_multiturn.calls.outages.causes import agents_cause
from verl_multiturn.calls.tasks import wake
from verl_multiturn.errors import AgentContractError
from verl_multiturn.processes.zygote import problem_of
from verl_multiturn.proxy.agents.agent import Agent, SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult, read_result

_GRACE_S = 5.0
"""Seconds for an agent to end by itself after the time is up."""
_INTERRUPTED_S = 1.0
_MOST_THREADS = 1_024
"""Threads of one worker, those included that were abandoned."""


class ThreadRunner:
    """Runs agents in threads of this process.

    Args:
        agent: The agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._running: set[_AgentThread] = set()

    @property
    def stuck(self) -> int:
        """Number of threads that were abandoned and still run."""
        return sum(thread.is_abandoned for thread in self._running if thread.is_alive())

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Run the agent for one session, and return how it ended.

        When the call is cancelled, the thread is abandoned at once.

        Args:
            row: The data row, as `agent_row` returns it.
            address: Where the agent finds the model.
            time_up: Set when the session's time is up and nothing is answered any more. The call returns soon after.
            returned: Is called as soon as the agent has returned or raised. Its thread may still end tasks of it.

        Raises:
            AgentContractError: The agent returned something that is not a reward.
        """
        self._running = {thread for thread in self._running if thread.is_alive()}
        if len(self._running) >= _MOST_THREADS:
            return AgentEnd("failed", problem=f"{len(self._running)} agents run already, {self.stuck} of them stuck")
        thread = _AgentThread(self._agent, row, address)
        self._running.add(thread)
        waiting = asyncio.ensure_future(time_up.wait())
        try:
            try:
                thread.start()
            except RuntimeError as error:
                return AgentEnd("failed", problem=f"no thread for the agent: {error}")
            awaited: set[asyncio.Future[Any]] = {waiting, thread.done}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if thread.done.done():
                if returned is not None:
                    returned()
                return thread.ending()
            thread.cancel()
            await asyncio.wait({thread.done}, timeout=_GRACE_S)
            thread.interrupt()
            await asyncio.wait({thread.done}, timeout=_INTERRUPTED_S)
            problem = "the session's time was up before the agent returned"
            if thread.done.done():
                return AgentEnd("timed_out", problem=problem)
            return AgentEnd("stuck", problem=f"{problem}; its thread still runs, at {thread.place()}")
        finally:
            waiting.cancel()
            thread.abandon()

    async def aclose(self) -> None:
        """Forget the threads that remain; nothing can end them."""
        self._running.clear()


class _AgentThread:
    """One agent in its thread.

    Args:
        agent: The agent.
        row: Its row.
        address: Where it finds the model.

    Attributes:
        done: Is done when the agent has ended; its thread may still have to end its remaining tasks.
        is_abandoned: Whether it is no longer awaited.
    """

    def __init__(self, agent: Agent, row: Mapping[str, Any], address: SessionAddress) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.is_abandoned = False
        self._agent = agent
        self._row = row
        self._address = address
        self._task: asyncio.Task[Any] | None = None
        self._result: AgentResult | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._has_begun = False
        self._has_ended = False
        self._is_cancelled = False
        # A daemon, so that a worker can end without it.
        self._thread = threading.Thread(target=self._run, name=f"agent {address.id}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._has_begun = True

    def is_alive(self) -> bool:
        """Return whether the thread still runs."""
        return self._thread.is_alive()

    def ending(self) -> AgentEnd:
        """Return the end of an agent that is done.

        Raises:
            AgentContractError: It returned something that is not a reward.
        """
        if isinstance(self._error, AgentContractError):
            raise self._error
        if self._error is not None:
            return AgentEnd(agents_cause(self._error) or "raised", problem=problem_of(self._error))
        return AgentEnd("returned", self._result or AgentResult())

    def cancel(self) -> None:
        """Cancel the agent, if it is asynchronous; also one whose thread has not come so far yet."""
        self._is_cancelled = True
        if (task := self._task) is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def interrupt(self) -> None:
        """Raise SystemExit in the agent's code, if it still runs. A call that blocks is not interrupted."""
        with self._lock:
            if self._has_begun and not self._has_ended:
                thread = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))

    def abandon(self) -> None:
        """Wait no longer. A thread that still runs is signalled to end."""
        self.is_abandoned = True
        if not self.done.done():
            self.cancel()
            self._loop.call_later(_GRACE_S, self.interrupt)

    def place(self) -> str:
        """Return the file and the line at which the thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "its end"
        where = traceback.extract_stack(frame)[-1]
        return f"{where.filename}:{where.lineno}"

    def _run(self) -> None:
        try:
            try:
                self._agent.call(self._row, self._address, self._returned, self._began)
            except BaseException as error:  # an agent may raise anything, SystemExit too
                self._end(None, error)
            with self._lock:
                self._has_ended = True
        except SystemExit as error:  # of `interrupt`, which came when the agent had just ended
            self._end(None, error)

    def _began(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        if self._is_cancelled:
            task.cancel()

    def _returned(self, value: Any) -> None:
        try:
            self._end(read_result(value, self._agent.is_areals), None)
        except AgentContractError as error:
            self._end(None, error)

    def _end(self, result: AgentResult | None, error: BaseException | None) -> None:
        """Hand over the agent's result or error. Later ones, when its tasks are ended, do not count."""
        if self._result is None and self._error is None:
            self._result, self._error = result, error
            with contextlib.suppress(RuntimeError):  # the worker's loop is closed
                self._loop.call_soon_threadsafe(wake, self.done)
