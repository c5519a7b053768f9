"""Agents of another interpreter: `proxy.python`. It is one that has none of our packages, nor those that we need."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.bare_python import make_bare_python
from verl_multiturn.config import PATH, ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.runners import build_runner, check_agent
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult
from verl_multiturn.proxy.agents.process_runner import ProcessRunner, environment_of

pytestmark = pytest.mark.slow

PROGRAMS = "tests.agent_programs"
ADDRESS = SessionAddress("http://127.0.0.1:1/v1", "key", "http://127.0.0.1:1", "session-1")
WHERE = f"{PATH}.proxy"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter with the standard library alone."""
    return make_bare_python(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose modules the other interpreter finds, and this one does not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


async def end_of(name: str, python: str, row: dict[str, Any]) -> AgentEnd:
    runner = build_runner(ProxySettings(agent=name, python=python))
    end = await runner.run(row, ADDRESS, asyncio.Event())
    await runner.aclose()
    return end


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("session_form", AgentResult(0.5, {"session-1": 1.0})),
        ("run", AgentResult(0.0, {"chatcmpl-a": 1.0, "chatcmpl-b": 0.5}, True)),
        ("run_agent_return_reward", AgentResult(1.5)),
        ("AgentClass", AgentResult(2.75)),
    ],
)
@pytest.mark.usefixtures("agents")
async def test_each_form_runs_there(name: str, result: AgentResult, python: str) -> None:
    assert await end_of(f"{PROGRAMS}:{name}", python, {"x": 0.5}) == AgentEnd("returned", result)


SEEN = """
import json, os, shutil, sys
IMPORTED = os.getpid()
try:
    import yaml
except ImportError:
    yaml = None

def look(row, session):
    print("to be shown", file=sys.stderr)
    row.update(
        prefix=sys.prefix, is_ours=yaml is not None, address=[session.base_url, session.api_key, session.id],
        path=shutil.which("python"), variables=sorted({"PYTHONHOME", "VIRTUAL_ENV"} & os.environ.keys()),
        same=IMPORTED == os.getpid(), modules=sorted(each for each in sys.modules if each.startswith("verl_multiturn")),
        installed=[
            name for name, each in sys.modules.items() if "site-packages" in (getattr(each, "__file__", "") or "")
        ],
    )
    raise ValueError(json.dumps(row))
"""


async def test_what_an_agent_finds_there(python: str, agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (agents / "seen_agent.py").write_text(SEEN)
    monkeypatch.setenv("VIRTUAL_ENV", "/an/environment/of/the/run")
    end = await end_of("seen_agent:look", python, {"x": 1})
    assert end.kind == "raised"
    problem, _, printed = end.problem.partition("; it wrote:\n")
    assert printed == "to be shown"
    seen = json.loads(problem[problem.index("{") : problem.rindex("}") + 1])
    modules = seen.pop("modules")
    assert seen == {
        "x": 1,
        "prefix": str(Path(python).parent.parent),
        "is_ours": False,
        "address": ["http://127.0.0.1:1/v1", "key", "session-1"],
        "path": python,
        "variables": [],
        "same": False,
        "installed": [],
    }
    assert "verl_multiturn.errors" in modules
    assert "verl_multiturn.tools" not in modules


OUTAGES = """
import sys
from verl_multiturn import OutageError, UnjudgedError
from verl_multiturn.errors import OutageError as same

def fail(row, session):
    assert same is OutageError
    if row["do"] == "outage":
        raise OutageError("the mirror is away")
    if row["do"] == "unjudged":
        raise UnjudgedError("the image is lost")
    sys.exit(row["do"])
"""


async def test_what_is_not_the_models_doing_is_said_there_as_here(python: str, agents: Path) -> None:
    (agents / "outage_agent.py").write_text(OUTAGES)
    runner = build_runner(ProxySettings(agent="outage_agent:fail", python=python))
    ends = [await runner.run({"do": do}, ADDRESS, asyncio.Event()) for do in ("outage", "unjudged", 75, 69, 1)]
    await runner.aclose()
    assert ends[:2] == [
        AgentEnd("outage", problem="OutageError: the mirror is away (outage_agent.py:9)"),
        AgentEnd("unjudged", problem="UnjudgedError: the image is lost (outage_agent.py:11)"),
    ]
    assert [end.kind for end in ends[2:]] == ["outage", "unjudged", "raised"]


async def test_it_is_imported_once_and_again_after_its_process_was_killed(python: str, agents: Path) -> None:
    (agents / "counted_agent.py").write_text(
        f"import os\nopen({str(agents / 'imports')!r}, 'a').write('x')\n"
        "def f(row, session):\n"
        "    if row['kill']:\n"
        "        import signal, pathlib\n"
        "        keeper = os.getppid()\n"
        "        stat = pathlib.Path(f'/proc/{keeper}/stat').read_text()\n"
        "        os.kill(int(stat.rpartition(')')[2].split()[1]), signal.SIGKILL)\n"
        "        signal.pause()\n"
        "    return 0.5\n"
    )
    runner = build_runner(ProxySettings(agent="counted_agent:f", python=python))
    ends = [await runner.run({"kill": kill}, ADDRESS, asyncio.Event()) for kill in (False, False, True, False)]
    await runner.aclose()
    returned = AgentEnd("returned", AgentResult(0.5))
    killed = AgentEnd("exited", problem="the agent's process, and the one that keeps it, were killed")
    assert ends == [returned, returned, killed, returned]
    assert (agents / "imports").read_text() == "xx"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import no_such_client", "(ModuleNotFoundError: No module named 'no_such_client' (bad_agent.py:1)); install"),
        ("import yaml", "(ModuleNotFoundError: No module named 'yaml' (bad_agent.py:1)); install it"),
        ("raise SystemExit('no key')", "cannot import 'bad_agent' (SystemExit: no key (bad_agent.py:1))"),
        ("def g(row, session): ...", "'bad_agent' has no 'f'"),
        ("f = 7", "is 7, expected a function or a class with run()"),
        ("def f(a, b, c): ...", "needs the arguments ['a', 'b', 'c']"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "'bad_agent:f': the agent cannot be imported: its process ended; import",
        ),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
            "def f(row): ...",
            "starts threads",
        ),
        ("from verl_multiturn import ToolSchema\ndef f(row): ...", "cannot import name 'ToolSchema'"),
    ],
)
def test_an_agent_that_cannot_be_imported_there_is_refused(body: str, said: str, python: str, agents: Path) -> None:
    (agents / "bad_agent.py").write_text(f"{body}\n")
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        check_agent(ProxySettings(agent="bad_agent:f", python=python))
    assert str(caught.value).startswith(f"{WHERE}.agent (imported by {python!r}): ")


