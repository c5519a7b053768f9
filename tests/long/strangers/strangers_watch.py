"""Run commands under a watch: each in a process that is forked from one that has imported the commands' modules.

    python -P -m tests.long.strangers.strangers_watch MODULE…

It reads a job a line from standard input, and answers each with a line: the process's opens, starts, imports and
connections, by Python's own audit events, how it ended, and the most memory that it held. Starts of programs,
connections and look-ups that the honest folder did not need are noted, and then refused: nothing hostile runs.

A process has not ended in time when its CPU seconds are spent, or when it sleeps and uses none at all, as one does that
opens a pipe. Time on the wall counts for neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
import traceback
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "os.forkpty", "pty.spawn")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
CHANGES = {
    "os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.link": 1, "os.symlink": 1, "os.truncate": 0,
    "os.chmod": 0, "os.utime": 0,
}  # fmt: skip
"""Events of changes to files, and which of their arguments is changed."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ACCESS, OPEN, CHANGE = 0x1, 0x20, 0x2 | 0x40 | 0x80 | 0x100 | 0x200
"""Bits of Linux' inotify: read, opened, and written, moved, made or removed."""
IDLE_S = 4.0
"""Seconds of sleep without any use of the processor, after which nothing will come."""
TOO_MUCH = 3 << 30
"""Bytes above the parent's, at which a process is ended."""
STOPS = ("verl", "ray")
"""Packages whose import shows that a command goes on that should have refused."""
WENT_ON = 77
_TICK = 1 / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Import, and serve jobs until the input ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    from verl_multiturn.cli.main import main as command

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(json.dumps(watched(json.loads(line), command)) + "\n")
    return 0


def watched(job: dict[str, Any], command: Callable[[], object]) -> dict[str, Any]:
    """Run a job, and return the observations.

    Args:
        job: `argv`, `cwd`, `out` (a folder of its own), `allowed` (events of the honest folder), `cpu_s`, `secrets` (a
            folder whose files must not be opened), and `kind`: `plain`, `view` or `refuse`.
        command: The entry point of the command line.
    """
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    opened = Opened(Path(job["secrets"]))
    before = _own_memory(os.getpid())
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = _child(job, command)
        finally:
            os._exit(status)
    began = time.monotonic()
    waited = wait_for(pid, job["cpu_s"], before)
    events = [json.loads(line) for line in (out / "events").read_text(encoding="utf-8").splitlines() if line]
    return {
        **waited,
        "wall_s": time.monotonic() - began,
        "events": events,
        "secrets": opened.close(),
        "before_mb": before >> 20,
    }


class Opened:
    """Notes which files of a folder anybody opens, in whichever language: Linux' inotify."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            self._libc.inotify_add_watch(self._descriptor, os.fsencode(each), ACCESS | OPEN | CHANGE)

    def close(self) -> list[tuple[str, int]]:
        """Return name and kind of the changes to the files in the folder."""
        found, data = [], b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._descriptor, 1 << 20)
        os.close(self._descriptor)
        place = 0
        while place < len(data):
            _, mask, _, length = struct.unpack_from("iIII", data, place)
            name = data[place + 16 : place + 16 + length].rstrip(b"\0").decode(errors="replace")
            if name and not mask & 0x40000000:  # listing a folder opens it, and shows nothing of its files
                found.append((name, mask))
            place += 16 + length
        return sorted(set(found))


def _child(job: dict[str, Any], command: Callable[[], object]) -> int:
    """Run a command in this process, which was forked for it, and return its exit status."""
    out = Path(job["out"])
    os.setsid()
    seconds = int(job["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        made = os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(made, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(job["cwd"])
    for source, name in job.get("planted", ()):  # a name with this process's number, which an attacker plants for all
        os.symlink(source, name.replace("PID", str(os.getpid())))
    if job["kind"] == "view":
        threading.Thread(target=_browse, args=(out / "stdout",), daemon=True).start()
    if job.get("fresh"):  # later imports are the command's own
        program = [sys.executable, "-P", "-c", "from verl_multiturn.cli.main import main; main()", *job["argv"]]
        (out / "events").touch()
        os.execv(sys.executable, program)
    sys.argv = ["verl-multiturn", *job["argv"]]
    events = os.open(out / "events", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    sys.addaudithook(_hook(job, events, out, {*sys.modules}))
    try:
        if job.get("script"):
            _run_script(job["script"], job["argv"])
        else:
            command()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _run_script(path: str, argv: Sequence[str]) -> None:
    import runpy

    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _hook(job: dict[str, Any], events: int, out: Path, known: set[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the hook that notes events, and refuses those that the honest folder did not need."""
    allowed = {tuple(each) for each in job["allowed"]}
    roots = tuple(job["roots"])
    is_honest, may_not_go_on, own = job["honest"], job["kind"] == "refuse", os.fspath(out)
    guests: set[str] = set()

    def note(kind: str, what: str) -> bool:
        os.write(events, json.dumps([kind, what]).encode() + b"\n")
        return is_honest or (kind, what) in allowed

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if threading.current_thread().name == "browser":
            return
        if event in STARTS:
            if not note("start", _program(event, given)):
                raise PermissionError(f"{event}: not in this benchmark")
        elif event in CONNECTS:
            where = _address(event, given)
            if where and not note("connect", where):
                raise OSError(101, "no network in this benchmark")
        elif event == "import":
            root = str(given[0]).partition(".")[0]
            if may_not_go_on and root in STOPS:
                note("went on", root)
                os._exit(WENT_ON)
            if root not in known and root not in guests:
                guests.add(root)
                note("import", root)
        elif event == "exec":
            name = str(getattr(given[0], "co_filename", ""))
            if name.startswith(roots):
                note("code", name)
        elif event == "pickle.find_class":
            note("class", f"{given[0]}.{given[1]}")
        elif event == "open":
            _note_opened(given, note, own)
        elif event in CHANGES:
            _note_change(given[CHANGES[event]], note, own)

    return hook


