"""The process from which a CPU run's processes are forked, after it has imported PyTorch and SGLang once.

    `run`  ─starts→ forkserver.py, which imports, then waits (a driver without a run starts it, too: `handle.py`)
    `run`  ─starts→ fork_worker.py ─asks→ forkserver.py ─forks→ the driver
    raylet ─starts→ fork_worker.py (Ray's `runtime_env.py_executable`) ─asks→ … ─forks→ the worker
    engine ─spawns→ fork_worker.py (`multiprocessing`'s executable, `cpu/spawned.py`) ─asks→ … ─forks→ the scheduler

A process that imports everything itself takes some 10 s of CPU. A run has a driver, seven workers and two processes of
SGLang, and most start one after another. A fork gets its environment, folder, output, niceness, blocked signals and
arguments from its client (`fork_worker.py`), and has random numbers and a process group of its own. It ends when its
client is killed. A driver, and what `multiprocessing` spawned, also get the descriptors that they were to inherit,
under their numbers; the latter takes the process that spawned it for its parent.

The process is started in the usual way when no server answers, when the server cannot fork, and when a variable that
is read at import has another value than in the server.

The server runs this file as a script, so the top of the file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Variables that the modules, Python or the C library read when they are loaded.
READ_AT_IMPORT = (
    "DATASETS_", "HF_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTORCH_",
    "TORCH_", "TRANSFORMERS_",
)  # fmt: skip
# But these are read when they are needed. SGLang's engine sets one of NCCL's before it starts its processes, and verl
# leaves the other behind where its Megatron engine cannot be imported.
_READ_LATER = ("TORCH_NCCL_", "TORCH_CUDA_ARCH_LIST")
_RAYS_WORKER = "default_worker.py"
_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
ADDRESS = "VERL_MULTITURN_FORKSERVER"
"""Environment variable of a fork: the address of the server."""
EARLY = "--"
"""Word among the names of modules."""
EVERY = ".*"
"""End of a package's name that stands for all modules of the package."""
_FDS = Path("/proc/self/fd")
_PR_SET_PDEATHSIG = 1  # `processes/system.py` has it, too, but would bring the whole package into every fork


