"""The sandbox when the code, the zygote or the parent misbehaves; and attacks, with a check that can fail."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, child_processes, has_ended
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.sandbox import Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings

LIMITS = {"timeout_s": 60, "cpu_s": 1, "memory_mb": 128, "disk_mb": 16, "processes": 24, "pool": 1}


BURN = """
import os, time
for _ in range(1000):
    if os.fork() == 0:
        until = time.process_time() + 0.03
        while time.process_time() < until: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
IGNORED = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
NO_ZOMBIES = """
import ctypes
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p)]
ctypes.CDLL(None).sigaction(17, ctypes.byref(Action(flags=2)), None)  # SA_NOCLDWAIT
"""
DEAD_LEADERS = """
import ctypes, os, platform, threading, time
libc = ctypes.CDLL(None)
def leave(work):
    if os.fork() == 0:
        threading.Thread(target=work).start()
        libc.syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit, of the main thread alone
"""
MAP = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mprotect.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
"""


@pytest.fixture
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SandboxSettings(**LIMITS)) as pool:
        yield pool


@pytest.mark.parametrize(
    ("code", "stopped"),
    [
        ("while True: pass", "after 1 s of CPU time"),
        ("import os\nos.fork()\nos.fork()\nwhile True: pass", "after 1 s of CPU time"),
        (
            "import os\nwhile True:\n    if os.fork() == 0: os._exit(sum(range(10 ** 6)) % 2)\n    os.wait()",
            "of CPU time",
        ),
        (
            "import os, time\nfor _ in range(6):\n    if os.fork() == 0: break\n"
            "b = os.urandom(1 << 20) * 60\ntime.sleep(60)",
            "more than 128 MB of memory",
        ),
        ("while True: print('x' * 10000)", "it printed more than 8 MB"),
        (
            "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\n"
            "kept = [os.pipe() for _ in range(110)]\ntime.sleep(60)",
            "more than 512 files, pipes and sockets",
        ),
        (f"{IGNORED}\n{BURN}", "after 1 s of CPU time"),
        (f"{NO_ZOMBIES}\n{BURN}", "after 1 s of CPU time"),
        (
            "import socket\nl = socket.socket(socket.AF_UNIX); l.bind('\\0x'); l.listen(4096)\nwhile True:\n"
            "    s = socket.socket(socket.AF_UNIX); s.setblocking(False); s.connect('\\0x')\n"
            "    try:\n        while True: s.send(bytes(30000))\n    except OSError: s.close()",
            "more than 128 MB of memory",
        ),
        (
            "import socket\nkept = [socket.socketpair() for _ in range(9)]\nfor n in range(2000):\n"
            "    a, b = socket.socketpair(); socket.send_fds(kept[n % 9][0], [b'x'], [a.fileno()])\n"
            "    a.close(); b.close()\n    if n == 200: import time; time.sleep(60)",
            "more than 128 MB of memory",
        ),
        (
            "import socket\nkept = []\nfor n in range(99):\n"
            "    r = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); r.bind(f'\\0{n}'); kept.append(r)\n"
            "    for _ in range(9):\n        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            "        s.sendto(bytes(100000), f'\\0{n}'); s.close()\nimport time; time.sleep(60)",
            "more than 128 MB of memory",
        ),
        (
            f"{DEAD_LEADERS}\ndef work(): kept = os.urandom(1 << 20) * 40; time.sleep(600)\n"
            "for _ in range(5): leave(work)\ntime.sleep(600)",
            "more than 128 MB of memory",
        ),
        (
            f"{DEAD_LEADERS}\ndef work(): kept = [os.pipe() for _ in range(100)]; time.sleep(600)\n"
            "for _ in range(4): leave(work)\ntime.sleep(600)",
            "more than 512 files, pipes and sockets",
        ),
        (  # one page in each gigabyte, mapped and read (MAP_POPULATE): two pages of page tables each
            f"{MAP}\nfor i in range(30000): libc.mmap((1 << 44) + (i << 30), 4096, 1, 0x108022, -1, 0)\n"
            "time.sleep(600)",
            "more than 128 MB of memory",
        ),
        (  # mappings of one page each, which forks copy
            f"{MAP}\nstart = libc.mmap(None, 30000 << 12, 0, 0x22, -1, 0)\n"
            "for i in range(0, 30000, 2): libc.mprotect(start + (i << 12), 4096, 1)\n"
            "for _ in range(23):\n    if os.fork() == 0: break\ntime.sleep(600)",
            "more than 128 MB of memory",
        ),
        (  # the watch of a closed descriptor stays while the file is open
            "import os, select, time\nfiles, poll = [os.pipe()[0] for _ in range(40)], select.epoll()\n"
            "for file in files:\n    for fd in range(100, 160): poll.register(os.dup2(file, fd), 1)\ntime.sleep(600)",
            "watched more than 2048 files",
        ),
        ("import os; os._exit(7)", "exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
        ("import os; os.closerange(0, 99)", "exit code 1"),
    ],
    ids=["cpu", "cpu of many", "cpu of the dead", "memory of many", "flood", "pipes", "cpu of ignored children",
         "cpu without zombies", "unaccepted", "in flight", "datagrams", "memory of dead leaders",
         "files of dead leaders", "page tables", "mappings",
         "watches", "exit", "crash", "closed"],
)  # fmt: skip
async def test_what_ends_a_sandbox_is_said(code: str, stopped: str) -> None:
    cpu_s = 1 if "CPU" in stopped else 60  # a slow machine needs seconds to reach another limit
    async with SandboxPool(SandboxSettings(**LIMITS | {"cpu_s": cpu_s})) as pool:
        result = await (await pool.acquire()).run(code)
        assert stopped in str(result.stopped)
        assert (await (await pool.acquire()).run("1 + 1")).output == "2\n"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("b = bytearray(200 << 20)", "MemoryError"),
        ("open('f', 'wb').write(bytes(20 << 20))", "File too large"),
        ("for i in range(3): open(f'f{i}', 'wb').write(bytes(10 << 20))", "No space left on device"),
        ("for i in range(10 ** 5): open(f'f{i}', 'w').close()", "No space left on device"),
        ("kept = [open('/dev/null') for _ in range(300)]", "Too many open files"),
        ("import mmap; mmap.mmap(-1, 20 << 20)", "File too large"),
        (
            "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\n"
            "c.mmap(None, 4096, 3, 0x21, -1, 0), os.strerror(ctypes.get_errno())",
            "(-1, 'Operation not permitted')",
        ),
        ("import mmap, os; mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)", "No such device"),
        ("open('/proc/self/oom_score_adj', 'w').write('0')", "Read-only file system"),
        ("import os\nwhile True:\n    if os.fork() == 0: import time; time.sleep(60)", "Resource temporarily"),
        (
            "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
            "can't",
        ),
    ],
)
async def test_what_the_code_may_not_take_is_an_error_of_the_code(code: str, error: str) -> None:
    async with SandboxPool(SandboxSettings(**LIMITS | {"cpu_s": 60})) as pool:
        sandbox = await pool.acquire()
        result = await sandbox.run(code)
        assert error in result.output
        assert result.stopped is None
        assert (await sandbox.run("1 + 1")).output == "2\n"


async def test_a_worker_that_ends_between_calls_is_noticed(pool: SandboxPool) -> None:
    async def end_after(delay_ms: int) -> str:
        sandbox = await pool.acquire()
        await sandbox.run(f"import os, threading\nthreading.Timer({delay_ms / 1000}, os._exit, [3]).start()")
        async with asyncio.timeout(60):
            await sandbox.wait_gone()
        return str(sandbox.stopped)

    ends = await asyncio.gather(*(end_after(i % 10) for i in range(80)))
    assert set(ends) == {"the Python process ended with exit code 3"}


async def test_cells_have_their_cpu_time_each(pool: SandboxPool) -> None:
    sandbox = await pool.acquire()
    burn = "import time\nwhile time.process_time() < {}: pass\n'done'"
    for total_s in (0.7, 1.4, 1.5):
        assert (await sandbox.run(burn.format(total_s))).output == "'done'\n"


async def test_children_that_were_waited_for_count_once(pool: SandboxPool) -> None:
    result = await (await pool.acquire()).run(BURN.replace("1000", "15") + "'done'")
    assert (result.output, result.stopped) == ("'done'\n", None)


async def _stopped(sandbox: Sandbox) -> psutil.Process:
    """Wait until the supervisor of the only sandbox has stopped its worker, and return the worker."""
    worker = psutil.Process(await _named("worker"))
    async with asyncio.timeout(60):
        while worker.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return worker


NAMED = "import ctypes, signal; libc = ctypes.CDLL(None); libc.prctl(15, b'worker')\n"


async def test_between_calls_nothing_runs_that_nobody_watches(pool: SandboxPool) -> None:
    sandbox = await pool.acquire()
    await sandbox.run(NAMED + "ran = []\nsignal.signal(14, lambda *_: ran.append(1))\nsignal.setitimer(0, 1)")
    worker = await _stopped(sandbox)
    await asyncio.sleep(1.2)  # longer than the timer
    assert worker.status() == psutil.STATUS_STOPPED
    assert (await sandbox.run("1 + 1")).output == "2\n"
    assert (await sandbox.run("ran")).output == "[1]\n"


async def test_code_that_forges_its_end_is_stopped(pool: SandboxPool) -> None:
    sandbox = await pool.acquire()
    forge = """
