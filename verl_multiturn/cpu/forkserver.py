"""The process from which a local run's Ray workers are forked, after it has imported PyTorch and SGLang once.

    driver ─starts→ forkserver.py, which imports, then waits
    raylet ─starts→ fork_worker.py (Ray's `runtime_env.py_executable`) ─asks→ forkserver.py ─forks→ the worker

    engine ─spawns→ fork_worker.py (`multiprocessing`'s executable, `spawned.py`) ─asks→ … ─forks→ the scheduler

A process that imports everything itself takes some 10 s of CPU. A run has seven workers and two processes of SGLang,
and most start one after another. A fork gets its environment, folder, output, niceness, blocked signals and arguments
from its client (`fork_worker.py`), and has random numbers and a process group of its own. It ends when its client is
killed. One that `multiprocessing` spawned also gets the descriptors that it was to inherit, under their numbers, and
takes the process that spawned it for its parent.

The worker is started in Ray's usual way when no server answers, when the server cannot fork, and when a variable that
is read at import has another value than in the server.

The server runs this file as a script, so the top of the file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import logging
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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Modules that take long to import. Ray is not among them, nor what imports Ray, as verl does: Ray's core reads the
# environment when it is imported, and each worker has its own environment.
SLOW_MODULES = (
    "tensordict",
    "transformers.modeling_utils",
    "datasets",
    "peft",
    "sglang.srt.entrypoints.http_server",
)
# Variables that these modules, Python or the C library read when they are loaded.
READ_AT_IMPORT = (
    "DATASETS_", "HF_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTORCH_",
    "TORCH_", "TRANSFORMERS_",
)  # fmt: skip
# But these are NCCL's. SGLang's engine sets one before it starts its processes.
_READ_LATER = "TORCH_NCCL_"
ADDRESS = "VERL_MULTITURN_FORKSERVER"
"""Environment variable of a fork: the address of the server."""
# Runs a file as a script, without its folder on the path, and without an interpreter flag that forks would inherit.
_SCRIPT = "import runpy, sys; del sys.path[0], sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
_CLIENT = Path(__file__).with_name("fork_worker.py")
# What `multiprocessing` starts in place of Python. The kernel takes one argument after the interpreter.
_SPAWNED = """#!{python} -IS
import runpy, sys
sys.argv[1:1] = [{address!r}]
runpy.run_path({client!r}, run_name="__main__")
"""
_FDS = Path("/proc/self/fd")
_PR_SET_PDEATHSIG = 1  # `processes/system.py` has it, too, but would bring the whole package into every fork

logger = logging.getLogger(__name__)


class ForkServer:
    """A running server process, which ends with the thread that started it.

    Args:
        modules: Names of the modules that the server imports. A module that cannot be imported is skipped; the worker
            that imports it reports the error.

    Raises:
        OSError: The socket cannot be created, or the process cannot be started.
    """

    def __init__(self, modules: Sequence[str] = SLOW_MODULES) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="verl-multiturn-", ignore_cleanup_errors=True)
        address = os.path.join(self._folder.name, "forkserver")
        try:
            self.executable = executables(address)
            """Command line that Ray starts in place of Python, quoted for a shell."""
            self._process = _start(address, modules)
        except OSError:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        """End the server; its forks go on, but for processes of SGLang, which end with who forked them."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def executables(address: str) -> str:
    """Write what `multiprocessing` starts in place of Python, and return what Ray starts, quoted for a shell.

    Args:
        address: Where the server listens, or will.

    Raises:
        OSError: The folder of the address cannot be written.
    """
    spawned = executable_of(address)
    spawned.write_text(_SPAWNED.format(python=sys.executable, address=address, client=str(_CLIENT)), encoding="utf-8")
    spawned.chmod(0o700)
    if not _runs(spawned):  # on a file system without programs, or with a path that no kernel takes
        spawned.unlink()
    return shlex.join([sys.executable, "-I", "-S", str(_CLIENT), address])


