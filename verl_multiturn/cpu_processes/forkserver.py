"""The process from which a CPU run's processes are forked, after it has imported PyTorch and SGLang once.

    `run`  ─starts→ forkserver.py, which imports, then waits (a driver without a run starts it, too: `handle.py`)
    `run`  ─starts→ fork_worker.py ─asks→ forkserver.py ─forks→ the driver
    raylet ─starts→ fork_worker.py (Ray's `runtime_env.py_executable`) ─asks→ … ─forks→ the worker
    engine ─spawns→ fork_worker.py (`multiprocessing`'s executable) ─asks→ … ─forks→ the scheduler

Ray's core keeps the environment that it was imported with. So the first worker of a run makes the server fork a second
one, which imports Ray and verl with that worker's environment, forks it, the others and their children, and ends with
the raylet. A worker with other variables of Ray's or verl's is forked from the first server, without both.

A fork gets its environment, folder, output, niceness, blocked signals and arguments from its client (`fork_worker.py`),
and has random numbers and a process group of its own. Where its workers would draw the same ids of Ray, the second
server forks none (`ray_ids.py`). A fork ends when its client is killed. A driver, and a process of `multiprocessing`,
also get the descriptors that they were to inherit, under their numbers; the latter takes the process that spawned it
for its parent.

The process is started in the usual way when no server answers, when it cannot fork, and when a variable that is read at
import has another value there. The file is run as a script, so its top imports only the standard library.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Variables that the modules, Python or the C library read when they are loaded.
READ_AT_IMPORT = (
    "DATASETS_", "HF_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTORCH_",
    "TORCH_", "TRANSFORMERS_",
)  # fmt: skip
_READ_WITH_RAY = ("RAY_", "VERL_")  # by Ray's core and verl
# But these are read when they are needed. SGLang's engine sets one of NCCL's before it starts its processes, verl the
# next where its Megatron engine cannot be imported, and the third in its training workers. The others are ours.
_READ_LATER = ("TORCH_NCCL_", "TORCH_CUDA_ARCH_LIST", "RAY_LOCAL_WORLD_SIZE", "VERL_MULTITURN_")
_RAYLET, _JOB = "RAY_RAYLET_PID", "RAY_JOB_ID"
_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
ADDRESS = "VERL_MULTITURN_FORKSERVER"
"""Environment variable of a fork: the address of the server."""
# Words among the names of modules.
EARLY, OF_WORKERS = "--", "--ray"
EVERY = ".*"
"""End of a package's name that means all modules of the package."""
_PR_SET_PDEATHSIG = 1  # `processes/system.py` has it, too, but would bring the whole package into every fork