import os, sys
found, frame = set(), sys._getframe()
while frame := frame.f_back:
    found |= {value[:16] for value in frame.f_locals.values() if isinstance(value, bytes)}
for nonce in found: os.write(3, nonce)
while True: pass
"""
    assert (await sandbox.run(NAMED + forge)).stopped is None
    await _stopped(sandbox)


async def test_who_is_woken_is_watched_again(pool: SandboxPool) -> None:
    """Wake a stopped worker with SIGCONT, as a timer of its own can do: its CPU time is limited again."""
    burn = "def burn(*_):\n    while True: pass\nfor number in (18, 24): signal.signal(number, burn)"  # SIGXCPU too
    sandbox = await pool.acquire()
    assert (await sandbox.run(NAMED + burn)).stopped is None
    worker = await _stopped(sandbox)
    async with asyncio.timeout(60):
        while sandbox.stopped is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)
    assert sandbox.stopped == "the code was stopped after 1 s of CPU time"


async def test_code_in_the_background_is_watched_between_calls(pool: SandboxPool) -> None:
    sandbox = await pool.acquire()
    assert (await sandbox.run("import os\nif os.fork() == 0:\n    while True: pass")).stopped is None
    async with asyncio.timeout(60):
        await sandbox.wait_gone()
    assert sandbox.stopped == "the code was stopped after 1 s of CPU time"


@pytest.mark.parametrize("isolation", ["bwrap", "subprocess"])
async def test_a_zygote_that_dies_takes_its_sandboxes_and_is_replaced(isolation: str) -> None:
    async with SandboxPool(SandboxSettings(**{**LIMITS, "isolation": isolation})) as pool:
        sandbox = await pool.acquire()
        running = asyncio.create_task(sandbox.run("import time; time.sleep(1000)"))
        await asyncio.sleep(0.05)
        (kept,) = pool._zygotes.everywhere()
        zygote = kept.zygote
        assert zygote is not None
        zygote._launch.process.kill()
        result = await running
        assert "lost" in str(result.stopped)
        with pytest.raises(SandboxError, match="lost"):
            await zygote.acquire()
        assert (await (await pool.acquire()).run("1 + 1")).output == "2\n"


async def test_a_zygote_that_unprotected_code_has_stopped_goes_on() -> None:
    async with SandboxPool(SandboxSettings(**{**LIMITS, "isolation": "subprocess", "pool": 0})) as pool:
        first = await pool.acquire()
        (kept,) = pool._zygotes.everywhere()
        zygote = kept.zygote
        assert zygote is not None
        process = psutil.Process(zygote._launch.process.pid)
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - the state of a process knows no event
            await asyncio.sleep(0.001)
        second = await pool.acquire()
        assert (await second.run("1 + 1")).output == "2\n"
        assert (await first.run("1 + 2")).output == "3\n"


async def test_a_supervisor_that_dies_takes_its_worker(pool: SandboxPool) -> None:
    first, other = await pool.acquire(), await pool.acquire()
    await other.run("x = 1")
    running = asyncio.create_task(
        first.run("import ctypes, time\nctypes.CDLL(None).prctl(15, b'victim')\ntime.sleep(1000)")
    )
    worker = await _named("victim")
    os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
    assert "lost" in str((await running).stopped)
    assert not psutil.pid_exists(worker)
    assert (await other.run("x")).output == "1\n"


async def _named(name: str) -> int:
    async with asyncio.timeout(120):
        while not (found := [p.pid for p in child_processes(recursive=True) if _comm(p) == name]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[0]


def _comm(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    return ""


PARENT = """
import asyncio, sys
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.sandbox import Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings

