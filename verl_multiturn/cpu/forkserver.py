"""The process that Ray's workers of a run on one machine are forked from: it has imported PyTorch and SGLang once.

    driver ─starts→ forkserver.py, which imports, then waits
    raylet ─starts→ fork_worker.py (Ray's `runtime_env.py_executable`) ─asks→ forkserver.py ─forks→ the worker

A worker that imports all of it itself takes some 10 s of CPU, and a run has seven of them, most after one another. A
fork has its environment, folder, output, niceness and arguments from whoever asked, and random numbers of its own; it
ends when that one is killed. Where no server answers, `fork_worker.py` starts the worker as Ray would have.

The server runs this file as a script: at its top it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What takes long to import. Not Ray, nor what imports it, as verl does: Ray's core reads the environment, which is the
# worker's own, when it is imported.
SLOW_MODULES = (
    "tensordict",
    "transformers.modeling_utils",
    "datasets",
    "peft",
    "sglang.srt.entrypoints.http_server",
)
_CLIENT = Path(__file__).with_name("fork_worker.py")
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Starts the server, which ends with this process.

    Args:
        modules: what it imports; a worker tells of what cannot be imported when it tries so itself.
    """

    def __init__(self, modules: Sequence[str] = SLOW_MODULES) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="verl-multiturn-", ignore_cleanup_errors=True)
        address = os.path.join(self._folder.name, "forkserver")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(64)
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(number), str(os.getpid()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[number],
            )
        self.executable = shlex.join([sys.executable, "-I", "-S", str(_CLIENT), address])
        """What Ray is to start in the place of Python, as a shell reads it."""

    def close(self) -> None:
        """End the server; what it has forked goes on."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@functools.cache
def forkserver() -> ForkServer:
    """The one of this process, started at the first call."""
    return ForkServer()


def main(listener_fd: int, parent: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process for each client, as long as the parent lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the pages of what is loaded stay shared
    _become(*_Server(socket.socket(fileno=listener_fd)).serve())


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Serve for ever.

        Returns:
            In a forked process: what its client asks for, and the client's standard descriptors.
        """
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._end(*key.data)
                elif (request := self._accept()) is not None:
                    return request

    def _accept(self) -> tuple[dict[str, Any], list[int]] | None:
        client, _ = self._listener.accept()
        message, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
        if not message:
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self._listener.close()
            client.close()
            return json.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        for either in (client, process):
            self._selector.register(either, selectors.EVENT_READ, (client, process, pid))
        return None

    def _end(self, client: socket.socket, process: int, pid: int) -> None:
        """Tell a client how its process ended, after killing it if the client was first to end."""
        if client.fileno() == -1:
            return  # both ended at once
        self._selector.unregister(client)
        self._selector.unregister(process)
        signal.pidfd_send_signal(process, signal.SIGKILL)  # nothing to one that has ended
        _, status = os.waitpid(pid, 0)
        os.close(process)
        with client, contextlib.suppress(OSError):
            client.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run a client's program in this fork as a new Python would."""
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    with contextlib.suppress(OSError):  # a lower one than the server's may not be allowed
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    program, *arguments = request["arguments"]
    sys.argv = [program, *arguments]
    sys.orig_argv = [sys.executable, program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