def main(listener_fd: int, parent: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process for each client, as long as the parent lives.

    Args:
        listener_fd: File descriptor of the listening socket.
        parent: Process id of the parent.
        modules: Names of the modules to import, or of a package and `EVERY`; one that cannot be imported is skipped.
            After `EARLY` come those that a driver does not need: one that asks is forked between their imports. After
            `OF_WORKERS` come those of the second server; without any there is none.
    """
    if not _ends_with(parent):
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the status of a fork cannot be read
    own, of_workers = _parted(modules, OF_WORKERS)
    server = _ForkLoop(socket.socket(fileno=listener_fd), dict(os.environ), of_workers)
    os.environ.pop(_MODELS, None)  # it names ours, which import verl and Ray: a fork registers them itself
    gc.disable()  # a sixth of the time of these imports
    with contextlib.suppress(Exception):  # it has to find its place before a fork has another environment
        importlib.import_module("setproctitle").getproctitle()
    early, late = _parted(own, EARLY)
    _import(early)
    be = None
    for name in late:
        gc.freeze()
        if (be := server.serve_driver()) is not None:
            break
        _import([name])
    (be or server.serve())()


def _serve_workers(listener_fd: int, parent: int, request: dict[str, Any], modules: Sequence[str]) -> None:
    """Be the second server, which a worker's request has made."""
    if not _ends_with(parent):
        return
    _take_environment(request)
    raylet = os.pidfd_open(int(os.environ[_RAYLET]))
    server = _ForkLoop(socket.socket(fileno=listener_fd), dict(os.environ), raylet=raylet)
    from verl_multiturn.cpu_processes.ray_ids import class_ids, draws_alike

    with class_ids():
        _import(modules)
    server.draws_alike = draws_alike()
    server.serve()()


def _ends_with(parent: int) -> bool:
    """Let this process end with its parent, and return whether that still lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _parted(names: Sequence[str], word: str) -> tuple[Sequence[str], Sequence[str]]:
    at = names.index(word) if word in names else len(names)
    return names[:at], names[at + 1 :]


def _import(names: Sequence[str]) -> None:
    for name in names:
        package = name.removesuffix(EVERY)
        with contextlib.suppress(Exception, SystemExit):
            module = importlib.import_module(package)
            if package != name:
                _import([f"{package}.{each.name}" for each in pkgutil.iter_modules(module.__path__)])


class _ForkLoop:
    """The loop that answers clients and forks.

    It sends a client `refused REASON`, or the fork sends it `forked PID`, and the server `ended STATUS` after that.

    Args:
        listener: The listening socket.
        environment: The environment variables with which the modules were imported.
        of_workers: Names of the modules of a second server.
        raylet: Descriptor (pidfd) of the raylet, in the second server.
    """

    def __init__(
        self, listener: socket.socket, environment: dict[str, str], of_workers: Sequence[str] = (), raylet: int = -1
    ) -> None:
        self._listener = listener
        self._environment = environment
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._of_workers, self._raylet = of_workers, raylet
        self.draws_alike = False
        """Whether workers of Ray may give the same ids to their calls."""
        if raylet != -1:
            self._selector.register(raylet, selectors.EVENT_READ)
        self._second: tuple[int, dict[str, str]] | None = None  # process and environment
        self._has_imported = True
        self._waiting: list[tuple[Any, dict[str, Any], list[int]]] = []

    def serve_driver(self) -> Callable[[], None] | None:
        """Fork a driver that waits for it; return None here. Other clients wait for the end of the imports."""
        self._has_imported = False
        while ready := self._selector.select(0):
            if (be := self._answer(ready)) is not None:
                return be
        self._has_imported = True
        return None

    def serve(self) -> Callable[[], None]:
        """Serve clients; return only in a forked process, with the function that is its whole life."""
        gc.collect()
        gc.freeze()  # keeps the memory pages of the loaded modules shared with the forks
        while True:
            while self._waiting:
                if (be := self._fork(*self._waiting.pop(0))) is not None:
                    return be
            if (be := self._answer(self._selector.select())) is not None:
                return be

    def _answer(self, ready: list[tuple[selectors.SelectorKey, int]]) -> Callable[[], None] | None:
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._raylet:
                os._exit(0)
            elif key.data is not None:
                self._end(*key.data)
            elif (be := self._read(key.fileobj)) is not None:
                return be
        return None

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # too many open files; try again when there are fewer
            time.sleep(0.1)
            return
        self._selector.register(client, selectors.EVENT_READ)

    def _read(self, client: Any) -> Callable[[], None] | None:
        """Read a client's request, and fork a process for it; return None here, and in the fork its life."""
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

    def _fork(self, client: Any, request: dict[str, Any], descriptors: list[int]) -> Callable[[], None] | None:
        """Fork a process for a client; return None here, and in the fork its life."""
        try:
            if why := self._why_not(request, [client.fileno(), *descriptors]):
                client.send(f"refused with {why}".encode())
                raise ValueError
            if self._of_workers and _is_rays(request):
                address = f"{request['address']}{OF_WORKERS}"
                if (be := self._second_server(address, request)) is not None:
                    self._drop(client, descriptors)
                    return be
                if self._second is not None and not _other_variables(request["environment"], self._second[1], True):
                    client.send(f"elsewhere {address}".encode())
                    raise ValueError
            pid = os.fork()
        except (OSError, ValueError):
            self._drop(client, descriptors)
            return None
        if pid == 0:
            # The fork reports it itself: a client without an answer, since the server dies, runs its program, too.
            try:
                client.send(f"forked {os.getpid()}".encode())
            except OSError:  # it waits no longer, and has begun its program itself
                os._exit(1)
            self._close()
            client.close()
            return partial(_become, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        for either in (client, process):
            self._selector.register(either, selectors.EVENT_READ, (client, process, pid))
        return None

    def _second_server(self, address: str, request: dict[str, Any]) -> Callable[[], None] | None:
        """Fork the second server unless it lives; return None here, and in the fork its life."""
        if self._second is not None and os.waitpid(self._second[0], os.WNOHANG)[0] == 0:
            return None
        self._second = None
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            Path(address).unlink(missing_ok=True)
            listener.bind(address)
            listener.listen(64)
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                self._close()
                return partial(_serve_workers, listener.detach(), parent, request, self._of_workers)
            self._second = pid, request["environment"]
        return None

    def _why_not(self, request: dict[str, Any], closed: Sequence[int]) -> str:
        """Return the state that a fork that closes these descriptors must not inherit; "": none."""
        with_ray = "ray" in sys.modules and _is_rays(request)
        if other := _other_variables(request["environment"], self._environment, with_ray):
            return f"another {', '.join(other)}"
        closes = {*closed, self._selector.fileno(), *self._selector.get_map()}
        for client, _, descriptors in self._waiting:
            closes |= {client.fileno(), *descriptors}
        for number in request["inherited"]:
            if number not in closes and os.path.exists(f"/proc/self/fd/{number}"):
                return f"descriptor {number} of its own"
        # A fork would not have the threads, and might wait for the lock of one.
        if threads := threading.enumerate()[1:]:
            return f"a thread of its own ({threads[0].name})"
        return "ids of Ray that two workers might share" if with_ray and self.draws_alike else ""

    def _close(self) -> None:
        """Close the server's sockets and descriptors, in a fork."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()
        for other, _, descriptors in self._waiting:
            self._drop(other, descriptors)

    def _end(self, client: socket.socket, process: int, pid: int) -> None:
        """Report to a client how its process ended; if the client ended first, kill the process."""
        if client.fileno() == -1:
            return  # both ended at once
        self._selector.unregister(client)
        self._selector.unregister(process)
        signal.pidfd_send_signal(process, signal.SIGKILL)  # has no effect on a process that has ended
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(process)
        with client, contextlib.suppress(OSError):
            client.send(f"ended {status}".encode())


def _is_rays(request: dict[str, Any]) -> bool:  # a worker of Ray, or spawned by one
    return {_RAYLET, _JOB} <= request["environment"].keys() and not request["is_driver"]


def _other_variables(environment: Mapping[str, str], other: Mapping[str, str], with_ray: bool) -> list[str]:
    """Return the names of the variables that are read at import and differ between two environments."""
    read = READ_AT_IMPORT + (_READ_WITH_RAY if with_ray else ())
    names = sorted(name for name in {*environment, *other} if name.startswith(read))
    return [name for name in names if not name.startswith(_READ_LATER) and environment.get(name) != other.get(name)]


def _take_environment(request: dict[str, Any]) -> None:
    """Give this process a client's environment variables, and the path that follows from them."""
    before, after = (each.get("PYTHONPATH", "").split(os.pathsep) for each in (os.environ, request["environment"]))
    sys.path[:] = [*filter(None, after), *(folder for folder in sys.path if folder not in (*before, *after))]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[ADDRESS] = request["address"]


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run a client's program in this fork, as a new Python process would, with the client's descriptors."""
    gc.enable()
    os.setpgid(0, 0)  # when a worker dies, Ray kills its whole process group
    _take(dict(zip([0, 1, 2, *request["inherited"]], descriptors, strict=True)))
    _take_environment(request)
    os.chdir(request["folder"])
    with contextlib.suppress(OSError):  # a niceness below the server's may not be allowed
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"], encoding="utf-8")
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if fingerprints := sys.modules.get("datasets.fingerprint"):  # names of files in the cache
        fingerprints.fingerprint_rng.seed()
    _open_streams()
    if request["spawner"] is not None:
        from verl_multiturn.cpu_processes.engine_child import register_models, take_for_parent

        take_for_parent(request["spawner"])
        register_models(os.environ.get(_MODELS))
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
        # its threads and its `atexit` functions still need it.
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    elif program == "-c":
        exec(compile(arguments[0], "<string>", "exec"), vars(own))
    else:
        sys.argv = words
        runpy.run_path(program, run_name="__main__")


def _open_streams() -> None:
    """Make Python's streams anew: those of the server are of another kind of file.

    With PYTHONUNBUFFERED a run's log has the order of both streams, and the last output of a process that dies.
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
