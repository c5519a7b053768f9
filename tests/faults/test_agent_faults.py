"""Agents that hang, flood, fork, ignore signals and crash: each ends its own session, and leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import agent_programs
from tests.conftest import ROOT, child_processes
from tests.forger import forger
from tests.proxy_clients import until
from tests.support.bare_python import make_bare_python
from verl_multiturn.errors import AgentContractError
from verl_multiturn.proxy.agents import process_runner, thread_runner
from verl_multiturn.proxy.agents.agent import SessionAddress, load_agent
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult
from verl_multiturn.proxy.agents.process_runner import ProcessRunner
from verl_multiturn.proxy.agents.thread_runner import ThreadRunner

PROGRAMS = "tests.agent_programs"


def address(key: str = "key") -> SessionAddress:
    return SessionAddress("http://127.0.0.1:1/v1", key, "http://127.0.0.1:1", f"session {key}")


def living(pids: Path) -> list[int]:
    """Return the processes that were noted in a file and still run."""
    found = []
    for pid in map(int, pids.read_text().split() if pids.exists() else []):
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_runner, "_GRACE_S", 0.5)
    monkeypatch.setattr(thread_runner, "_GRACE_S", 0.3)
    monkeypatch.setattr(thread_runner, "_INTERRUPTED_S", 0.5)


@pytest.fixture(scope="module", params=["this Python", "another Python"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Return the interpreter of agents that are functions, as the setting `proxy.python` names it."""
    return None if request.param == "this Python" else make_bare_python(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Check that a test leaves no process and no descriptor."""
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert child_processes(recursive=True) == []
    assert len(os.listdir("/proc/self/fd")) <= fds


# The faults of `misbehave`, and how each ends when the time is up at once or later.
ENDS: dict[str, AgentEnd | str] = {
    "nothing": AgentEnd("returned", AgentResult(0.0)),
    "hang": "timed_out: the session's time was up before the agent ended",
    "ignore SIGTERM": "timed_out: the session's time was up before the agent ended",
    "obey SIGTERM": "timed_out: the session's time was up before the agent ended; it wrote:\ntold to end",
    "fork": "timed_out: the session's time was up before the agent ended",
    "leave": AgentEnd("returned", AgentResult(0.5)),
    "kill the keeper": "exited: the agent's process, and the one that keeps it, were killed",
    "exit": "raised: SystemExit: 3 (agent_programs.py:",
    "_exit": "exited: the agent ended with status 0",
    "crash": "exited: the agent ended with signal SIGSEGV",
    "surrogates": "raised: ValueError: a \\ud800 text (agent_programs.py:",
    "no stdout": AgentEnd("returned", AgentResult(0.25)),
    "forks that end": AgentEnd("returned", AgentResult(1.0)),
    "late thread": AgentEnd("returned", AgentResult(0.75)),
    "flood": "raised: ValueError: drowned (agent_programs.py:",
}


@pytest.mark.usefixtures("quick", "no_process_left")
async def test_processes_that_misbehave(tmp_path: Path, python: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, in one worker: none disturbs another one."""
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent", python)
    time_up, obeys = asyncio.Event(), asyncio.Event()
    await runner.run({"do": "nothing", "pids": str(tmp_path / "first")}, address(), time_up)  # the import
    pids = {do: tmp_path / do for do in ENDS}
    ending = {
        do: asyncio.ensure_future(
            runner.run({"do": do, "pids": str(pids[do])}, address(), obeys if do == "obey SIGTERM" else time_up)
        )
        for do in ENDS
    }
    in_time = [do for do, end in ENDS.items() if isinstance(end, AgentEnd) or not end.startswith("timed_out")]
    await asyncio.wait_for(asyncio.gather(*[ending[do] for do in in_time]), 60)
    await until(lambda: len(living(pids["fork"])) == 31, 60)
    await until(lambda: all(living(pids[do]) for do in ("hang", "ignore SIGTERM", "obey SIGTERM")), 60)
    assert [do for do in ENDS if ending[do].done()] == in_time
    with monkeypatch.context() as patch:
        patch.setattr(process_runner, "_GRACE_S", 60.0)  # as long as a busy machine needs
        obeys.set()
        await asyncio.wait({ending["obey SIGTERM"]})
    time_up.set()
    await asyncio.wait(ending.values())
    for do, expected in ENDS.items():
        end = ending[do].result()
        if isinstance(expected, AgentEnd):
            assert end == expected, do
        else:
            assert f"{end.kind}: {end.problem}".startswith(expected), do
        assert len(end.problem) < 4_002, do
    assert "half \\ud800" in ending["surrogates"].result().problem
    assert "the output of 100000000 bytes is shortened" in ending["flood"].result().problem
    assert {do: living(path) for do, path in pids.items() if living(path)} == {}
    await runner.aclose()


@pytest.mark.usefixtures("no_process_left")
async def test_the_time_limits_as_they_are(tmp_path: Path) -> None:
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent")
    time_up = asyncio.Event()
    running = asyncio.ensure_future(
        runner.run({"do": "ignore SIGTERM", "pids": str(tmp_path / "pids")}, address(), time_up)
    )
    await until(lambda: bool(living(tmp_path / "pids")), 60)
    began = time.monotonic()
    time_up.set()
    assert (await running).kind == "timed_out"
    assert time.monotonic() - began >= 5.0
    assert living(tmp_path / "pids") == []
    await runner.aclose()


@pytest.mark.usefixtures("quick", "no_process_left")
async def test_sixty_four_processes_at_once(tmp_path: Path) -> None:
    """Each has its own key, and none of its siblings'."""
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent")
    row = {"do": "environment", "pids": str(tmp_path / "pids")}
    ends = await asyncio.gather(*[runner.run(row, address(f"key {i}"), asyncio.Event()) for i in range(64)])
    assert [end.result for end in ends] == [AgentResult(0.0, {f"key {i}": 1.0}) for i in range(64)]
    await runner.aclose()


@pytest.mark.usefixtures("no_process_left")
async def test_a_cancelled_process_is_gone_at_once(
    tmp_path: Path, python: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_runner, "_GRACE_S", 1000.0)  # so much an agent gets whose time is up
    monkeypatch.setattr(process_runner, "_KILLED_S", 60.0)  # as long as a busy machine needs
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent", python)
    rows = [{"do": do, "pids": str(tmp_path / do)} for do in ("ignore SIGTERM", "fork", "hang")]
    running = [asyncio.ensure_future(runner.run(row, address(), asyncio.Event())) for row in rows]
    await until(lambda: len(living(tmp_path / "fork")) == 31, 60)
    await until(lambda: all(living(tmp_path / do) for do in ("hang", "ignore SIGTERM")), 60)
    for each in running:
        each.cancel()
    assert {type(each) for each in await asyncio.gather(*running, return_exceptions=True)} == {asyncio.CancelledError}
    assert [living(tmp_path / row["do"]) for row in rows] == [[], [], []]
    for delay_s in (0.0, 0.001, 0.01, 0.03):  # in the middle of a start
        started = [asyncio.ensure_future(runner.run(rows[2], address(), asyncio.Event())) for _ in range(8)]
        await asyncio.sleep(delay_s)
        for each in started:
            each.cancel()
        await asyncio.gather(*started, return_exceptions=True)
    await runner.aclose()


@pytest.mark.usefixtures("quick", "no_process_left")
async def test_a_command_that_ignores_signals_and_leaves_its_group(tmp_path: Path) -> None:
    script = "trap '' TERM; echo $$ > $0; (setsid sh -c 'echo $$ >> $0; sleep 1000' $0 &); sleep 1000; sleep 1000"
    runner = ProcessRunner(None, ["sh", "-c", script, str(tmp_path / "pids")], "command")
    time_up = asyncio.Event()
    running = asyncio.ensure_future(runner.run({}, address(), time_up))
    await until(lambda: len(living(tmp_path / "pids")) == 2, 60)
    time_up.set()
    assert (await running).kind == "timed_out"
    assert living(tmp_path / "pids") == []
    await runner.aclose()


@pytest.mark.usefixtures("quick", "no_process_left")
async def test_a_dead_zygote_is_replaced(tmp_path: Path, python: str | None) -> None:
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent", python)
    running = asyncio.ensure_future(
        runner.run({"do": "hang", "pids": str(tmp_path / "pids")}, address(), asyncio.Event())
    )
    await until(lambda: bool(living(tmp_path / "pids")), 60)
    (zygote,) = child_processes()
    zygote.kill()
    end = await running
    assert (end.kind, end.problem) == ("exited", "the agent's process, and the one that keeps it, were killed")
    end = await runner.run({"do": "nothing", "pids": str(tmp_path / "pids")}, address(), asyncio.Event())
    assert end == AgentEnd("returned", AgentResult(0.0))
    assert living(tmp_path / "pids") == []
    await runner.aclose()


@pytest.mark.usefixtures("no_process_left")
async def test_a_stopped_zygote_goes_on(tmp_path: Path) -> None:
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent")
    for _ in range(2):
        end = await runner.run({"do": "nothing", "pids": str(tmp_path / "pids")}, address(), asyncio.Event())
        assert end == AgentEnd("returned", AgentResult(0.0))
        (zygote,) = child_processes()
        zygote.suspend()
        await until(lambda process=zygote: process.status() == psutil.STATUS_STOPPED, 60)
    await runner.aclose()


@pytest.mark.usefixtures("no_process_left")
async def test_a_wrong_result_raises(tmp_path: Path) -> None:
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent")
    with pytest.raises(AgentContractError, match="the agent returned nan, whose reward is no finite number"):
        await runner.run({"do": "nan", "pids": str(tmp_path / "pids")}, address(), asyncio.Event())
    await runner.aclose()


@pytest.mark.usefixtures("no_process_left")
async def test_a_program_that_the_agent_starts_does_not_speak_for_it(tmp_path: Path, python: str | None) -> None:
    runner = ProcessRunner(f"{PROGRAMS}:misbehave", None, "agent", python)
    result = {"result": {"reward": 1.0, "completions": {}, "by_id": False}}
    row = {"do": "run a program", "pids": str(tmp_path / "pids")}
    killed, ended = [
        await runner.run(row | {"program": forger(tmp_path, result, end)}, address(), asyncio.Event())
        for end in (True, False)
    ]
    await runner.aclose()
    assert (killed.kind, killed.result) == ("exited", AgentResult())
    assert killed.problem.startswith("the agent ended with signal SIGKILL; it wrote:\n{")  # to the output, as text
    assert ended == AgentEnd("returned", AgentResult(0.0))


WORKER = f"""
import asyncio, sys
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.process_runner import ProcessRunner
async def main():
    runner = ProcessRunner("{PROGRAMS}:misbehave", None, "agent", sys.argv[2] or None)
    address = SessionAddress("http://127.0.0.1:1/v1", "key", "http://127.0.0.1:1", "s")
    rows = [{{"do": do, "pids": sys.argv[1]}} for do in ("fork", "ignore SIGTERM")]
    await asyncio.gather(*[runner.run(row, address, asyncio.Event()) for row in rows])
asyncio.run(main())
"""


async def test_a_worker_that_is_killed_leaves_no_agent(tmp_path: Path, python: str | None) -> None:
    pids = tmp_path / "pids"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(pids), python or ""], cwd=ROOT)  # noqa: ASYNC220
    await until(lambda: len(living(pids)) == 32 or worker.poll() is not None, 60)
    zygote = psutil.Process(worker.pid).children()[0]
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    await until(lambda: not living(pids) and not zygote.is_running(), 60)


