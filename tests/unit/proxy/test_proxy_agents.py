"""Forms of agents, their results, the two runners, and the check at start-up."""

import asyncio
import math
import re
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.proxy_clients import until
from tests.support.served import served
from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import AgentContractError, ConfigError
from verl_multiturn.harnesses.runners import build_runner, check_agent
from verl_multiturn.proxy.agents import process_runner
from verl_multiturn.proxy.agents.agent import SessionAddress, agent_row, load_agent
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult, read_result, session_reward
from verl_multiturn.proxy.agents.process_runner import ProcessRunner, environment_of
from verl_multiturn.proxy.agents.thread_runner import ThreadRunner

pytestmark = pytest.mark.slow

PROGRAMS = "tests.agent_programs"
ADDRESS = SessionAddress("http://127.0.0.1:1/v1", "key", "http://127.0.0.1:1", "session-1")


def thread_runner(name: str) -> ThreadRunner:
    return ThreadRunner(load_agent(f"{PROGRAMS}:{name}", "agent"))


async def result_of(runner: ThreadRunner | ProcessRunner, row: dict[str, Any]) -> AgentResult:
    end = await runner.run(row, ADDRESS, asyncio.Event())
    assert (end.kind, end.problem) == ("returned", "")
    return end.result


@pytest.mark.parametrize(
    ("name", "form", "keywords", "reward"),
    [
        ("session_form", "session", (), AgentResult(0.5, {"session-1": 1.0})),
        ("session_form_async", "session", (), AgentResult(0.5)),
        ("CalledClass", "session", (), AgentResult(0.5)),
        ("starts_a_loop", "session", (), AgentResult(0.5)),
        ("returns_awaitable", "session", (), AgentResult(0.5)),
        ("run", "keywords", ("base_url", "api_key"), AgentResult(0.0, {"chatcmpl-a": 1.0, "chatcmpl-b": 0.5}, True)),
        ("AgentClass", "keywords", ("base_url", "api_key"), AgentResult(2.75)),
        ("instance", "keywords", ("base_url", "api_key"), AgentResult(3.0)),
    ],
)
async def test_forms_with_an_address(name: str, form: str, keywords: tuple[str, ...], reward: AgentResult) -> None:
    agent = load_agent(f"{PROGRAMS}:{name}", "agent")
    assert (agent.form, agent.keywords, agent.takes_address) == (form, keywords, True)
    assert await result_of(ThreadRunner(agent), {"x": 0.5}) == reward


async def test_a_form_without_an_address_reads_the_environment() -> None:
    name = f"{PROGRAMS}:run_agent_return_reward"
    assert load_agent(name, "agent").form == "row"
    runner = build_runner(ProxySettings(agent=name))
    assert isinstance(runner, ProcessRunner)
    assert await result_of(runner, {"x": 0.5}) == AgentResult(1.5)
    await runner.aclose()


