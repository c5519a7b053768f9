"""Sandboxes and their pool: cells, isolation between conversations, and that nothing remains."""

import asyncio
import errno
import gc
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.conftest import child_processes, has_ended, until
from verl_multiturn.sandbox.guest.cell import VALUE_BYTES
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.sandbox import MAX_CODE_BYTES, Sandbox
from verl_multiturn.sandbox.settings import SandboxSettings

BOTH = pytest.mark.parametrize("isolation", ["bwrap", "subprocess"])


OUR_DISK_MB = 100 + os.getpid()
"""Disk limit that marks our processes, wherever they are in the process tree."""


def settings(**changes: Any) -> SandboxSettings:
    return SandboxSettings(**{"timeout_s": 60, "pool": 1, "disk_mb": OUR_DISK_MB, **changes})


@pytest.fixture
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(settings()) as pool:
        yield pool


@pytest.fixture
async def sandbox(pool: SandboxPool) -> Sandbox:
    return await pool.acquire()


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary folder of our own: other runs on this machine make folders with the same names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def held() -> tuple[int, set[int], int]:
    """Count open descriptors and temporary folders, and return them with the processes of sandboxes between them."""
    mark = f'"disk": {OUR_DISK_MB * 2**20},'
    sandboxes = {process.pid for process in psutil.process_iter(["cmdline"]) if mark in str(process.info["cmdline"])}
    folders = list(Path(tempfile.gettempdir()).glob("verl-multiturn-sandbox-*"))
    return len(os.listdir("/proc/self/fd")), sandboxes, len(folders)


def descendants() -> set[psutil.Process]:
    return set(child_processes(recursive=True))


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1 + 1)", "2\n"),
        ("1 + 1", "2\n"),
        ("None", ""),
        ("x = 3", ""),
        ("", ""),
        ("# nothing", ""),
        ("print('a', end='')\n'b'", "a'b'\n"),
        ("for i in range(2):\n    i", ""),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out')", "out\nerr\nout\n"),
        ("import sys; sys.exit()", ""),
        ("import sys; sys.exit('bad')", "SystemExit: bad\n"),
        ("__name__", "'__main__'\n"),
        ("print('\\ud800é')", "\\ud800é\n"),
        ("from __future__ import annotations\n1", "1\n"),
        ("import os\nif os.fork() == 0: print('child')\nelse: os.wait()", "child\n"),
        ("input()", None),
    ],
)
async def test_a_cell(sandbox: Sandbox, code: str, output: str | None) -> None:
    result = await sandbox.run(code)
    assert result.stopped is None
    if output is None:
        assert "EOFError" in result.output
    else:
        assert result.output == output


