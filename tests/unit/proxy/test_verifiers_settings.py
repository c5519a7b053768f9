"""Rows and settings of the bridge to verifiers, and its processes, as far as they are looked at without verifiers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT, has_ended
from verl_multiturn.config import ProxySettings, VerifiersSettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.runners import build_runner, check_agent
from verl_multiturn.harnesses.verifiers import runner as bridge
from verl_multiturn.harnesses.verifiers import server
from verl_multiturn.harnesses.verifiers.imports import config_of
from verl_multiturn.harnesses.verifiers.runner import VerifiersRunner, task_of
from verl_multiturn.harnesses.verifiers.settings_check import _check_roles
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd

ONE = VerifiersSettings(envs={"shop": {}})
TWO = VerifiersSettings(envs={"shop": {}, "haggle": {}})
ADDRESS = SessionAddress("http://127.0.0.1:9/v1", "sk-secret", "http://127.0.0.1:9", "s")


def row(named: Any) -> dict[str, Any]:
    return {"extra_info": {"verifiers": named}}


def test_a_row_names_an_environment_and_has_its_task() -> None:
    assert task_of(row({"env": "haggle", "task": {"cost": 1}}), TWO) == ("haggle", {"cost": 1})
    assert task_of(row({"task": '{"cost": 1}'}), ONE) == ("shop", {"cost": 1})


@pytest.mark.parametrize("named", [None, 7, {}, "shop", {"env": "shop"}, {"task": "no json"}, {"task": {}, "idx": 1}])
def test_a_row_without_a_task_is_refused(named: object) -> None:
    with pytest.raises(ConfigError, match=r"extra_info\.verifiers of a data row is .*prepare the rows anew"):
        task_of(row(named), ONE)


@pytest.mark.parametrize(("named", "settings"), [({"task": {}}, TWO), ({"env": "gone", "task": {}}, ONE)])
def test_a_row_of_no_environment_is_refused(named: object, settings: VerifiersSettings) -> None:
    with pytest.raises(ConfigError, match=r"extra_info\.verifiers\.env of a data row is .*; name one of \['"):
        task_of(row(named), settings)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"needs verifiers' own Python 3\.11; run `verl-multiturn install verifiers DIR"
    ):
        check_agent(ProxySettings(agent="verifiers"))
    with pytest.raises(ConfigError, match="leave 'command' and 'runner' out"):
        check_agent(ProxySettings(agent="verifiers", command=["true"], python=sys.executable))
    with pytest.raises(ConfigError, match="no program that can be started"):
        check_agent(ProxySettings(agent="verifiers", python="/no/such/python"))
    with pytest.raises(ConfigError, match="needs an environment; name one"):
        check_agent(ProxySettings(agent="verifiers", python=sys.executable))
    with pytest.raises(ConfigError, match=r"its Verifiers is not installed, expected 3\.11 or newer and 0\.4\.0; run"):
        check_agent(ProxySettings(agent="verifiers", python=sys.executable, verifiers=ONE))
    assert isinstance(build_runner(ProxySettings(agent="verifiers", python=sys.executable)), VerifiersRunner)


@pytest.mark.parametrize(
    ("seats", "roles", "train", "said"),
    [
        ({"user": False}, None, None, "none of its seats"),
        ({"a": True, "user": False}, None, None, r"set proxy\.roles=\['a', 'user'\] and proxy\.train=\['a'\]"),
        ({"a": True, "b": True}, None, None, "would share one reward"),
        ({"a": True, "b": True}, ["a"], None, r"its seat 'b' is none of proxy\.roles=\['a'\]; add it"),
        ({"a": True, "user": False}, ["a", "user"], None, "its seat 'user' is not to be trained, and proxy.train has"),
        ({"a": True, "user": False}, ["a", "user"], ["user"], "its seat 'user' is not to be trained, and proxy.train"),
    ],
)
def test_seats_without_their_roles_are_refused(
    seats: dict[str, bool], roles: list[str] | None, train: list[str] | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _check_roles("at", seats, roles, train)


def test_seats_with_their_roles_are_accepted() -> None:
    _check_roles("at", {"a": True}, None, None)
    _check_roles("at", {"a": True, "user": False}, ["a", "user", "b"], ["a"])
    _check_roles("at", {"a": True, "b": True}, ["a", "b"], None)


class Seat(types.SimpleNamespace):
    """A seat as verifiers has it."""


def seat(kind: str = "subprocess", **changed: Any) -> Seat:
    retries = types.SimpleNamespace(max_retries=0, rules=[])
    given = {"runtime": types.SimpleNamespace(type=kind), "retries": retries, "model": None, "client": None}
    return Seat(**{**given, **changed})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand in for the parts of verifiers that read a configuration."""
    made = types.SimpleNamespace(seats={"agent": seat()}, retries=seat().retries, given=None)

    def resolve(given: dict[str, Any]) -> Any:
        made.given = given
        if "strange" in given:
            raise ValueError("Extra inputs are not permitted")
        return types.SimpleNamespace(retries=made.retries, taskset=types.SimpleNamespace(id="t"), id="", of=made)

    agent = types.ModuleType("verifiers.v1.configs.agent")
    loaders = types.ModuleType("verifiers.v1.utils.loaders")
    vars(agent)["agent_config_fields"] = lambda config: config.of.seats
    vars(loaders).update(resolve_env_config=resolve, env_config_type=lambda *_: object)
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.configs", "verifiers.v1.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verifiers.v1.configs.agent", agent)
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", loaders)
    return made


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            seat("prime"),
            r"w\.envs\.e\.agent\.runtime\.type: 'prime' needs an account .*set agent: {runtime: {type: sub",
        ),
        (seat("modal"), "'modal' needs an account"),
        (seat(model="gpt"), "would lead it past the endpoint"),
        (seat(client=object()), "would lead it past the endpoint"),
        (seat(retries=types.SimpleNamespace(max_retries=1, rules=[])), r"agent\.retries: a session is not repeated"),
    ],
)
def test_a_seat_that_cannot_be_played_here_is_refused(
    stand_in: types.SimpleNamespace, changed: Seat, said: str
) -> None:
    config_of("e", {}, "w", with_roles=False)
    stand_in.seats = {"agent": changed}
    with pytest.raises(ConfigError, match=said):
        config_of("e", {}, "w", with_roles=False)