async def main():
    pool = SandboxPool(SandboxSettings(isolation=sys.argv[1], timeout_s=1000))
    sandbox = await pool.acquire()
    await sandbox.run("import ctypes, os, time\\nctypes.CDLL(None).prctl(15, b'%s')\\nos.fork()" % sys.argv[2])
    print("ready", flush=True)
    await sandbox.run("import time; time.sleep(1000)")

asyncio.run(main())
"""


@pytest.mark.parametrize("isolation", ["bwrap", "subprocess"])
def test_when_the_parent_is_killed_nothing_survives(isolation: str) -> None:
    name = f"orphan{os.getpid()}"[:15]
    command = [sys.executable, "-c", PARENT, isolation, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        started = psutil.Process(parent.pid).children(recursive=True)
        assert len(started) >= 3
        parent.kill()
    deadline = time.monotonic() + 120
    while not all(map(has_ended, started)):
        assert time.monotonic() < deadline, f"{started} survived their parent"
        time.sleep(0.01)


async def test_a_flood_on_the_channel_ends_no_other_conversation() -> None:
    async with SandboxPool(SandboxSettings(**{**LIMITS, "cpu_s": 60})) as pool:
        noisy, other = await pool.acquire(), await pool.acquire()
        await noisy.run("import os, threading\ndef flood():\n    while True: os.write(3, bytes(16))")
        assert (await noisy.run("threading.Thread(target=flood, daemon=True).start(); 1")).output == "1\n"
        assert (await other.run("2")).output == "2\n"
        assert (await noisy.run("3")).output == "3\n"


DEEP = """
import os
at = os.open(".", os.O_RDONLY)
for _ in range(1100):
    os.mkdir("d", dir_fd=at)
    at = os.open("d", os.O_RDONLY, dir_fd=(above := at))
    os.close(above)
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return where the folders of sandboxes are made; it is removed by a program that can, unlike pytest."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


async def test_a_deep_folder_ends_no_other_sandbox(folders: Path) -> None:
    """It is deeper than Python's own removal calls itself."""
    async with SandboxPool(SandboxSettings(**{**LIMITS, "isolation": "subprocess", "pool": 0})) as pool:
        first, second = await pool.acquire(), await pool.acquire()
        assert (await first.run(DEEP + "print(1)")).output == "1\n"
        first.kill()
        await first.wait_gone()
        assert (await second.run("1 + 1")).output == "2\n"
        assert (await (await pool.acquire()).run("1 + 2")).output == "3\n"
        assert (await second.run(DEEP + "print(1)")).output == "1\n"
    assert os.listdir(folders) == []
