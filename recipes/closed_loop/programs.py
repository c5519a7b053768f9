"""The programs that a loop starts, each in a process of its own: `verl-multiturn …`, the customers, the gateway."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.system import end_with_parent

_OURS = [sys.executable, "-m", "verl_multiturn.cli"]
# Those of torchrun, which starts the loop itself; the trainers that it starts would take them for their own.
_OF_TORCHRUN = re.compile(r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_.*|MASTER_(ADDR|PORT)|TORCH.*|VERL_FILE_LOGGER_PATH")
_READY = re.compile(r"gateway (http://\S+)")
_TAIL = 25
_LOOK_S = 0.2
_START_S = 600.0
"""Seconds in which a gateway has to be ready."""
_END_S = 120.0
"""Seconds for the end of a gateway, which writes its sessions."""


class Programs:
    """Starts programs, whose output goes into files of a folder.

    Args:
        logs: The folder.
        key: The admin key of the gateways.
        key_name: Name of the environment variable that holds it.
    """

    def __init__(self, logs: Path, key: str, key_name: str) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._key_name = logs, key_name
        own = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)}
        self._environment = {**own, key_name: key}

    def ours(self, name: str, *words: str | Path) -> dict[str, Any]:
        """Run `verl-multiturn` with words, and return the JSON object in its last line.

        Raises:
            ConfigError: It failed, or its last line is none.
        """
        said = self.run(name, [*_OURS, *map(str, words)])
        try:
            found = json.loads(said.strip().splitlines()[-1])
        except (IndexError, ValueError):
            raise self._failed(name, "gave no JSON object") from None
        return dict(found)

    def customers(self, name: str, *words: str | Path) -> None:
        """Run the customers."""
        self.run(name, [sys.executable, "-m", "recipes.closed_loop.customers", *map(str, words)])

    def run(self, name: str, command: Sequence[str]) -> str:
        """Run a command, and return its output.

        Args:
            name: Name of its log.
            command: The command.

        Raises:
            ConfigError: Its exit status is not 0.
        """
        with self._log(name).open("w+", encoding="utf-8", errors="replace") as log:
            # Not `run`, which kills at once: a run ends its own processes when it is asked to.
            with self._begun(command, log) as process:
                try:
                    status = process.wait()
                except BaseException:
                    process.terminate()
                    raise
            if status:
                raise self._failed(name, f"ended with exit status {status}")
            log.seek(0)
            return log.read()

    def _begun(self, command: Sequence[str], log: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env=self._environment,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _failed(self, name: str, how: str) -> ConfigError:
        path = self._log(name)
        tail = "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])
        return ConfigError(f"{name} {how}; its log is {str(path)!r}, and the same command goes on from here:\n{tail}")

    def gateway(self, name: str, model: Path, records: Path, words: Sequence[str]) -> Gateway:
        """Start a gateway, and return it when it is ready.

        Args:
            name: Name of its log.
            model: Folder of the model that it serves first.
            records: Its folder of records.
            words: Further words of its command.

        Raises:
            ConfigError: It ended, or is not ready in time.
        """
        command = [*_OURS, "gateway", str(model), "--records", str(records), "--admin-key-env", self._key_name, *words]
        path = self._log(name)
        with path.open("w", encoding="utf-8") as log:
            process = self._begun(command, log)
        until = time.monotonic() + _START_S
        try:
            while not (found := _READY.search(path.read_text(encoding="utf-8", errors="replace"))):
                if (status := process.poll()) is not None:
                    raise self._failed(name, f"ended with exit status {status}")
                if time.monotonic() > until:
                    raise self._failed(name, f"was not ready after {_START_S:g} s")
                time.sleep(_LOOK_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        return Gateway(process, found[1], partial(self._failed, name))


class Gateway:
    """A gateway that runs.

    Args:
        process: Its process.
        url: Its address.
        failed: Makes the error of a gateway that ended in another way than it should.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, failed: Any) -> None:
        self._process, self.url, self._failed = process, url, failed

    def stop(self) -> None:
        """End it, with its sessions.

        Raises:
            ConfigError: It ended before, or does not end.
        """
        if (status := self._process.poll()) is not None:
            raise self._failed(f"ended by itself with exit status {status}")
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise self._failed(f"did not end {_END_S:g} s after SIGTERM, and was killed") from None

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.stop()


def read_state(path: Path) -> dict[str, Any]:
    """Return the steps of a loop that are done, with their results, from its file; {}: none is."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the steps of a loop that are done; a kill leaves the file before."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
