"""A running forkserver (`forkserver.py`), and the commands that start a process from it."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_multiturn.cpu_processes.forkserver import ADDRESS, EARLY, EVERY, OF_WORKERS

# Modules that take long to import. Ray is not among them, nor importers of Ray, such as verl: Ray's core reads the
# environment when it is imported, and each worker has its own environment.
DRIVERS_MODULES = (
    "tensordict",
    "transformers.modeling_utils",
    "datasets",
    # The largest parts of the other imports of verl and our plugin.
    "hydra",
    "verl_multiturn.interactions.running.registry",
    "verl_multiturn.proxy.endpoint",
    "verl_multiturn.records.write.step_writer",
    "verl_multiturn.replay.engine",
)
# SGLang imports the modules of all its models before it runs one.
WORKERS_MODULES = ("peft", "sglang.srt.entrypoints.http_server", f"sglang.srt.models{EVERY}")
_MODULES_WITH_RAY = (
    "ray",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl_multiturn.verl_bridge.workers.manager",
    "verl_multiturn.verl_bridge.servers.server",
)
RUNS_MODULES = (*DRIVERS_MODULES, EARLY, *WORKERS_MODULES, OF_WORKERS, *_MODULES_WITH_RAY)
"""Modules of a run: its driver is forked before those of the workers are imported, and these have Ray and verl, too."""
SLOW_MODULES = (*DRIVERS_MODULES, *WORKERS_MODULES)
_FOLDER = Path(__file__).absolute().parent
SETUP_WORKER = _FOLDER / "fork_worker.py"
"""Program that Ray may start in place of its own `setup_worker.py`."""
_CLIENT = str(SETUP_WORKER)
# Runs a file as a script, without its folder on the path, and without an interpreter flag that forks would inherit.
# `runpy` would give a fork, whose program is `__main__`, another `__main__` again before it ends.
_SCRIPT = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); del sys.argv[0]; "
    "exec(compile(open(sys.argv[0], 'rb').read(), sys.argv[0], 'exec'))"
)
# The program that `multiprocessing` starts in place of Python. The kernel takes one argument after the interpreter.
_SPAWNED = """#!{python} -IS
import runpy, sys
sys.argv[1:1] = ["--spawned", {address!r}]
runpy.run_path({client!r}, run_name="__main__")
"""

logger = logging.getLogger(__name__)


class ForkServer:
    """A running server process, which ends with the thread that started it.

    Args:
        modules: Names of the modules that the server imports. A module that cannot be imported is skipped; the worker
            that imports it reports the error.
        environment: Environment variables with which they are imported; None: those of this process.
        own_session: Whether the server begins a session, in which its forks are, too.

    Attributes:
        environment: As given.

    Raises:
        OSError: The socket cannot be created, or the process cannot be started.
    """

    def __init__(
        self,
        modules: Sequence[str] = SLOW_MODULES,
        environment: Mapping[str, str] | None = None,
        own_session: bool = False,
    ) -> None:
        self.environment = dict(os.environ if environment is None else environment)
        self._folder = tempfile.TemporaryDirectory(prefix="verl-multiturn-", ignore_cleanup_errors=True)
        self.address = os.path.join(self._folder.name, "forkserver")
        """Path of its socket."""
        try:
            write_spawned(self.address)
            self._process = _start(self.address, modules, self.environment, own_session)
        except OSError:
            self._folder.cleanup()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server, and the number of its own session."""
        return self._process.pid

    @property
    def executable(self) -> str:
        """Command line that Ray starts in place of Python, quoted for a shell."""
        return shlex.join(fork_command(self.address))

    def is_alive(self) -> bool:
        """Return whether the server still runs."""
        return self._process.poll() is None

    def fork_of(self, client: int) -> int:
        """Return the process id of the fork that a client runs a module in; its own where it runs that itself.

        Args:
            client: Process id of the client, which may have ended.
        """
        try:
            return int(Path(f"{self.address}.{client}").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return client

    def close(self) -> None:
        """End the server; its forks go on, but for processes of SGLang, which end with who forked them."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def write_spawned(address: str) -> None:
    """Write the program that `multiprocessing` starts in place of Python.

    Args:
        address: Where the server listens, or will.

    Raises:
        OSError: The folder of the address cannot be written.
    """
    spawned = executable_of(address)
    spawned.write_text(_SPAWNED.format(python=sys.executable, address=address, client=_CLIENT), encoding="utf-8")
    spawned.chmod(0o700)
    if not _runs(spawned):  # on a file system without programs, or with a path that no kernel takes
        spawned.unlink()


def listen_at(address: str) -> socket.socket:
    """Return the socket of a server that will listen at an address.

    Raises:
        OSError: The socket cannot be created.
    """
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


def _start(
    address: str, modules: Sequence[str], environment: Mapping[str, str], own_session: bool
) -> subprocess.Popen[bytes]:
    with listen_at(address) as listener:
        number = listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(_FOLDER / "forkserver.py"), str(number), str(os.getpid()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            env={**environment, "SPT_NOENV": "1"},  # a process's title must not overwrite its environment
            process_group=None if own_session else 0,  # Ctrl-C must reach only who started it
            start_new_session=own_session,
        )


def fork_command(address: str) -> list[str]:
    """Return the command that replaces Python, and asks the server at an address for a fork."""
    return [sys.executable, "-I", "-S", _CLIENT, address]


def executable_of(address: str) -> Path:
    """Return the program that `multiprocessing` may start in place of Python, for the server at an address."""
    return Path(address).with_name("spawned")


@functools.cache
def forkserver() -> ForkServer | None:
    """Return the server of this process, which the first call starts; None when it cannot be started."""
    try:
        return ForkServer()
    except OSError as error:
        logger.warning("no forkserver (%s): each worker of the run imports everything itself", error)
        return None


def ray_executable() -> str | None:
    """Return the program that a run's Ray starts in place of Python; None: none. A driver asks for it.

    A driver that is a fork itself has its own server fork the workers, too. Others start one.
    """
    if address := os.environ.get(ADDRESS):
        return shlex.join(fork_command(address))
    server = forkserver()
    return None if server is None else server.executable
