"""`WorkerPool`: processes that answer JSON requests and can be killed, for work that nothing else can stop.

A worker is a script of this package. It writes `{}` when it is ready, and then answers each line with a line, over the
socket that is its standard input. It ends when that socket is closed. An answer with `"worn": true` is the last one of
its process.

Invariants:
- a process is killed when its answer is late or the call is cancelled; otherwise it is used again;
- no more than `processes` run at once: further requests wait. The time limit of a request counts neither this wait nor
  the start of a process;
- a process that is stopped (SIGSTOP) goes on at its next request, or is killed (`resumption.py`);
- `close` ends the processes that wait for a request; a process at work ends with its request;
- when the process that started a worker is gone, the worker ends as soon as it next reads its socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.calls.tasks import Alarms, done_within, ended, finish
from verl_multiturn.processes.lines import read_line
from verl_multiturn.processes.resumption import kept_running

# The most bytes of one answer.
_ANSWER_BYTES = 2**24


class WorkerError(RuntimeError):
    """Work in another process gave no answer that can be used.

    For example, the process ended, or wrote something that is not an answer. Rewards also raise this error when a gold
    query fails or a judge gives no verdict.
    """


class WorkerEndedError(WorkerError):
    """The process ended, or wrote something that is not an answer."""


class WorkerStartError(WorkerEndedError):
    """The process does not start, whatever the request is."""


class WorkerPool:
    """A pool of processes for one event loop. A process that has answered is kept for further requests.

    Args:
        script: The script that each worker runs.
        arguments: Limits for the worker, as the script reads them. They are handed over as JSON.
        timeout_s: Seconds for one answer.
        processes: The most processes that run at once.
        python: Flags of the interpreter.
    """

    def __init__(
        self,
        script: Path,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float,
        processes: int,
        python: Sequence[str] = ("-I",),
    ) -> None:
        self._command = [sys.executable, *python, str(script), json.dumps(dict(arguments))]
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[_Worker] = []
        self._is_closed = False

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return a worker's answer to a request.

        When the call is cancelled, the process is killed before the cancellation goes on.

        Args:
            request: The request. It is sent as JSON.

        Raises:
            TimeoutError: The answer is late.
            WorkerStartError: The process does not start.
            WorkerEndedError: It ended meanwhile, or wrote something that is not an answer.
        """
        async with self._slots:
            worker = await self._take()
            reusable = False
            try:
                with kept_running(worker.process):
                    await worker.wait_until_ready()
                    answer = await self._answer(worker, request)
                reusable = not answer.get("worn")
                return answer
            except TimeoutError:
                raise
            except (OSError, EOFError, ValueError) as error:
                raise WorkerEndedError("the worker process ended") from error
            finally:
                if reusable and not self._is_closed:
                    self._idle.append(worker)
                else:
                    worker.kill()
                    await worker.wait()

    async def _answer(self, worker: _Worker, request: Mapping[str, Any]) -> dict[str, Any]:
        asking = asyncio.ensure_future(worker.ask(request))
        try:
            if await done_within(asking, Alarms(self._timeout_s)):
                return asking.result()
            raise TimeoutError
        finally:
            asking.cancel()  # the task must leave the socket before the socket is closed
            cancelled = await ended(asking)
            if not asking.cancelled():
                asking.exception()
            if cancelled is not None:
                raise cancelled

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                return worker
            worker.kill()
            await worker.wait()
        return _Worker(self._command)

    async def close(self) -> None:
        """End the processes that wait for a request. One that is still at work ends with its request."""
        self._is_closed = True
        for worker in self._idle:
            worker.kill()
        while self._idle:
            await self._idle.pop().wait()


class _Worker:
    """One process.

    It is started with plain `subprocess`: asyncio's own way needs a child watcher, which not every event loop has.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        self._is_ready = False
        with other:
            self.process = subprocess.Popen(
                command,
                stdin=other.fileno(),
                stdout=other.fileno(),
                stderr=subprocess.DEVNULL,
                # Only the variables by which some Pythons find their libraries: the rest of the environment may hold
                # keys.
                env={key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ},
            )

    def is_alive(self) -> bool:
        """Return whether the process is still running."""
        return self.process.poll() is None

    async def wait_until_ready(self) -> None:
        """Wait until the script has started.

        Raises:
            WorkerStartError: The script does not start.
        """
        if self._is_ready:
            return
        try:
            await read_line(self._socket, _ANSWER_BYTES)
        except EOFError:
            raise WorkerStartError("the worker process does not start") from None
        self._is_ready = True

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            OSError: The process is dead.
            EOFError: The process is dead, or its answer is too long.
            ValueError: The process wrote something that is not an answer.
        """
        await asyncio.get_running_loop().sock_sendall(self._socket, json.dumps(dict(request)).encode() + b"\n")
        return await read_line(self._socket, _ANSWER_BYTES)

    def kill(self) -> None:
        """Kill the process."""
        self._socket.close()
        self.process.kill()

    async def wait(self) -> None:
        """Wait until the process has ended, even if the call is cancelled."""
        await finish(asyncio.ensure_future(asyncio.to_thread(self.process.wait)))
