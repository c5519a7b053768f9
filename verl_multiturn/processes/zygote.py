"""A zygote: a process that has imported an author's code once, and from which a process is forked for each use of it.

    worker ─starts→ zygote, which imports the author's package, then waits
    worker ─sends a socket→ zygote ─forks→ a process, which answers on that socket

Why processes: an author's code may hang, draw from the random numbers of the whole process, or read its environment
variables. Why forks: an import takes seconds, a fork takes milliseconds.

It runs a *program*, a module with two functions: `load(spec)` imports the author's code in the zygote, and
`serve(socket, loaded)` is the work of a fork. A third, `leave(loaded)`, is optional: it removes the forks' remains when
all of them have ended. A worker that was killed cannot do so.

The zygote runs an author's code at import only. So it never hangs afterwards. A fork ends:
- when `serve` returns, which it does at the latest when the worker closes the socket;
- when the worker kills it;
- with the zygote, which ends with the worker.

Then the zygote kills its process group, and every process that it started and that still runs, also in another session.

Packets from the worker: `fork`, with the socket. Packets to the worker: `ready`, `config PROBLEM` or `failed PROBLEM`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.describe import describe, place_of
from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.system import adopt_orphans, end_children, end_with_parent, kill_group

WATCH = "zygote watch"
"""Name of the thread that runs during the import."""
_MOST_PROBLEM = 4_000


def main(channel_fd: int, spec: Mapping[str, Any]) -> None:
    """Import the author's code, then fork until the worker closes the channel.

    Args:
        channel_fd: Descriptor of a SOCK_SEQPACKET socket to the worker.
        spec: `program`, the name of the program's module, and the input of its `load`.
    """
    channel = socket.socket(fileno=channel_fd)
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    with contextlib.suppress(OSError):  # when memory runs out, the kernel ends forks before the worker
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    serve: Callable[[socket.socket, Any], None] | None = None
    try:
        with _ending_with(channel):
            program = importlib.import_module(spec["program"])
            loaded = program.load(spec)
        serve = program.serve
        packet = b"ready"
    except ConfigError as error:
        packet = f"config {error}".encode(errors="backslashreplace")
    except BaseException as error:  # an author's module may raise anything at import
        packet = f"failed {problem_of(error)}".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        channel.send(packet[:_MOST_PROBLEM])
    if serve is not None:
        gc.collect()
        gc.freeze()  # the garbage collector leaves these objects alone, so that forks keep sharing their pages
        _ForkZygote(channel, serve, loaded).run()
        end_children()
        if (leave := getattr(program, "leave", None)) is not None:
            leave(loaded)
    os._exit(0)


@contextlib.contextmanager
def _ending_with(channel: socket.socket) -> Any:
    """End this process when the worker ends meanwhile; an import may never end."""
    done = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(channel, select.POLLRDHUP | select.POLLHUP)
        while not done.is_set():
            if poll.poll(100):
                os._exit(1)

    watching = threading.Thread(target=watch, daemon=True, name=WATCH)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()  # no thread may run when the process forks


class _ForkZygote:
    def __init__(self, channel: socket.socket, serve: Callable[[socket.socket, Any], None], loaded: Any) -> None:
        self._channel = channel
        self._serve = serve
        self._loaded = loaded
        self._forks: dict[int, int] = {}
        """Process ids by pidfd."""
        self._poll = select.poll()

    def run(self) -> None:
        self._poll.register(self._channel, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._channel.fileno():
                    self._gone(fd)
                elif not self._fork():
                    for process in self._forks.values():
                        kill_group(process)
                    return

    def _fork(self) -> bool:
        """Read a packet and fork; return False when the worker has gone."""
        packet, fds, _, _ = socket.recv_fds(self._channel, 64, 1)
        if not packet:
            return False
        with socket.socket(fileno=fds[0]) as served:
            served.set_inheritable(False)  # a program that the author's code starts must not answer in its place
            try:
                process = os.fork()
                if process == 0:
                    self._become(served)
                with contextlib.suppress(OSError):
                    os.setpgid(process, process)
                fd = os.pidfd_open(process)
            except OSError as error:
                with contextlib.suppress(OSError):
                    served.send(json.dumps({"failed": f"no process can be forked: {error}"}).encode() + b"\n")
                return True
        self._forks[fd] = process
        self._poll.register(fd, select.POLLIN)
        return True

    def _gone(self, fd: int) -> None:
        process = self._forks.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        kill_group(process)  # before the wait, as long as no other process can have this number
        os.waitpid(process, 0)
        # A fork is the parent of its orphans. Those that come to the zygote are of forks that have ended.
        end_children(but=self._forks.values())

    def _become(self, served: socket.socket) -> None:
        """Be a fork; never returns."""
        try:
            if end_with_parent(os.getppid()):
                adopt_orphans()
                with contextlib.suppress(OSError):
                    os.setpgid(0, 0)
                self._channel.close()
                for fd in self._forks:
                    os.close(fd)
                with contextlib.suppress(OSError):
                    self._serve(served, self._loaded)
        finally:
            os._exit(0)


def problem_of(error: BaseException) -> str:
    """Return an error with the place in the author's code where it was raised, on one line."""
    return f"{describe(error)[:2000]}{place_of(error)}"


def seed_process(seed: int | None) -> None:
    """Seed the random numbers that belong to the whole process, with entropy of its own if the seed is None.

    Forks of one zygote would otherwise draw the same numbers.
    """
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(None if seed is None else seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.seed() if seed is None else torch.manual_seed(seed)


def run() -> None:
    """Be the zygote: the program of the process that the worker starts."""
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