def _note_opened(given: tuple[Any, ...], note: Callable[[str, str], bool], own: str) -> None:
    path, mode, flags = given
    if isinstance(path, int) or path is None:
        return
    is_written = bool(flags & WRITES) if isinstance(flags, int) else bool(mode and set(str(mode)) & set("wax+"))
    if is_written:
        _note_change(path, note, own)


def _note_change(path: Any, note: Callable[[str, str], bool], own: str) -> None:
    if isinstance(path, int) or path is None:
        return
    name = os.path.realpath(os.fsdecode(path))
    if not name.startswith((own, "/dev/", "/proc/")):
        note("write", name)


def _program(event: str, given: tuple[Any, ...]) -> str:
    if event in ("os.fork", "os.forkpty"):
        return event
    word = given[0]
    return os.fsdecode(word) if isinstance(word, str | bytes | os.PathLike) else repr(word)


def _address(event: str, given: tuple[Any, ...]) -> str:
    """Return where a connection goes, or which name is looked up; "": within this machine's own sockets."""
    if event in ("socket.connect", "socket.sendto"):
        address = given[1]
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) and len(address) >= 2 else ""
    return "" if given[0] in (None, "", b"") else str(given[0])


def _browse(stdout: Path) -> None:
    """Read the viewer's pages as a browser does, and end it."""
    threading.current_thread().name = "browser"
    address = ""
    for _ in range(6_000):
        lines = stdout.read_text(errors="replace").splitlines()
        if address := next((line for line in lines if line.startswith("http://")), ""):
            break
        time.sleep(0.05)
    if address:
        for name in ("meta", "run", "findings", "open", "step?step=1", "step?step=2&validation=1"):
            _get(f"{address}api/{name}")
        told = _get(f"{address}api/table?limit=200") or {}
        for row in told.get("rows", [])[:8]:
            _get(f"{address}api/record?id={urllib.parse.quote(row['request_id'], errors='surrogatepass')}")
        stdout.with_name("browser").write_text(json.dumps(told))
        os.kill(os.getpid(), signal.SIGTERM)


def _get(address: str) -> Any:
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=600) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError):
        return None


def wait_for(pid: int, cpu_s: float, before: int) -> dict[str, Any]:
    """Wait for a process, end it when it hangs or takes too much, and return its end, CPU seconds and most memory.

    Args:
        pid: The process, a child of this one.
        cpu_s: CPU seconds that the process has been given.
        before: Bytes of memory that count for nothing: those of a parent that was forked.
    """
    idle_since, used, why, most = time.monotonic(), -1.0, "", before
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        most = max(most, _own_memory(pid))
        now, (state, seconds) = time.monotonic(), _state(pid)
        if state not in "S" or seconds != used:
            idle_since, used = now, seconds
        if now - idle_since > IDLE_S:
            why = "it sleeps, and nothing comes"
        elif most - before > TOO_MUCH:
            why = "memory"
        if why:
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            break
        time.sleep(0.02)
    ended = os.waitstatus_to_exitcode(status)
    if not why and ended in (-signal.SIGXCPU, -signal.SIGKILL):
        why = f"{cpu_s} CPU seconds are spent"
    cpu = round(usage.ru_utime + usage.ru_stime, 2)
    return {"status": ended, "why": why, "memory_mb": (most - before) >> 20, "cpu_s": cpu}


def _state(pid: int) -> tuple[str, float]:
    """Return the state of a process, and the CPU seconds of all its threads."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "R", 0.0
    return words[0], (int(words[11]) + int(words[12])) * _TICK


def _own_memory(pid: int) -> int:
    """Return the bytes that a process holds in memory, without those of files.

    The kernel drops pages of files and reads them again. How many of its libraries' a process has depends on the cache.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


if __name__ == "__main__":
    sys.exit(main())