def test_what_verifiers_refuses_is_refused_by_name(stand_in: types.SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"w\.envs\.e: verifiers does not accept it: ValueError: Extra inputs"):
        config_of("e", {"strange": 1}, "w", with_roles=False)
    stand_in.retries = types.SimpleNamespace(max_retries=2, rules=[])
    with pytest.raises(ConfigError, match=r"w\.envs\.e\.retries: an episode is one session"):
        config_of("e", {}, "w", with_roles=False)


def test_seats_name_themselves_and_a_null_of_yaml_is_a_name(stand_in: types.SimpleNamespace) -> None:
    stand_in.seats = {"buyer": seat(), "seller": seat()}
    config_of("e", {"buyer": {"harness": {"id": None, "x": 1}}}, "w", with_roles=True)
    assert {name: each.model for name, each in stand_in.seats.items()} == {"buyer": "buyer", "seller": "seller"}
    assert stand_in.given == {"buyer": {"harness": {"id": "null", "x": 1}}}


_PROGRAM = """
import json, os, shutil, time
def load(spec):
    global folder
    folder = spec["folder"]
    return spec["settings"]["envs"]
def leave(envs):
    shutil.rmtree(folder)
def serve(served, envs):
    with served.makefile("rwb") as stream:
        def say(said):
            stream.write(json.dumps(said).encode() + b"\\n"); stream.flush()
        say({"process": os.getpid()})
        name = json.loads(stream.readline())["env"]
        for line in stream:
            asked = json.loads(line)
            if "tasks" in asked:
                if name == "endless": say({"n": asked["n"], "problem": "no end"})
                else: say({"n": asked["n"], "rows": [{"name": name}]})
            elif "cancel" in asked:
                if name == "holds": time.sleep(3600)
                say({"n": asked["n"], "end": None})
            elif name not in ("waits", "holds"):
                end = {"kind": "reward", "reward": 0.5, "problem": "", "seats": {"agent": 0.5}, "others": []}
                end |= envs[name] | ({"problem": asked["play"]["base_url"]} if name == "failed" else {})
                say({"n": asked["n"], "end": end})
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make runners whose environments are played by a program of ours, in a Python that has this package's files."""
    (tmp_path / "made_environments.py").write_text(_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(bridge, "_SERVER", "made_environments")
    monkeypatch.setattr(bridge, "_GRACE_S", 0.2)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def make(**settings: Any) -> VerifiersRunner:
        envs = {
            **{name: {} for name in ("right", "waits", "holds", "endless")},
            "failed": {"kind": "failed"},
            "unjudged": {"kind": "unjudged", "problem": "no grader"},
            "away": {"kind": "outage", "problem": "no tunnel"},
            "user": {"others": ["user"]},
        }
        given = {"agent": "verifiers", "python": sys.executable, "verifiers": {"envs": envs}, **settings}
        return VerifiersRunner(ProxySettings.model_validate(given), sys.executable)

    return make


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob("verl-multiturn-verifiers-vmt-*"))


async def started(runner: VerifiersRunner, name: str) -> int:
    """Wait for the process of an environment."""
    await runner.rows(name)
    return runner.processes[name]


async def play(runner: VerifiersRunner, name: str, time_up: asyncio.Event | None = None) -> AgentEnd:
    return await runner.run(row({"env": name, "task": "{}"}), ADDRESS, time_up or asyncio.Event())