def test_arguments_tell_the_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    signatures = {
        "data, session, **kwargs": "session",
        "row, session=None": "session",
        "row, session=None, **kwargs": "session",
        "row, endpoint": "session",
        "row, /, endpoint, *, model='m'": "session",
        "data, base_url": "keywords",
        "data, *, base_url, api_key=None": "keywords",
        "data, model='m', base_url=None": "keywords",
        "data, **extra_kwargs": "keywords",
        "data": "row",
        "data, model='m'": "row",
        "data, *args": "row",
    }
    body = "".join(f"def f{index}({parameters}): ...\n" for index, parameters in enumerate(signatures))
    (tmp_path / "agents_by_arguments.py").write_text(body)
    found = {text: load_agent(f"agents_by_arguments:f{i}", "agent").form for i, text in enumerate(signatures)}
    assert found == signatures


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.agent_programs", "is no agent; write it as 'package.module:function'"),
        ("tests.agent_programs.ask", "is no agent; write it as 'package.module:function'"),
        ("tests/agent.py:ask", "is no agent; write it as 'package.module:function'"),
        ("no_such_module:run", "cannot import 'no_such_module' (ModuleNotFoundError"),
        ("tests.agent_programs:aks", "'tests.agent_programs' has no 'aks'; did you mean 'ask'?"),
        ("tests.agent_programs:number", "is 7, expected a function or a class with run()"),
        ("tests.agent_programs:NeedsArguments", "is a class that needs 'model'; give each argument a default"),
        ("tests.agent_programs:nothing", "takes no data row; write it as f(row, session), run("),
        (
            "tests.agent_programs:too_much",
            "needs the arguments ['row', 'session', 'model']; write it as f(row, session)",
        ),
    ],
)
def test_what_is_no_agent_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_agent(ProxySettings(agent=name))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "neither is set"),
        ({"agent": f"{PROGRAMS}:ask", "command": ["true"]}, "both are set"),
        ({"command": ["true"], "runner": "thread"}, "a command cannot run in a 'thread'"),
        (
            {"agent": f"{PROGRAMS}:run_agent_return_reward", "runner": "thread"},
            "set runner: process, or write it as f(",
        ),
        ({"command": ["no-such-program", "x"]}, "'no-such-program' is no program that can be started; install it on"),
        ({"command": ["./no/such/program"]}, "'./no/such/program' is no program that can be started"),
        ({"command": ["/etc/passwd"]}, "'/etc/passwd' is no program that can be started"),
        (
            {"command": ["true", "{row}", "{results}"]},
            "nothing takes the place of '{results}'; write '{row}' or '{result}'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_agent(ProxySettings(**settings))


def test_a_proxy_of_the_network_is_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    check_agent(ProxySettings(agent=f"{PROGRAMS}:ask"))
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    check_agent(ProxySettings(agent=f"{PROGRAMS}:ask", runner="process"))
    with pytest.raises(ConfigError, match=re.escape("HTTP_PROXY leads clients of the agent to a proxy")):
        check_agent(ProxySettings(agent=f"{PROGRAMS}:ask"))
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    check_agent(ProxySettings(agent=f"{PROGRAMS}:ask"))


def test_runners_by_the_agents_form() -> None:
    kinds = {
        (name, runner): type(build_runner(ProxySettings(agent=f"{PROGRAMS}:{name}", runner=runner)))
        for name in ("ask", "run_agent_return_reward")
        for runner in (None, "process")
    }
    assert kinds == {
        ("ask", None): ThreadRunner,
        ("ask", "process"): ProcessRunner,
        ("run_agent_return_reward", None): ProcessRunner,
        ("run_agent_return_reward", "process"): ProcessRunner,
    }
    assert isinstance(build_runner(ProxySettings(command=["true"])), ProcessRunner)


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, AgentResult()),
        (1, AgentResult(1.0)),
        (True, AgentResult(1.0)),
        (Fraction(1, 4), AgentResult(0.25)),
        (np.float32(0.5), AgentResult(0.5)),
        (np.bool_(True), AgentResult(1.0)),
        (np.array(2), AgentResult(2.0)),
        ({}, AgentResult()),
        ({"reward": 0.5}, AgentResult(0.5)),
        ({"completions": {"a": 1}}, AgentResult(None, {"a": 1.0})),
        ({"reward": None, "completions": None}, AgentResult()),
        ({"reward": 1, "completions": {"chatcmpl-a": np.float64(0.5)}}, AgentResult(1.0, {"chatcmpl-a": 0.5})),
    ],
)
def test_results(value: object, result: AgentResult) -> None:
    assert read_result(value) == result


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1.0", "returned '1.0', expected a number, {'reward'"),
        (math.nan, "returned nan, whose reward is no finite number"),
        (-math.inf, "returned -inf, whose reward is no finite number"),
        (10**400, "whose reward is no finite number"),
        (-1e39, "returned -1e+39, whose reward is no finite number from -1e+12 to 1e+12; correct its return"),
        (1j, "returned 1j, expected a number"),
        ([0.5], "returned [0.5], expected a number"),
        (np.array([1.0]), "expected a number"),
        ({"score": 1.0}, "returned {'score': 1.0}, expected a number"),
        ({"reward": "1"}, "returned {'reward': '1'}, expected a number"),
        ({"reward": 1, "completions": [1]}, "expected a mapping from ids to numbers as 'completions'"),
        ({"completions": {1: 1.0}}, "expected the ids of completions, not 1;"),
        ({"completions": {"a": math.nan}}, "returned {'completions': {'a': nan}}, whose reward is no finite number"),
    ],
)
def test_wrong_results_name_the_value(value: object, said: str) -> None:
    with pytest.raises(AgentContractError, match=re.escape(said)):
        read_result(value)


def test_areals_agents_may_return_rewards_by_id() -> None:
    assert read_result({"a": 1, "b": 0.5}, is_areals=True) == AgentResult(0.0, {"a": 1.0, "b": 0.5}, True)
    assert read_result({"reward": 1}, is_areals=True) == AgentResult(1.0)
    with pytest.raises(AgentContractError, match="not 3"):
        read_result({3: 1.0}, is_areals=True)


@pytest.mark.parametrize(
    ("end", "reward"),
    [
        (AgentEnd("returned", AgentResult(1.0)), 1.0),
        (AgentEnd("returned"), None),
        *((AgentEnd(kind), -1.0) for kind in ("raised", "exited", "timed_out", "stuck", "failed")),
    ],
)
def test_the_reward_of_a_session_by_the_end_of_its_agent(end: AgentEnd, reward: float | None) -> None:
    assert session_reward(end, error_reward=-1.0) == reward