async def test_an_error_shows_the_frames_of_the_code_only(sandbox: Sandbox) -> None:
    result = await sandbox.run("def f():\n    return 1 / 0\nf()")
    assert result.output == (
        "Traceback (most recent call last):\n"
        '  File "<cell 1>", line 3, in <module>\n'
        "    f()\n"
        '  File "<cell 1>", line 2, in f\n'
        "    return 1 / 0\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )
    assert (await sandbox.run("1 +")).output == (
        '  File "<cell 2>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n'
    )


async def test_state_stays_in_its_sandbox(pool: SandboxPool) -> None:
    first, second = await pool.acquire(), await pool.acquire()
    await first.run("x = 5\nopen('file', 'w').write('text')\ndef double(n): return 2 * n")
    assert (await first.run("double(x), open('file').read()")).output == "(10, 'text')\n"
    result = await second.run("import os\nprint('x' in globals(), os.listdir('.'), os.listdir('/dev/shm'))")
    assert result.output == "False [] []\n"


async def test_many_at_once_do_not_meet(pool: SandboxPool) -> None:
    async def conversation(number: int) -> str:
        sandbox = await pool.acquire()
        await sandbox.run(f"n = {number}\nopen('/tmp/f', 'w').write(str(n))")
        result = await sandbox.run("print(n, open('/tmp/f').read())")
        sandbox.kill()
        return result.output

    assert await asyncio.gather(*map(conversation, range(40))) == [f"{n} {n}\n" for n in range(40)]


async def test_the_code_runs_without_rights(sandbox: Sandbox) -> None:
    result = await sandbox.run("for line in open('/proc/self/status'):\n    print(line, end='')")
    status = dict(line.split(":\t", 1) for line in result.output.splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert all(int(status[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    assert status["Uid"].split() == ["1000"] * 4


async def test_the_value_of_a_cell_is_apart_from_its_output(sandbox: Sandbox) -> None:
    result = await sandbox.run("x = b'text'\nprint('printed')\nx + b'\\x00\\n'", with_value=True)
    assert (result.output, result.value, result.stopped) == ("printed\n", b"text\x00\n", None)
    assert (await sandbox.run("x")).value == b""  # not requested
    for code in ("1 / 0", "1 +", "'text'", "type('B', (bytes,), {})(x)", f"bytes({VALUE_BYTES + 1})", "y = x"):
        assert (await sandbox.run(code, with_value=True)).value == b"", code
    assert len((await sandbox.run(f"bytes({VALUE_BYTES})", with_value=True)).value) == VALUE_BYTES
    result = await sandbox.run("import os\nprint(x, flush=True)\nos._exit(1) or x", with_value=True)
    assert (result.output, result.value) == ("b'text'\n", b"")
    assert (await sandbox.run("x", with_value=True)).value == b""


async def test_the_source_of_a_cell_with_a_value_is_not_kept(sandbox: Sandbox) -> None:
    await sandbox.run("def f():\n    return 1 / 0")
    result = await sandbox.run("f()", with_value=True)
    assert '  File "<cell 2>", line 1, in <module>\n    f()\n' in result.output
    result = await sandbox.run(
        "import linecache\nprint([name for name in linecache.cache if name[:5] == '<cell'])\nf()"
    )
    assert result.output.startswith("['<cell 1>', '<cell 3>']\n")
    assert "    return 1 / 0\n" in result.output


async def test_the_longest_code_and_a_longer_one(sandbox: Sandbox) -> None:
    assert (await sandbox.run("7".rjust(MAX_CODE_BYTES, "\n"))).output == "7\n"
    with pytest.raises(ValueError, match=f"at most {MAX_CODE_BYTES} are allowed"):
        await sandbox.run("7".rjust(MAX_CODE_BYTES + 1, "\n"))
    assert (await sandbox.run("8")).output == "8\n"


async def test_one_cell_at_a_time(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run("import time; time.sleep(0.2); 1"))
    await asyncio.sleep(0)
    with pytest.raises(SandboxError, match="one cell at a time"):
        await sandbox.run("2")
    assert (await running).output == "1\n"


async def test_modules_that_were_loaded_before() -> None:
    async with SandboxPool(settings(preimport=("statistics", "random"))) as pool:
        one, two = await pool.acquire(), await pool.acquire()
        assert (await one.run("import sys; 'statistics' in sys.modules")).output == "True\n"
        draw = "import random; random.getrandbits(64)"
        assert (await one.run(draw)).output != (await two.run(draw)).output


async def test_packages() -> None:
    ask = "try:\n    import numpy; print(numpy.sum([1, 2]))\nexcept ImportError: print('none')"
    async with SandboxPool(settings()) as pool:
        assert (await (await pool.acquire()).run(ask)).output == "none\n"
    async with SandboxPool(settings(packages=True, preimport=("numpy",))) as pool:
        one, two = await pool.acquire(), await pool.acquire()
        assert (await one.run(ask)).output == "3\n"
        draw = "numpy.random.rand()"
        await two.run("import numpy")
        assert (await one.run(draw)).output != (await two.run(draw)).output


@BOTH
async def test_nothing_is_left_after_close(isolation: str) -> None:
    before = held()
    async with SandboxPool(settings(isolation=isolation, pool=3)) as pool:
        sandboxes = [await pool.acquire() for _ in range(3)]
        assert (await sandboxes[0].run("import os; os.path.exists(os.getcwd())")).output == "True\n"
        waiting = asyncio.create_task(sandboxes[1].run("import time; time.sleep(1000)"))
        await asyncio.sleep(0.05)
        assert held() != before
    assert "closed" in str((await waiting).stopped)
    assert held() == before


async def test_who_waits_when_the_pool_closes_is_told() -> None:
    before = held()
    pool = SandboxPool(settings(pool=0))
    (await pool.acquire()).kill()
    waiting = [asyncio.create_task(pool.acquire()) for _ in range(30)]
    await asyncio.sleep(0)
    await pool.aclose()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert {str(result) for result in results} == {"the pool was closed"}
    assert held() == before


async def test_the_pool_works_again_after_close() -> None:
    pool = SandboxPool(settings())
    for _ in range(2):
        assert (await (await pool.acquire()).run("1")).output == "1\n"
        await pool.aclose()
    await pool.aclose()


@BOTH
async def test_cancelled_anywhere_it_gives_back_what_it_has(isolation: str) -> None:
    async def call(pool: SandboxPool, code: str) -> str:
        sandbox = await pool.acquire()
        try:
            return (await sandbox.run(code)).output
        finally:
            sandbox.kill()

    async with SandboxPool(settings(isolation=isolation, pool=0)) as pool:
        assert await call(pool, "1") == "1\n"
        (kept,) = pool._zygotes.everywhere()
        zygote = kept.zygote
        assert zygote is not None
        rest: tuple[Any, ...] | None = None
        for delay_s in (0, 0, 0.002, 0.004, 0.006, 0.01, 0.02, 0.05):
            task = asyncio.create_task(call(pool, "import time; time.sleep(1000)"))
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not zygote._starting)
            for spare in list(zygote._ready):  # a cancelled `acquire` passed it to the next one
                spare.kill()
            await until(lambda: not zygote._sandboxes)
            rest = rest or held()
            assert held() == rest
        assert await call(pool, "2") == "2\n"


@BOTH
@pytest.mark.parametrize("close", [False, True])
async def test_gone_means_that_no_process_is_left(isolation: str, close: bool) -> None:
    # The kernel takes a while to take back so much memory, and the process still exists during that time.
    code = "import os, time\nblock = bytearray(300 * 2**20)\nif os.fork() == 0: time.sleep(1000)"
    async with SandboxPool(settings(isolation=isolation, pool=0, memory_mb=1024)) as pool:
        first = await pool.acquire()
        first.kill()
        await first.wait_gone()
        before = descendants()
        sandbox = await pool.acquire()
        assert (await sandbox.run(code)).stopped is None
        started = descendants() - before
        assert len(started) == 3
        if close:
            await pool.aclose()
        else:
            sandbox.kill()
            await sandbox.wait_gone()
        assert {process for process in started if process.is_running()} == set()


async def test_a_process_that_left_its_group_is_no_zombie_for_ever() -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True).pid"
    async with SandboxPool(settings(isolation="subprocess", pool=0)) as pool:
        sandbox = await pool.acquire()
        escaped = psutil.Process(int((await sandbox.run(code)).output))
        sandbox.kill()
        escaped.kill()
        await until(lambda: has_ended(escaped))
        for _ in range(2):
            sandbox = await pool.acquire()
            sandbox.kill()
            await sandbox.wait_gone()
        assert not escaped.is_running()


async def test_cancelled_while_the_zygote_starts() -> None:
    before = held()
    pool = SandboxPool(settings())
    for delay_s in (0.0, 0.002, 0.01, 0.015):
        task = asyncio.create_task(pool.acquire())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait({task})  # it may have its sandbox by now
        await pool.aclose()
        await until(lambda: held() == before)  # the kernel ends bubblewrap's children


def test_a_pool_that_is_dropped_is_closed() -> None:
    before = held()

    async def use() -> None:
        pool = SandboxPool(settings())
        assert (await (await pool.acquire()).run("1")).output == "1\n"

    asyncio.run(use())
    gc.collect()
    asyncio.run(until(lambda: held()[1] == before[1]))
    assert held() == before


def test_a_pool_follows_the_loop() -> None:
    before = held()
    pool = SandboxPool(settings())

    async def use() -> str:
        return (await (await pool.acquire()).run("1")).output

    assert asyncio.run(use()) == "1\n"
    assert asyncio.run(use()) == "1\n"
    pool.close_now()
    assert held()[0] == before[0]


def _in_a_fork(function: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    os.waitpid(child, 0)


def test_with_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    before = held()[1:]

    async def use() -> list[str]:
        async with SandboxPool(settings()) as pool:
            sandboxes = [await pool.acquire() for _ in range(10)]
            return [result.output for result in await asyncio.gather(*(sandbox.run("1") for sandbox in sandboxes))]

    assert uvloop.run(use()) == ["1\n"] * 10
    assert held()[1:] == before


async def test_a_pool_closes_while_a_fork_of_ours_has_a_copy_of_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.sandbox.pool._CLOSE_S", 10_000.0)  # longer than `until` waits
    pool = SandboxPool(settings())
    await pool.acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    closing = asyncio.create_task(pool.aclose())
    try:
        await until(closing.done)
    finally:
        os.close(writing)
        await asyncio.to_thread(os.waitpid, child, 0)
        os.close(reading)
        await closing


async def test_a_pool_that_is_closed_while_it_starts_has_no_sandbox() -> None:
    before = held()
    pool = SandboxPool(settings())
    acquiring = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)  # it has begun, and nothing has answered yet
    await pool.aclose()
    with pytest.raises(SandboxError, match="the pool was closed"):
        await acquiring
    assert held() == before


def test_a_fork_of_ours_does_not_close_the_pool() -> None:
    async def use() -> str:
        async with SandboxPool(settings()) as pool:
            sandbox = await pool.acquire()
            _in_a_fork(pool.close_now)
            return (await sandbox.run("1")).output

    assert asyncio.run(use()) == "1\n"


async def test_a_machine_without_descriptors_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    async with SandboxPool(settings()) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("verl_multiturn.sandbox.pool.Launch", failing)
            with pytest.raises(SandboxError, match=r"no sandbox could be started: .*Too many open files"):
                await pool.acquire()
        assert await pool.acquire()
