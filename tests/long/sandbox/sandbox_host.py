"""The host that the attacks of `benchmarks.sandbox_attacks` are made on: its prey, and its state afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).resolve().parents[3]
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGIO)


class Host:
    """The prey, and the checks of its state.

    Args:
        everywhere: Whether the programs must write to the system's folders too.
    """

    def __init__(self, everywhere: bool = True) -> None:
        self._everywhere = everywhere
        self.secret = secrets.token_hex(16)
        self.token = f"atk{secrets.token_hex(5)}"
        os.environ["SANDBOX_ATTACK_SECRET"] = self.secret
        self._folder = Path(tempfile.mkdtemp(prefix="prey-"))
        self._folder.chmod(0o755)
        self._public = self._folder / "public"
        self._public.mkdir()
        self._public.chmod(0o777)
        self._files = [self._folder / "secret", Path.home() / f".prey-{self.token}"]
        for path in self._files:
            path.write_text(self.secret)
            path.chmod(0o666)
        self._listeners = self._listen()
        victim = "import os, time; kept = dict(os.environ); print(flush=True); time.sleep(9999)"
        self._victim = subprocess.Popen([sys.executable, "-c", victim], stdout=subprocess.PIPE)
        assert self._victim.stdout is not None
        self._victim.stdout.readline()
        self.signals: list[int] = []
        self._handlers = {
            number: signal.signal(number, lambda received, _: self.signals.append(received)) for number in _SIGNALS
        }
        self._python = {path: path.stat().st_mtime_ns for path in (Path(os.__file__), Path(sys.executable).resolve())}
        self._started = time.time() - time.monotonic()
        self._facts = self._unchanging()

    def _listen(self) -> list[socket.socket]:
        tcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        tcp.bind(("0.0.0.0", 0))
        udp.bind(tcp.getsockname())
        path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        path.bind(str(self._folder / "socket"))
        (self._folder / "socket").chmod(0o777)
        abstract.bind(f"\0{self.token}")
        for listener in (tcp, path, abstract):
            listener.listen()
        for listener in (tcp, udp, path, abstract):
            listener.setblocking(False)
        return [tcp, udp, path, abstract]

    def known(self) -> str:
        """Return the lines of Python that give a program the prey's place."""
        own = [
            a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET
        ]
        facts = {
            "TOKEN": self.token, "PID": os.getpid(), "VICTIM": self._victim.pid, "HOSTNAME": socket.gethostname(),
            "PORT": self._listeners[0].getsockname()[1], "ADDRESSES": own, "UNIX": str(self._folder / "socket"),
            "SECRET_FILE": str(self._files[0]), "HOME_FILE": str(self._files[1]), "CHECKOUT": str(ROOT),
            "PUBLIC": str(self._public), "PLACES": self._places(),
        }  # fmt: skip
        return "".join(f"{name} = {value!r}\n" for name, value in facts.items())

    def _places(self) -> list[str]:
        if not self._everywhere:
            return [str(self._public)]
        own = [
            str(self._public),
            str(ROOT),
            str(Path.home()),
            sys.prefix,
            sys.base_prefix,
            os.path.dirname(os.__file__),
        ]
        system = [
            "tmp",
            "var/tmp",
            "dev/shm",
            "run",
            "etc",
            "usr/lib",
            "usr/bin",
            "opt",
            "home",
            "mnt",
            "dev",
            "sys",
            "",
        ]
        return [*own, *(f"/{name}" for name in system)]

    def _unchanging(self) -> dict[str, object]:
        return {
            "mounts": Path("/proc/self/mountinfo").read_text(),
            "host name": socket.gethostname(),
            "clock": self._clock(),
            "limits": Path("/proc/self/limits").read_text(),
            "environment": dict(os.environ),
            "core pattern": Path("/proc/sys/kernel/core_pattern").read_text(),
        }

    def _clock(self) -> float:
        """Return the time at which the machine was started.

        The result is the time first seen, unless the clock was set since then.
        """
        now = time.time() - time.monotonic()
        return self._started if abs(now - self._started) < 2 else now

    def marked_processes(self) -> list[psutil.Process]:
        """Return the processes of an attack that still run; they have the token as their name."""
        return [process for process in psutil.process_iter() if self._name(process) == self.token]

    @staticmethod
    def _name(process: psutil.Process) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{process.pid}/comm").read_text().strip()
        return ""

    def harm(self) -> list[str]:
        """Return the attacks' effects on the host so far, one text for each harm."""
        found = [f"{path} changed" for path in self._files if not path.exists() or path.read_text() != self.secret]
        found += [f"{path} changed" for path, when in self._python.items() if path.stat().st_mtime_ns != when]
        found += [f"{place} was written to" for place in self._places() if os.path.lexists(f"{place}/{self.token}")]
        found += [f"{path} appeared" for path in self._public.iterdir()]
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(10)
                else:
                    listener.accept()[0].close()
                found.append(f"{listener.getsockname()} was reached")
        status = Path(f"/proc/{self._victim.pid}/status").read_text() if self._victim.poll() is None else ""
        if not re.search(r"State:\t[SRD]", status) or "TracerPid:\t0" not in status:
            found.append("the victim was touched")
        if self.signals:
            found.append(f"we got the signals {self.signals}")
        found += [f"{name} changed" for name, value in self._unchanging().items() if value != self._facts[name]]
        found += [f"process {process.pid} is left" for process in self.marked_processes()]
        return found

    def close(self) -> None:
        """Remove the prey, and all files of an attack."""
        for process in self.marked_processes():
            process.kill()
        self._victim.kill()
        self._victim.communicate()
        for listener in self._listeners:
            listener.close()
        for place in (*self._places(), "/tmp", "/dev/shm", "/"):  # the programs themselves name the last three
            with contextlib.suppress(OSError):
                os.unlink(f"{place}/{self.token}")
        shutil.rmtree(self._folder)
        self._files[1].unlink(missing_ok=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        del os.environ["SANDBOX_ATTACK_SECRET"]

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