def test_an_agent_that_only_the_other_interpreter_can_import_is_accepted(python: str, agents: Path) -> None:
    (agents / "only_there.py").write_text(
        "import sys\nassert 'pydantic' not in sys.modules\ntry:\n    import pydantic\nexcept ImportError: pass\n"
        "else: raise AssertionError('ours')\ndef f(row, session): return 0.5\n"
    )
    check_agent(ProxySettings(agent="only_there:f", python=python))


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_what_is_no_interpreter_is_refused(tmp_path: Path) -> None:
    old = script(tmp_path / "old", "#!/bin/sh\necho python cpython 3 9\n")
    other = script(tmp_path / "other", "#!/bin/sh\necho python pypy 3 11\n")
    dumb = script(tmp_path / "dumb", "#!/bin/sh\n")
    broken = script(tmp_path / "broken", "no program at all\0")
    wrong = script(tmp_path / "wrong", "#!/bin/sh\necho Fatal: no module encodings >&2; exit 1\n")
    listed = {
        str(tmp_path / "none"): "is no program that can be started; give the path of a Python 3.11 or later",
        str(tmp_path): "is no program that can be started",
        dumb: "is no Python that works (status 0)",
        wrong: "is no Python that works (Fatal: no module encodings)",
        broken: "is no Python that works (",
        old: "is cpython 3.9, expected CPython 3.11 or later",
        other: "is pypy 3.11, expected CPython 3.11 or later",
    }
    for python, said in listed.items():
        with pytest.raises(ConfigError, match=re.escape(f"{WHERE}.python: {python!r} {said}")):
            check_agent(ProxySettings(agent=f"{PROGRAMS}:ask", python=python))


def test_settings_that_do_not_fit(python: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{WHERE}.python: {python!r} imports no 'command'")):
        check_agent(ProxySettings(command=["true"], python=python))
    with pytest.raises(ConfigError, match=re.escape(f"{WHERE}.runner: an agent of {python!r} cannot run in a")):
        check_agent(ProxySettings(agent=f"{PROGRAMS}:ask", python=python, runner="thread"))
    assert isinstance(build_runner(ProxySettings(agent=f"{PROGRAMS}:ask", python=python)), ProcessRunner)
    with pytest.raises(ConfigError, match="neither is set"):
        check_agent(ProxySettings(python=python))


async def test_an_interpreter_that_is_missing_on_a_node(tmp_path: Path) -> None:
    runner = build_runner(ProxySettings(agent=f"{PROGRAMS}:ask", python=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"the agent needs '.*none': .*No such file.*; install it on every node"):
        await runner.run({}, ADDRESS, asyncio.Event())
    await runner.aclose()


def test_an_import_that_does_not_end_is_not_refused(python: str, agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (agents / "slow_agent.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr("verl_multiturn.processes.forks._IMPORT_S", 0.2)
    check_agent(ProxySettings(agent="slow_agent:f", python=python))


def test_the_environment_of_another_interpreter(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONHOME", "/run")
    assert environment_of(ADDRESS)["PYTHONHOME"] == "/run"
    found = environment_of(ADDRESS, python)
    assert found["PATH"] == f"{Path(python).parent}:/usr/bin"
    assert "PYTHONHOME" not in found
    assert found["OPENAI_API_KEY"] == "key"