def main(listener_fd: int, parent: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process for each client, as long as the parent lives.

    Args:
        listener_fd: File descriptor of the listening socket.
        parent: Process id of the parent.
        modules: Names of the modules to import, or of a package and `EVERY`; one that cannot be imported is skipped.
            After `EARLY` come those that a driver does not need: one that asks is forked between their imports.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    server = _Server(socket.socket(fileno=listener_fd), dict(os.environ))
    os.environ.pop(_MODELS, None)  # it names ours, which import verl and Ray: a fork registers them itself
    gc.disable()  # a sixth of the time of these imports
    with contextlib.suppress(Exception):  # it has to find its place before a fork has another environment
        importlib.import_module("setproctitle").getproctitle()
    forked = None
    is_early = False
    for name in modules:
        if name == EARLY:
            is_early = True
            continue
        if is_early:
            gc.freeze()
            if (forked := server.serve_driver()) is not None:
                break
        for each in _named(name):
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(each)
    if forked is None:
        gc.collect()
        gc.freeze()  # keeps the memory pages of the loaded modules shared with the forks
        forked = server.serve()
    gc.enable()
    _become(*forked)


def _named(name: str) -> list[str]:
    """Return the names of the modules that a name stands for."""
    if not name.endswith(EVERY):
        return [name]
    package = name.removesuffix(EVERY)
    with contextlib.suppress(Exception, SystemExit):
        folders = importlib.import_module(package).__path__
        return [f"{package}.{each.name}" for each in pkgutil.iter_modules(folders)]
    return []


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
        self._has_imported = True
        self._waiting: list[tuple[Any, dict[str, Any], list[int]]] = []

    def serve_driver(self) -> tuple[dict[str, Any], list[int]] | None:
        """Fork a driver that waits for it; return None here. Other clients wait for the end of the imports."""
        self._has_imported = False
        while ready := self._selector.select(0):
            if (request := self._answer(ready)) is not None:
                return request
        self._has_imported = True
        return None

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Serve clients; return only in a forked process.

        Returns:
            The client's request, and file descriptors of the client: its standard input, output and error, and
            those that the fork inherits.
        """
        while True:
            while self._waiting:
                if (request := self._fork(*self._waiting.pop(0))) is not None:
                    return request
            if (request := self._answer(self._selector.select())) is not None:
                return request

    def _answer(self, ready: list[tuple[selectors.SelectorKey, int]]) -> tuple[dict[str, Any], list[int]] | None:
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is not None:
                self._end(*key.data)
            elif (request := self._read(key.fileobj)) is not None:
                return request
        return None

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # too many open files; try again when there are fewer
            time.sleep(0.1)
            return
        self._selector.register(client, selectors.EVENT_READ)

    def _read(self, client: Any) -> tuple[dict[str, Any], list[int]] | None:
        """Read a client's request, and fork a process for it; return None here, and the request in the fork."""
        self._selector.unregister(client)
        descriptors: list[int] = []
        try:
            message, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 250)
            request = json.loads(message)
        except (OSError, ValueError):
            self._drop(client, descriptors)
            return None
        if self._has_imported or request["is_driver"]:
            return self._fork(client, request, descriptors)
        self._waiting.append((client, request, descriptors))
        return None

    def _drop(self, client: socket.socket, descriptors: list[int]) -> None:
        """Leave a client without an answer, or with a refusal: it starts its program itself."""
        client.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _fork(
        self, client: socket.socket, request: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]] | None:
        """Fork a process for a client; return None here, and the request in the fork."""
        try:
            if other := self._other_variables(request["environment"]):
                client.send(f"refused with another {', '.join(other)}".encode())
                raise ValueError
            if taken := self._taken(request["inherited"], [client.fileno(), *descriptors]):
                client.send(f"refused with descriptor {taken[0]} of its own".encode())
                raise ValueError
            if others := threading.enumerate()[1:]:  # a fork would not have them, and might wait for one's lock
                client.send(f"refused with a thread of its own ({others[0].name})".encode())
                raise ValueError
            if "ray" in sys.modules and os.path.basename(request["arguments"][0]) == _RAYS_WORKER:
                # Its core keeps the environment that it was imported with, and with it whose worker this is.
                client.send(b"refused with Ray imported")
                raise ValueError
            pid = os.fork()
        except (OSError, ValueError):
            self._drop(client, descriptors)
            return None
        if pid == 0:
            # The fork says so itself: a client that is told nothing, since the server dies, runs its program, too.
            try:
                client.send(f"forked {os.getpid()}".encode())
            except OSError:  # it waits no longer, and has begun its program itself
                os._exit(1)
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
        for client, _, descriptors in self._waiting:
            closes |= {client.fileno(), *descriptors}
        return [number for number in numbers if number not in closes and (_FDS / str(number)).exists()]

    def _close(self, client: socket.socket) -> None:
        """Close the server's sockets and descriptors, in a fork."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()
        for other, _, descriptors in self._waiting:
            self._drop(other, descriptors)
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
    _open_streams()
    if request["spawner"] is not None:
        _take_for_parent(request["spawner"])
        _register_models()
    _run(request["arguments"])


def _run(words: list[str]) -> None:
    """Run a program as Python's command line does.

    Args:
        words: FILE, `-m` and a module, or `-c` and code; then the program's arguments.
    """
    sys.orig_argv = [sys.executable, *words]
    program, *arguments = words
    if not sys.flags.safe_path:
        sys.path.insert(0, {"-m": os.getcwd(), "-c": ""}.get(program, str(Path(program).resolve().parent)))
    if program.startswith("-"):
        sys.modules["__main__"] = own = types.ModuleType("__main__")
        sys.argv = [program, *arguments[1:]]
    if program == "-m":
        # As Python itself does: `run_module` would put another module in the place of the program's at its end, where
        # its threads and what it has registered with `atexit` still need it.
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    elif program == "-c":
        exec(compile(arguments[0], "<string>", "exec"), vars(own))
    else:
        sys.argv = words
        runpy.run_path(program, run_name="__main__")


def _open_streams() -> None:
    """Make Python's streams anew: those of the server are of another kind of file.

    With PYTHONUNBUFFERED a line is in the file when it is written, as in a Python that is started with it: what a
    process that dies has printed last, and the order of both streams, are in a run's log.
    """
    given, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    encoding = given or sys.stdout.encoding
    source = os.fdopen(0, "r", encoding=encoding, errors=errors or sys.stdin.errors, closefd=False)
    sys.stdin = sys.__stdin__ = source  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _open_output(1, encoding, errors or sys.stdout.errors)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_output(2, encoding, "backslashreplace")  # type: ignore[misc]


def _open_output(number: int, encoding: str, errors: str | None) -> io.TextIOWrapper:
    if os.environ.get("PYTHONUNBUFFERED"):
        raw = io.FileIO(number, "w", closefd=False)
        # A file without a buffer under a text that keeps nothing back, as Python itself has them then.
        return io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True)
    is_by_line = number == 2 or os.isatty(number)
    return os.fdopen(number, "w", 1 if is_by_line else -1, encoding=encoding, errors=errors, closefd=False)


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


def _register_models() -> None:
    """Give SGLang's registry of models the package that this process's environment names, as at the registry's import.

    The server has imported the registry with SGLang's models, and without a package.
    """
    registry, package = sys.modules.get("sglang.srt.models.registry"), os.environ.get(_MODELS)
    if registry is not None and package:
        registry.ModelRegistry.register(package, overwrite=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