def test_the_text_of_a_problem_is_bounded_and_can_be_written() -> None:
    assert AgentEnd("raised", problem="\ud800").problem == "\\ud800"
    long = AgentEnd("raised", problem="a" * 5_000 + "b").problem
    assert (len(long), long[0], long[-1]) == (4_001, "…", "b")


def test_a_row_is_plain_and_a_copy() -> None:
    shared: dict[str, Any] = {"index": np.int64(3), "hints": np.array(["a", "b"], dtype=object), 5: b"\x00\xff"}
    messages = [{"role": "user", "content": "half \ud800", "tool_calls": None}]
    row = agent_row({"raw_prompt": np.array(messages, dtype=object), "extra_info": shared, "answer": np.float32(0.5)})
    assert row == {
        "messages": [{"role": "user", "content": "half \ud800"}],
        "extra_info": {"index": 3, "hints": ["a", "b"], "5": "AP8="},
        "answer": 0.5,
    }
    row["extra_info"]["index"] = 4
    assert shared["index"] == 3
    assert agent_row({"raw_prompt": [], "messages": "mine"}) == {"messages": "mine"}
    with pytest.raises(ConfigError, match=r"column 'env' of a data row is <object object>, which JSON cannot hold"):
        agent_row({"env": object()})


def test_an_agents_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the real one")
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "token")
    monkeypatch.setenv("SEARCH_KEY", "of a tool")
    monkeypatch.setenv("NO_PROXY", "internal.example")
    monkeypatch.delenv("no_proxy", raising=False)
    environment = environment_of(ADDRESS)
    assert {name: environment.get(name) for name in (
        "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY",
        "OPENAI_ORG_ID", "ANTHROPIC_AUTH_TOKEN", "SEARCH_KEY", "NO_PROXY", "no_proxy",
    )} == {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1", "ANTHROPIC_API_KEY": "key",
        "OPENAI_ORG_ID": None, "ANTHROPIC_AUTH_TOKEN": None, "SEARCH_KEY": "of a tool",
        "NO_PROXY": "internal.example,127.0.0.1", "no_proxy": "internal.example,127.0.0.1",
    }  # fmt: skip
    assert "key" not in repr(ADDRESS)


async def test_a_blocking_client_talks_to_a_server_on_the_same_loop() -> None:
    """64 agents block in their threads at once until the server has all of their requests."""
    everybody = asyncio.Event()
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["x"])
        if len(asked) == 64:
            everybody.set()
        await everybody.wait()
        return web.json_response({"x": (await request.json())["x"]})

    runner = thread_runner("ask")
    async with served(v1__chat__completions=answer) as server:
        address = SessionAddress(f"{server}/v1", "key", server, "s")
        ends = await asyncio.gather(*[runner.run({"x": i}, address, asyncio.Event()) for i in range(64)])
    assert [end.result.reward for end in ends] == list(range(64))
    assert sorted(asked) == list(range(64))
    async with asyncio.timeout(60):
        while runner.stuck:  # noqa: ASYNC110  # a thread ends after its agent, without an event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ["exits", "exits_async"])
async def test_an_exit_without_an_error_is_a_return(name: str) -> None:
    thread, process = thread_runner(name), ProcessRunner(f"{PROGRAMS}:{name}", None, "agent")
    for runner in (thread, process):
        assert await result_of(runner, {"status": None}) == AgentResult()
        assert await result_of(runner, {"status": 0}) == AgentResult()
        failed = await runner.run({"status": "no key"}, ADDRESS, asyncio.Event())
        assert failed.kind == "raised"
        assert failed.problem.startswith("SystemExit: no key (agent_programs.py:")
    await process.aclose()


async def test_tasks_that_an_agent_leaves_do_not_hold_it_up() -> None:
    row: dict[str, Any] = {}
    runner = thread_runner("leaves_tasks")
    assert await result_of(runner, row) == AgentResult(0.5)
    await until(lambda: not any(thread.name.startswith("agent session-1") for thread in threading.enumerate()))
    assert row["kept"].cancelled()


COMMAND = [
    sys.executable,
    "-ISc",
    "import json, sys; exec(json.load(open(sys.argv[1]))['script'])",
    "{row}",
    "{result}",
]


