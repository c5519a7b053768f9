"""Requirements of a start of Ray, and the cause of one that failed.

Ray 2.60's driver waits 30 s for its raylet, and the raylet 15 s for its agents; neither can be changed. On a busy
machine the raylet dies meanwhile. Only its own log reports it.

Invariants:
- Ray is not imported: `doctor` and the launcher ask before anything heavy is;
- a run that joins a cluster needs none of these places.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError

_SOCKET = "/session_2026-01-31_12-00-00_123456_{pid}/sockets/plasma_store"
_SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
# Logs of a session, the one that knows most first; a line of one: time, severity, ids, process, place, text.
_LOGS = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
_LINE = re.compile(r"^\[[^\]]* (?P<severity>[CEF]) \d+ \d+\] \([^)]*\) \S+:\d+:\s*(?P<text>.*\S)")
_CHECK = re.compile(r".*Check failed: \S+\s*")
_LATE = re.compile("timed out|deadline exceeded|overloaded|failed to start the dashboard", re.IGNORECASE)
_TAIL_BYTES = 65_536
BUSY = 3.0
"""Load of a core from which on a start of Ray is in doubt: 11 of 12 starts failed at 4 to 8."""


def joins_cluster(ray_init: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether a run joins a Ray that was started before.

    Args:
        ray_init: The section `ray_kwargs.ray_init` of the configuration.
        environment: Environment variables of the run.
    """
    address = ray_init.get("address")
    if address in (None, "auto"):
        address = environment.get("RAY_ADDRESS") or address
    return address not in (None, "", "local")


def temp_folder(ray_init: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[Path, str]:
    """Return the folder of Ray's sessions, and the setting that names it."""
    if given := ray_init.get("_temp_dir"):
        return Path(given), f"ray_kwargs.ray_init._temp_dir={str(given)!r}"
    for name in ("RAY_TMPDIR", "TMPDIR"):  # an empty value counts
        if name in environment:
            return Path(environment[name]) / "ray", f"{name}={environment[name]!r}"
    return Path("/tmp/ray"), "RAY_TMPDIR, which is not set"


def require_places(ray_init: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse a start of Ray that cannot work here.

    Args:
        ray_init: As for `problems`.
        environment: As for `problems`.

    Raises:
        ConfigError: A place that Ray needs cannot be written, or its path is too long.
    """
    for problem in problems(ray_init, environment):
        raise ConfigError(problem)


def problems(ray_init: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the problems that keep Ray from starting here: the fault, "; " and the remedy.

    Args:
        ray_init: The section `ray_kwargs.ray_init` of the configuration.
        environment: Environment variables of the run.
    """
    if joins_cluster(ray_init, environment):
        return
    yield from _token(environment)
    folder, setting = temp_folder(ray_init, environment)
    needed = len(os.fsencode(folder.absolute())) + len(_SOCKET.format(pid=os.getpid()))
    if why := _unwritable(folder):
        yield f"{setting}: Ray cannot write its sessions there ({why}); set RAY_TMPDIR to a folder that can be written"
    elif needed > _SOCKET_BYTES:
        yield (
            f"{setting}: Ray's sockets there would have paths of {needed} bytes, and {_SOCKET_BYTES} are possible; set "
            "RAY_TMPDIR to a shorter path"
        )


def _token(environment: Mapping[str, str]) -> Iterator[str]:
    """Look for the token of a new cluster: Ray makes one in the home folder where there is none."""
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token" or environment.get("RAY_AUTH_TOKEN"):
        return
    if named := environment.get("RAY_AUTH_TOKEN_PATH"):
        if not _has_content(Path(named)):
            yield f"RAY_AUTH_TOKEN_PATH={named!r} is no file with a token; write one, or unset it"
        return
    home = environment.get("HOME")
    folder = (Path(home) if home is not None else Path.home()) / ".ray"
    if not _has_content(folder / "auth_token") and (why := _unwritable(folder)):
        yield (
            f"HOME={home!r}: Ray cannot write its token to {str(folder)!r} ({why}); set HOME to a folder that can be "
            "written, or RAY_AUTH_MODE=disabled where nobody else can reach this machine"
        )


def _has_content(path: Path) -> bool:
    try:
        return bool(path.read_bytes().strip())
    except OSError:
        return False


def _unwritable(folder: Path) -> str | None:
    """Return why no file can be made in a folder, which need not exist; None: one can."""
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each) or each == each.parent)
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions prove little: root, a full or read-only disk
            return None
    except OSError as error:
        return f"{there}: {error.strerror}"


def load_text() -> tuple[str, bool]:
    """Return load and cores of this machine as text, and whether a start of Ray is in doubt."""
    now, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load {now:.0f} on {cores} cores", now / cores >= BUSY


def is_late(log: str) -> bool:
    """Return whether the log of a start that ended in Ray shows that a part was late."""
    return _LATE.search(log) is not None


def cause_in(folder: Path, since: float, process: int | None) -> str | None:
    """Return the cause of a failed start in Ray's own logs, and its file; None: no cause.

    Args:
        folder: Folder of Ray's sessions.
        since: Time when the process that started Ray began, in seconds since the epoch.
        process: Its process id, which ends the session's name; None: not known. Where no session has it, the newest
            one counts.
    """
    sessions = [path for path in folder.glob("session_*_*") if not path.is_symlink() and path.stat().st_mtime >= since]
    own = [path for path in sessions if path.name.endswith(f"_{process}")]
    for session in sorted(own or sessions, key=lambda path: path.name)[-1:]:
        for severities in ("CF", "E"):
            for name in _LOGS:
                if text := _last(session / "logs" / name, severities):
                    return f"{text} ({session / 'logs' / name})"
    return None


def _last(log: Path, severities: str) -> str | None:
    """Return the last line of some severities in a log of Ray's, without the prefix of every such line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    found = [line for line in map(_LINE.match, lines) if line is not None and line["severity"] in severities]
    return _CHECK.sub("", found[-1]["text"]) if found else None