def listen_at(address: str) -> socket.socket:
    """Return the socket of a server that will listen at an address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.listen(64)
    return listener


def _runs(program: Path) -> bool:
    try:
        return subprocess.run([program, "-c", "pass"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def executable_of(address: str) -> Path:
    """Return what `multiprocessing` may start in place of Python, of the server that listens at an address."""
    return Path(address).with_name("spawned")


def _start(address: str, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    with listen_at(address) as listener:
        number = listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, __file__, str(number), str(os.getpid()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            env={**os.environ, "SPT_NOENV": "1"},  # a process's title must not overwrite its environment
            process_group=0,  # Ctrl-C must reach only the driver
        )


@functools.cache
def forkserver() -> ForkServer | None:
    """Return the server of this process, which the first call starts; None when it cannot be started."""
    try:
        return ForkServer()
    except OSError as error:
        logger.warning("no forkserver (%s): each worker of the run imports everything itself", error)
        return None


def main(listener_fd: int, parent: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process for each client, as long as the parent lives.

    Args:
        listener_fd: File descriptor of the listening socket.
        parent: Process id of the parent.
        modules: Names of the modules to import; one that cannot be imported is skipped.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    environment = dict(os.environ)
    gc.disable()  # a sixth of the time of these imports
    for name in modules:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    with contextlib.suppress(Exception):  # it has to find its place before a fork has another environment
        importlib.import_module("setproctitle").getproctitle()
    gc.collect()
    gc.freeze()  # keeps the memory pages of the loaded modules shared with the forks
    gc.enable()
    _become(*_Server(socket.socket(fileno=listener_fd), environment).serve())


class _Server:
    """The loop that answers clients and forks.

    It sends a client `refused REASON`, or the fork sends it `forked PID`, and the server `ended STATUS` after that.

    Args:
        listener: The listening socket.
        environment: The environment variables with which the modules were imported.
    """

    def __init__(self, listener: socket.socket, environment: dict[str, str]) -> None:
        self._listener = listener
        self._environment = environment
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Serve clients; return only in a forked process.

        Returns:
            The client's request, and file descriptors of the client: its standard input, output and error, and
            those that the fork inherits.
        """
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._end(*key.data)
                elif (request := self._read(key.fileobj)) is not None:
                    return request

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # too many open files; try again when there are fewer
            time.sleep(0.1)
            return
        self._selector.register(client, selectors.EVENT_READ)

    def _read(self, client: Any) -> tuple[dict[str, Any], list[int]] | None:
        """Fork a process for a client that has sent its request; return None here, and the request in the fork."""
        self._selector.unregister(client)
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 250)
            request = json.loads(message)
            if other := self._other_variables(request["environment"]):
                client.send(f"refused with another {', '.join(other)}".encode())
                raise ValueError
            if taken := self._taken(request["inherited"], [client.fileno(), *descriptors]):
                client.send(f"refused with descriptor {taken[0]} of its own".encode())
                raise ValueError
            pid = os.fork()
        except (OSError, ValueError):  # a client without an answer starts its worker itself
            client.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        if pid == 0:
            # The fork says so itself: a client that is told nothing, since the server dies, runs its program, too.
            with contextlib.suppress(OSError):
                client.send(f"forked {os.getpid()}".encode())
            self._close(client)
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        for either in (client, process):
            self._selector.register(either, selectors.EVENT_READ, (client, process, pid))
        return None

    def _other_variables(self, environment: dict[str, str]) -> list[str]:
        """Return the names of a client's variables that had other values when the modules were imported."""
        names = sorted(name for name in {*environment, *self._environment} if name.startswith(READ_AT_IMPORT))
        names = [name for name in names if not name.startswith(_READ_LATER)]
        return [name for name in names if environment.get(name) != self._environment.get(name)]

    def _taken(self, numbers: Sequence[int], closed: Sequence[int]) -> list[int]:
        """Return which descriptors a fork would have open besides those that it closes."""
        closes = {*closed, self._selector.fileno(), *self._selector.get_map()}
        return [number for number in numbers if number not in closes and (_FDS / str(number)).exists()]

    def _close(self, client: socket.socket) -> None:
        """Close the server's sockets and descriptors, in a fork."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()
        client.close()

    def _end(self, client: socket.socket, process: int, pid: int) -> None:
        """Tell a client how its process ended; if the client ended first, kill the process."""
        if client.fileno() == -1:
            return  # both ended at once
        self._selector.unregister(client)
        self._selector.unregister(process)
        signal.pidfd_send_signal(process, signal.SIGKILL)  # has no effect on a process that has ended
        _, status = os.waitpid(pid, 0)
        os.close(process)
        with client, contextlib.suppress(OSError):
            client.send(f"ended {os.waitstatus_to_exitcode(status)}".encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run a client's program in this fork, as a new Python process would."""
    os.setpgid(0, 0)  # when a worker dies, Ray kills its whole process group
    _take(dict(zip([0, 1, 2, *request["inherited"]], descriptors, strict=True)))
    before, after = (each.get("PYTHONPATH", "").split(os.pathsep) for each in (os.environ, request["environment"]))
    sys.path[:] = [*filter(None, after), *(folder for folder in sys.path if folder not in (*before, *after))]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    with contextlib.suppress(OSError):  # a niceness below the server's may not be allowed
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"], encoding="utf-8")
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    os.environ[ADDRESS] = request["address"]
    program, *arguments = request["arguments"]
    sys.orig_argv = [sys.executable, program, *arguments]
    if request["spawner"] is not None:
        _take_for_parent(request["spawner"])
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        exec(code, {"__name__": "__main__"})
        return
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


def _take(descriptors: dict[int, int]) -> None:
    """Give descriptors, the values, the numbers that are the keys."""
    above = max(*descriptors, *descriptors.values()) + 1
    moved = {number: fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, above) for number, given in descriptors.items()}
    for given in descriptors.values():
        os.close(given)
    for number, given in moved.items():
        os.dup2(given, number)
        os.close(given)


def _take_for_parent(spawner: int) -> None:
    """Let psutil call a process this one's parent: SGLang's processes send it a signal when they fail."""
    import psutil

    parent = psutil.Process.parent

    def parent_of(process: psutil.Process) -> psutil.Process | None:
        return psutil.Process(spawner) if process.pid == os.getpid() else parent(process)

    psutil.Process.parent = parent_of  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
