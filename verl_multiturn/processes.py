"""`WorkerPool`: processes that answer JSON requests and can be killed, for work that nothing else stops.

A worker is a script of ours. It says `{}` when it is ready, then answers each line with a line, over the socket that is
its standard input, and ends when that is closed. An answer with `"worn": true` is the last one of its process.

Invariants:
- a process is killed when its answer is late or the call is cancelled, and is otherwise used again;
- no more than `processes` run at once; further requests wait, and their time does not run meanwhile, nor while a
  process starts;
- no process outlives `close`, and none the process that started it once it reads its socket again.
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

from verl_multiturn.tasks import Alarms, done_within, ended, finish

_ANSWER_BYTES = 2**24


class WorkerError(RuntimeError):
    """The process ended, or wrote something that is no answer."""


class WorkerPool:
    """The processes of one event loop; those that wait for a request are kept.

    Args:
        script: what a worker runs.
        arguments: its limits, as the script takes them; handed over as JSON.
        timeout_s: seconds for one answer.
        processes: at once.
        python: flags of the interpreter.
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
        """A worker's answer. When this is cancelled, the process is killed before the cancellation goes on.

        Raises:
            TimeoutError: it is late.
            WorkerError: the process ended meanwhile, or does not start.
        """
        async with self._slots:
            worker = await self._take()
            reusable = False
            try:
                await worker.wait_until_ready()
                answer = await self._answer(worker, request)
                reusable = not answer.get("worn")
                return answer
            except TimeoutError:
                raise
            except (OSError, EOFError, ValueError) as error:
                raise WorkerError("the worker process ended") from error
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
            asking.cancel()  # it must let go of the socket before that is closed
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
        """End the processes that wait; one that is still at work ends with its request."""
        self._is_closed = True
        for worker in self._idle:
            worker.kill()
        while self._idle:
            await self._idle.pop().wait()


class _Worker:
    """One process. Started with plain `subprocess`: asyncio's needs a child watcher, which not every loop has."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        self._is_ready = False
        with other:
            self._process = subprocess.Popen(
                command,
                stdin=other.fileno(),
                stdout=other.fileno(),
                stderr=subprocess.DEVNULL,
                # Not the environment, where keys may be, but how some Pythons find their libraries.
                env={key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ},
            )

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    async def wait_until_ready(self) -> None:
        """Wait for Python to start.

        Raises:
            WorkerError: it does not.
        """
        if self._is_ready:
            return
        try:
            await self._read()
        except EOFError:
            raise WorkerError("the worker process does not start") from None
        self._is_ready = True

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            OSError, EOFError, ValueError: the process is dead or writes no answers.
        """
        await asyncio.get_running_loop().sock_sendall(self._socket, json.dumps(dict(request)).encode() + b"\n")
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        line = bytearray()
        while not line.endswith(b"\n"):
            chunk = await loop.sock_recv(self._socket, 2**16)
            if not chunk or len(line) > _ANSWER_BYTES:
                raise EOFError
            line += chunk
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError("no answer")
        return answer

    def kill(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.kill()

    async def wait(self) -> None:
        """Wait until it has ended, also when this is cancelled."""
        await finish(asyncio.ensure_future(asyncio.to_thread(self._process.wait)))