def agent_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("agent session")]


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    agent_programs.go.clear()
    yield
    agent_programs.go.set()
    until = time.monotonic() + 60
    while agent_threads() and time.monotonic() < until:
        time.sleep(0.02)
    assert agent_threads() == []


@pytest.mark.usefixtures("quick", "no_thread_left")
@pytest.mark.parametrize(("name", "kind"), [("spin", "timed_out"), ("wait_forever", "timed_out"), ("block", "stuck")])
async def test_threads_when_the_time_is_up(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ThreadRunner(load_agent(f"{PROGRAMS}:{name}", "agent"))
    row: dict[str, Any] = {"blocks": True, "began": [], "ended": []}
    time_up = asyncio.Event()
    running = asyncio.ensure_future(runner.run(row, address(), time_up))
    await until(lambda: row["began"] if name == "wait_forever" else agent_threads(), 60)
    if kind == "timed_out":
        monkeypatch.setattr(thread_runner, "_INTERRUPTED_S", 60.0)  # as long as a busy machine needs
    if name == "wait_forever":
        monkeypatch.setattr(thread_runner, "_GRACE_S", 60.0)  # it ends by itself
    assert not running.done()
    time_up.set()
    end = await running
    assert end.kind == kind
    assert end.problem.startswith("the session's time was up before the agent returned")
    await until(lambda: runner.stuck == (1 if kind == "stuck" else 0), 60)  # a thread ends after its agent
    if kind == "stuck":
        assert "; its thread still runs, at " in end.problem
        assert "threading.py:" in end.problem
    assert row["ended"] == ([True] if name == "wait_forever" else [])
    agent_programs.go.set()
    await until(lambda: agent_threads() == [], 60)
    assert runner.stuck == 0


@pytest.mark.usefixtures("quick", "no_thread_left")
@pytest.mark.parametrize("name", ["spin", "wait_forever", "block"])
async def test_a_cancelled_thread_is_abandoned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call does not wait for the thread, which may never return from a call."""
    if name == "wait_forever":
        monkeypatch.setattr(thread_runner, "_GRACE_S", 60.0)  # it ends by itself
    row: dict[str, Any] = {"blocks": True, "began": [], "ended": []}
    runner = ThreadRunner(load_agent(f"{PROGRAMS}:{name}", "agent"))
    running = asyncio.ensure_future(runner.run(row, address(), asyncio.Event()))
    await until(lambda: row["began"] if name == "wait_forever" else agent_threads(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    if name == "block":
        assert runner.stuck == 1
    agent_programs.go.set()
    await until(lambda: agent_threads() == [], 60)


@pytest.mark.usefixtures("quick", "no_thread_left")
async def test_a_stuck_thread_leaves_its_siblings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_runner, "_MOST_THREADS", 3)
    runner = ThreadRunner(load_agent(f"{PROGRAMS}:block", "agent"))
    time_up, never = asyncio.Event(), asyncio.Event()
    time_up.set()
    stuck = [asyncio.ensure_future(runner.run({"blocks": True}, address(), time_up)) for _ in range(2)]
    assert await runner.run({"blocks": False}, address(), never) == AgentEnd("returned")
    assert [end.kind for end in await asyncio.gather(*stuck)] == ["stuck", "stuck"]
    assert runner.stuck == 2
    third = asyncio.ensure_future(runner.run({"blocks": True}, address(), never))
    await asyncio.sleep(0)
    refused = await runner.run({"blocks": False}, address(), never)
    assert refused == AgentEnd("failed", problem="3 agents run already, 2 of them stuck")
    agent_programs.go.set()
    assert (await third).kind == "returned"