async def test_commands() -> None:
    """A command reads its row from a file and writes its result to one; its output is never a result."""
    write = "import os; open(os.environ['VERL_MULTITURN_RESULT'], 'w').write({!r})"
    scripts = {
        "print(42)": AgentEnd("returned"),
        write.format("0.5"): AgentEnd("returned", AgentResult(0.5)),
        write.format(" \n"): AgentEnd("returned"),
        write.format("null"): AgentEnd("returned"),
        'open(sys.argv[2], \'w\').write(\'{"reward": 1, "completions": {"a": 2}}\')': AgentEnd(
            "returned", AgentResult(1.0, {"a": 2.0})
        ),
        "import os; assert json.load(open(os.environ['VERL_MULTITURN_ROW']))['messages'] == ['ü \\ud800']": AgentEnd(
            "returned"
        ),
        write.format("0.5") + "; print('first'); print('last', file=sys.stderr, flush=True); sys.exit(3)": AgentEnd(
            "exited", problem="the agent ended with status 3; it wrote:\nlast\nfirst"
        ),
        "import os; os.kill(os.getpid(), 9)": AgentEnd("exited", problem="the agent ended with signal SIGKILL"),
        "import signal; assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN and sys.stdin.read() == ''": AgentEnd(
            "returned"
        ),
    }
    runner = ProcessRunner(None, COMMAND, "command")
    ends = await asyncio.gather(
        *[runner.run({"script": each, "messages": ["ü \ud800"]}, ADDRESS, asyncio.Event()) for each in scripts]
    )
    assert dict(zip(scripts, ends, strict=True)) == scripts
    wrong = {
        write.format("one"): "has no JSON (Expecting value: line 1 column 1 (char 0)): b'one'; write its reward there",
        write.format("NaN"): "returned nan, whose reward is no finite number",
        write.format('"1"'): "returned '1', expected a number",
        write.format("1" * 5_000_000): "has more than 4 MiB",
        "import os; os.mkfifo(sys.argv[2])": "is no plain file; write JSON to it",
        "import os; os.symlink('/etc/passwd', sys.argv[2])": "is no plain file; write JSON to it",
        "import os; os.mkdir(sys.argv[2])": "is no plain file; write JSON to it",
        "import socket; socket.socket(socket.AF_UNIX).bind(sys.argv[2])": "is no plain file; write JSON to it",
        "open(sys.argv[2], 'w').truncate(2**40)": "has more than 4 MiB",
        "import os, shutil; d = os.path.dirname(sys.argv[2]); shutil.rmtree(d); open(d, 'w')": "cannot be read",
    }
    for script, said in wrong.items():
        with pytest.raises(AgentContractError, match=re.escape(said)):
            await runner.run({"script": script}, ADDRESS, asyncio.Event())
    await runner.aclose()


async def test_a_command_that_cannot_be_started_is_told() -> None:
    runner = ProcessRunner(None, ["no-such-program"], "proxy.command")
    with pytest.raises(ConfigError, match=r"proxy.command: 'no-such-program' cannot be started \(FileNotFoundError: "):
        await runner.run({}, ADDRESS, asyncio.Event())
    await runner.aclose()


async def test_an_agent_has_the_open_files_of_a_program_that_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_runner, "_OPEN_FILES", 517)
    runner = ProcessRunner(None, ["sh", "-c", "ulimit -Sn; exit 3"], "proxy.command")
    end = await runner.run({}, ADDRESS, asyncio.Event())
    await runner.aclose()
    assert "517" in end.problem


async def test_a_module_is_imported_once_and_must_not_start_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "counted_agent.py").write_text(
        f"import random\nopen({str(tmp_path / 'imports')!r}, 'a').write('x')\n"
        "def f(data): return {'reward': random.random()}\n"
    )
    (tmp_path / "threaded_agent.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='warm-up', daemon=True).start()\n"
        "def f(data): return 0.5\n"
    )
    runner = ProcessRunner("counted_agent:f", None, "proxy.agent")
    rewards = [await result_of(runner, {}) for _ in range(4)]
    assert len({each.reward for each in rewards}) == 4  # forks of one process do not draw the same numbers
    assert (tmp_path / "imports").read_text() == "x"
    await runner.aclose()
    runner = ProcessRunner("threaded_agent:f", None, "proxy.agent")
    with pytest.raises(ConfigError, match=r"importing 'threaded_agent:f' starts threads \(warm-up\), which a forked"):
        await runner.run({}, ADDRESS, asyncio.Event())
    await runner.aclose()


async def test_a_session_ends_whose_agent_hangs_at_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hanging_agent.py").write_text("import time\ntime.sleep(3600)\n")
    runner, time_up = ProcessRunner("hanging_agent:f", None, "proxy.agent"), asyncio.Event()
    session = asyncio.ensure_future(runner.run({}, ADDRESS, time_up))
    cancelled = asyncio.ensure_future(runner.run({}, ADDRESS, asyncio.Event()))
    await asyncio.sleep(0.1)
    time_up.set()
    cancelled.cancel()
    end = await session
    assert end.kind == "failed"
    assert end.problem.startswith("no process for the agent: its code was not imported when the session's time was up")
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await runner.aclose()