async def test_an_episode_ends_its_session(made: Any, tmp_path: Path) -> None:
    runner = made()
    try:
        ends = [await play(runner, name) for name in ("right", "failed", "unjudged", "away")]
        assert [end.kind for end in ends] == ["returned", "raised", "unjudged", "outage"]
        assert ends[0].result.reward == 0.5
        assert ends[1].problem == "http://127.0.0.1:9/s/sk-secret/v1"  # the endpoint takes the secret out of problems
        assert (await runner.rows("right"))[0] == {"name": "right"}
        with pytest.raises(ConfigError, match=r"envs\.endless: its tasks cannot be loaded: no end"):
            await runner.rows("endless")
        with pytest.raises(ConfigError, match="'gone' is none of the environments"):
            await runner.rows("gone")
        assert len(set(runner.processes.values())) == 5
        assert len(folders(tmp_path)) == 1
    finally:
        processes = [psutil.Process(each) for each in runner.processes.values()]
        await runner.aclose()
    assert [each for each in processes if not has_ended(each)] == []
    assert folders(tmp_path) == []


async def test_rewards_are_those_of_roles(made: Any) -> None:
    runner = made(roles=["agent", "user"], train=["agent"])
    try:
        assert dict((await play(runner, "user")).result.roles) == {"agent": 0.5}
    finally:
        await runner.aclose()
    runner = made(roles=["agent", "user"])
    try:
        with pytest.raises(ConfigError, match=r"proxy\.train has the role 'user', and the environment 'user' does not"):
            await play(runner, "user")
    finally:
        await runner.aclose()
    runner = made()  # its environment decides with the task, and not at the start
    try:
        with pytest.raises(ConfigError, match=r"proxy\.roles is not set, and the environment 'user' does not"):
            await play(runner, "user")
    finally:
        await runner.aclose()


async def test_an_error_that_verifiers_does_not_note_is_the_episodes_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    async def fails(self: Any, asked: Any) -> None:
        raise KeyError("no such shop")

    monkeypatch.setattr(server._EnvironmentProcess, "_end", fails)
    monkeypatch.setattr(server._EnvironmentProcess, "_say", lambda self, each: said.append(each))
    process = server._EnvironmentProcess({})
    process._take({"n": 7, "play": {}})
    await process._episodes[7]
    (only,) = said
    assert (only["n"], only["end"]["kind"]) == (7, "unjudged")
    assert only["end"]["problem"] == "KeyError: KeyError: 'no such shop'"


async def test_a_killed_process_makes_its_sessions_invalid_and_is_started_again(made: Any) -> None:
    runner = made()
    try:
        first = await started(runner, "waits")
        sessions = [asyncio.ensure_future(play(runner, "waits")) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        ends = await asyncio.gather(*sessions)
        assert [end.kind for end in ends] == ["unjudged"] * 3
        assert "the process of the environment 'waits' ended" in ends[0].problem
        assert (await runner.rows("waits")) == [{"name": "waits"}]
        assert runner.processes["waits"] != first
    finally:
        await runner.aclose()


@pytest.mark.parametrize("name", ["waits", "holds"])
async def test_an_episode_that_does_not_end_is_ended(made: Any, name: str) -> None:
    runner = made()
    time_up = asyncio.Event()
    try:
        await started(runner, name)
        session = asyncio.ensure_future(play(runner, name, time_up))
        await asyncio.sleep(0.1)
        time_up.set()
        assert (await session).kind == "timed_out"
        cancelled = asyncio.ensure_future(play(runner, name))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    finally:
        await runner.aclose()


async def test_a_session_ends_whose_environment_hangs_at_its_import(made: Any, tmp_path: Path) -> None:
    (tmp_path / "made_environments.py").write_text("import time\ndef load(spec): time.sleep(3600)\n")
    runner, time_up = made(), asyncio.Event()
    try:
        session = asyncio.ensure_future(play(runner, "right", time_up))
        await asyncio.sleep(0.1)
        time_up.set()
        end = await session
        assert (end.kind, end.problem) == (
            "failed",
            "no process for the environment 'right': its code was not imported when the session's time was up; look "
            "whether an import hangs, or allow more time",
        )
    finally:
        await runner.aclose()


async def test_the_folder_of_a_killed_worker_is_removed(made: Any, tmp_path: Path) -> None:
    from verl_multiturn.harnesses.owners import owner

    gone = tmp_path / f"verl-multiturn-verifiers-{owner(2**22 - 7)[:-2]}1-x"
    mine = tmp_path / f"verl-multiturn-verifiers-{owner()}x"
    for each in (gone, mine):
        (each / "deep").mkdir(parents=True)
    runner = made()
    try:
        await runner.rows("right")
    finally:
        await runner.aclose()
    assert (gone.exists(), mine.exists()) == (False, True)


_WORKER = """
import asyncio, os, signal, sys
from verl_multiturn.config import ProxySettings
from verl_multiturn.harnesses.verifiers import runner as bridge
from verl_multiturn.harnesses.verifiers import server

bridge._SERVER = "made_environments"
settings = ProxySettings(agent="verifiers", verifiers={"envs": {"waits": {}}})


async def main():
    runner = bridge.VerifiersRunner(settings, sys.executable)
    await runner.rows("waits")
    print(runner.processes["waits"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main())
"""


def test_a_killed_worker_leaves_nothing(made: Any, tmp_path: Path) -> None:
    worker = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, cwd=ROOT)
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    process = int(worker.stdout)
    while folders(tmp_path):  # until the test's own time is up
        time.sleep(0.05)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert has_ended(psutil.Process(process))
