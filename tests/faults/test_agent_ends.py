"""The end of an agent: what counts after its return, and the fate of its folder."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.agent_sessions import certified, make_run, turns
from tests.proxy_clients import until
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.proxy.agents import process_runner
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd
from verl_multiturn.proxy.agents.folder import remove_folder
from verl_multiturn.proxy.agents.process_runner import ProcessRunner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.rollout.limits import StopReason

ADDRESS = SessionAddress("http://127.0.0.1:1/v1", "key", "http://127.0.0.1:1", "s")
COMMAND = [sys.executable, "-ISc", "import json, sys; exec(json.load(open(sys.argv[1]))['script'])", "{row}"]


@pytest.mark.parametrize("runner", ["process", "thread"])
async def test_what_an_agent_asks_after_its_return_is_refused_and_not_trained(runner: Any, tmp_path: Path) -> None:
    agents = build_runner(ProxySettings(agent="tests.endpoint_agents:asks_after_its_return", runner=runner))
    endpoint = Endpoint(make_run(turns("a", "late")), agents, ProxyServer(), 60.0)
    late = tmp_path / "late"
    row = {"raw_prompt": [{"role": "user", "content": "1+1?"}], "extra_info": {"late": str(late)}}
    outcome, generations = await endpoint.run("r", row, {})
    receipts = Receipts.of_rows("r", generations, outcome.places, "u", 0, False, False)
    assert certified(outcome, receipts) == []
    assert (outcome.stop_reason, outcome.places) == (StopReason.FINISHED, [0])
    await until(late.exists)
    await until(late.read_text)
    assert late.read_text()[:3] in ("400", "401")  # the session is over, or its key is dead
    await endpoint.aclose()


@pytest.mark.parametrize("runner", ["process", "thread"])
async def test_a_wrong_setting_that_an_agent_names_is_no_failure_of_it(runner: Any) -> None:
    agents = build_runner(ProxySettings(agent="tests.endpoint_agents:misconfigured", runner=runner))
    endpoint = Endpoint(make_run(turns("a")), agents, ProxyServer(), 60.0)
    row = {"raw_prompt": [{"role": "user", "content": "1+1?"}], "extra_info": {"asks": True}}
    outcome, _ = await endpoint.run("r", row, {})  # a model may have caused it by its answer
    assert (outcome.stop_reason, outcome.session and outcome.session.end) == (StopReason.AGENT_ERROR, "raised")
    said = r"the agent raised ConfigError: extra_info\.grid: 'x' is no grid; mend the row"
    with pytest.raises(ConfigError, match=said):
        await endpoint.run("r2", row | {"extra_info": {"asks": False}}, {})
    await endpoint.aclose()


async def test_an_agents_process_goes_on_only_when_its_return_was_noted(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    runner = ProcessRunner("tests.agent_programs:looks_after_its_return", None, "agent")
    row = {"noted": str(noted), "seen": str(tmp_path / "seen")}
    end = await runner.run(row, ADDRESS, asyncio.Event(), noted.touch)
    assert end == AgentEnd("returned")
    assert (tmp_path / "seen").read_text() == "noted"
    await runner.aclose()


@pytest.mark.parametrize("script", ["pass", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
async def test_the_end_of_a_command_is_told_once(script: str) -> None:
    told: list[str] = []
    runner = ProcessRunner(None, COMMAND, "command")
    await runner.run({"script": script}, ADDRESS, asyncio.Event(), lambda: told.append("ended"))
    assert told == ["ended"]
    await runner.aclose()


async def test_a_commands_status_says_that_there_is_an_outage_or_that_nothing_can_be_judged() -> None:
    runner = ProcessRunner(None, COMMAND, "command")
    ends = {"raise SystemExit(75)": "outage", "raise SystemExit(69)": "unjudged", "raise SystemExit(74)": "exited"}
    for script, kind in ends.items():
        assert (await runner.run({"script": script}, ADDRESS, asyncio.Event())).kind == kind
    await runner.aclose()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the folders of agents are made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process_runner, "_GRACE_S", 0.1)
    monkeypatch.setattr(process_runner, "_KILLED_S", 0.2)
    return tmp_path


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("import os; os.kill(os.getppid(), 9); import time; time.sleep(1e6)", "exited"),
        ("import os; os.kill(os.getppid(), 19); open(sys.argv[1] + '.stopped', 'w'); "
         "import time; time.sleep(1e6)", "timed_out"),
        ("import os; os.kill(os.getppid(), 19); open(sys.argv[1] + '.stopped', 'w')", "timed_out"),
        ("import os; d = os.path.dirname(sys.argv[1]); os.makedirs(d + '/x/y'); os.chmod(d + '/x', 0)", "returned"),
        ("import os; d = os.path.dirname(sys.argv[1]); os.rename(d, d + '.gone'); os.symlink(d + '.gone', d); "
         "import shutil; shutil.rmtree(d + '.gone')", "returned"),
    ],
)  # fmt: skip
async def test_no_folder_of_an_agent_stays(script: str, kind: str, folders: Path) -> None:
    runner = ProcessRunner(None, COMMAND, "command")
    time_up = asyncio.Event()
    running = asyncio.ensure_future(runner.run({"script": script}, ADDRESS, time_up))
    if kind == "timed_out":
        await until(lambda: list(folders.glob("*/row.json.stopped")))
        time_up.set()
    assert (await running).kind == kind
    assert os.listdir(folders) == []
    await runner.aclose()


async def test_a_cancelled_session_leaves_no_folder(folders: Path) -> None:
    runner = ProcessRunner(None, COMMAND, "command")
    script = "import os, time; os.kill(os.getppid(), 19); open(sys.argv[1] + '.stopped', 'w'); time.sleep(1e6)"
    running = asyncio.ensure_future(runner.run({"script": script}, ADDRESS, asyncio.Event()))
    await until(lambda: list(folders.glob("*/row.json.stopped")))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert os.listdir(folders) == []
    await runner.aclose()


def test_a_folder_is_removed_also_where_an_agent_has_closed_it() -> None:
    """Root may remove everything, so that another user does it where root runs the test."""
    above = tempfile.mkdtemp()
    os.chmod(above, 0o777)
    folder = f"{above}/of an agent"
    child = os.fork()
    if not child:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        os.makedirs(f"{folder}/a/b/c")
        open(f"{folder}/a/b/file", "w").close()
        for closed in ("/a/b/c", "/a/b", "/a", ""):
            os.chmod(f"{folder}{closed}", 0)
        os._exit(not remove_folder(folder))
    assert os.waitpid(child, 0)[1] == 0
    assert os.listdir(above) == []
    assert stat.S_IMODE(os.stat(above).st_mode) == 0o777  # the folder above is not changed
    os.rmdir(above)


@pytest.mark.parametrize("closed", [False, True])
def test_a_folder_is_removed_however_deep_it_is(folders: Path, closed: bool) -> None:
    """Deeper than Python calls itself, and with paths that are longer than the system reads."""
    folder = folders / "deep"
    folder.mkdir()
    (folders / "kept").mkdir()
    (folders / "kept" / "file").touch()
    at = os.open(folder, os.O_RDONLY)
    for number in range(1100):
        os.mkdir("deep", dir_fd=at)
        if number % 100 == 0:
            os.symlink(folders / "kept", "link", dir_fd=at)
        below = os.open("deep", os.O_RDONLY, dir_fd=at)
        if closed:
            os.fchmod(at, 0)
        os.close(at)
        at = below
    os.close(at)
    try:
        assert remove_folder(str(folder))
    finally:  # pytest could not remove it either
        subprocess.run(["rm", "-rf", folder], check=True)
    assert os.listdir(folders) == ["kept"]
    assert os.listdir(folders / "kept") == ["file"]
