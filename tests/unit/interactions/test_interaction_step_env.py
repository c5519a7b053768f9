"""Environments as real processes: each form, one seed in many sessions at once, each fault, and leaks afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.conftest import ROOT, child_processes, has_ended
from tests.forger import forger
from tests.idle_loop import hold_up
from tests.long.interactions import interaction_envs
from verl_multiturn.errors import ConfigError, InteractionContractError, OutageError
from verl_multiturn.interactions.actions import UnreadableError, read_action
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.environments import process
from verl_multiturn.interactions.environments.episode import EnvironmentCode
from verl_multiturn.interactions.environments.zygote import serve
from verl_multiturn.interactions.errors import EnvironmentFailedError
from verl_multiturn.interactions.running.replies import InteractionFailedError
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession
from verl_multiturn.interactions.step_env import StepEnv
from verl_multiturn.processes import forks
from verl_multiturn.processes.zygote import seed_process

pytestmark = pytest.mark.slow


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]


@contextlib.asynccontextmanager
async def world(env: str, **config: Any) -> AsyncIterator[StepEnv]:
    """Yield a world, and check that no process or descriptor of it remains."""
    before = len(os.listdir("/proc/self/fd"))
    made = StepEnv({"env": env if ":" in env or "-" in env else f"tests.worlds:{env}", **config})
    try:
        yield made
    finally:
        await made.aclose()
    assert not child_processes(recursive=True)
    assert len(os.listdir("/proc/self/fd")) <= before


async def play(env: StepEnv, name: str, *turns: str, **kwargs: Any) -> list[Reply]:
    replies = [await env.start(name, **kwargs)]
    for turn in turns:
        replies.append(await env.reply(name, said(turn)))
    return replies


async def test_gymnasium() -> None:
    config = {"env_kwargs": {"render_mode": "ansi", "is_slippery": False}, "actions": ["left", "down", "right", "up"]}
    async with world("FrozenLake-v1", **config) as env:
        first, down, odd, over = await play(
            env, "a", "down", "I fly", "<think>up?</think>So\n<action> Right. </action>", env_kwargs={"map_name": "4x4"}
        )
        assert first == Reply(text="[S]FFF\nFHFH\nFFFH\nHFFG", state="[S]FFF\nFHFH\nFFFH\nHFFG")
        assert (down.text, down.reward, down.done) == ("  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG", 0.0, False)
        assert odd.text == (
            "Your action cannot be read: 'I fly' is none of the actions. Give one of these actions: left, down, right, "
            "up. End with <action>…</action>."
        )
        assert (odd.reward, odd.done, odd.state, odd.metrics) == (None, False, down.state, {"unreadable_actions": 1.0})
        assert (over.reward, over.done, over.truncated, env.score("a")) == (0.0, True, False, 0.0)
        with pytest.raises(EnvironmentFailedError, match=r"reset\(\) of the environment raised TypeError"):
            await env.start("b", env_kwargs={"size": 3})


async def test_names_of_actions_that_the_environment_does_not_have_are_refused() -> None:
    async with world("FrozenLake-v1", actions=["left", "down", "right", "up", "jump"]) as env:
        with pytest.raises(InteractionContractError, match=r"numbers from 0 to 3, but `actions` .* from 0 to 4"):
            await env.start("a", seed=1)


async def test_text_arena() -> None:
    async with world("Arena") as env:
        first, higher, won = await play(env, "a", "[1]", "It is [3].", seed=np.int64(5))
        assert first.text == "Guess, 1 player.\nSeed 5."
        assert (higher.text, higher.reward, higher.done) == ("Higher.", None, False)
        assert (won.reward, won.done, env.score("a")) == (1.0, True, 0.0)  # no reward counts twice
        with pytest.raises(InteractionContractError, match="turn of player 1; only games for one player"):
            await play(env, "b", "[1]", env_kwargs={"players": 2})


async def test_the_functions_and_the_score_of_an_author() -> None:
    names = {"to_text": "tests.worlds:loud", "to_action": "tests.worlds:numbered", "state": "tests.worlds:where"}
    async with world("Odd", **names, score="last", invalid=-0.5) as env:
        first, odd, did = await play(env, "a", "left", "4")
        assert (first.text, first.state) == ("BEGUN", ("at", ("begun", 1.5)))
        assert (odd.reward, odd.text) == (None, "Your action cannot be read: no number.")
        assert (did.text, did.reward, did.state) == ("DID <4>", None, ("at", ("did <4>", 1.5)))
        assert env.score("a") == 1.0
    async with world("Odd", **names, score="sum", invalid=-0.5) as env:
        await play(env, "a", "left", "4")
        assert env.score("a") == 0.5
    async with world("Odd", **names, invalid=-0.5) as env:
        _, odd, did = await play(env, "a", "left", "4")
        assert (odd.reward, did.reward, env.score("a")) == (-0.5, 1.0, 0.0)
    async with world("Odd", state="tests.worlds:unhashable") as env:
        with pytest.raises(InteractionContractError, match=r"state returned \{'at': 'begun'\}, expected a text"):
            await env.start("a")
    async with world("Odd", to_text="tests.worlds:number") as env:
        with pytest.raises(InteractionContractError, match="to_text returned 7, expected a text"):
            await env.start("a")


async def test_one_seed_is_one_world() -> None:
    async def episode(env: StepEnv, name: str, seed: int | None) -> list[Any]:
        return [(r.text, r.reward, r.truncated) for r in await play(env, name, "a", "b", "c", seed=seed)]

    async with world("Maze") as env:
        alone = await episode(env, "alone", 7)
        beside = await asyncio.gather(*[episode(env, f"n{index}", 7) for index in range(24)])
        assert all(each == alone for each in beside)
        others = await asyncio.gather(*[episode(env, f"o{index}", None) for index in range(4)])
        assert len({each[0] for each in others}) > 1  # without a seed the forks do not share their zygote's numbers
    async with world("Born") as born:
        boards = await asyncio.gather(*[born.start(f"n{index}", seed=index % 2) for index in range(4)])
        texts = [reply.text for reply in boards]
        assert texts[:2] == texts[2:]
        assert texts[0] != texts[1]
        assert len({(await born.start(f"o{index}")).text for index in range(4)}) == 4
    async with world("Maze", env_kwargs={"size": 3}) as again:
        assert await episode(again, "alone", 7) == alone


def test_the_benchmark_of_environments() -> None:
    assert all(0 < each < 1_000 for each in interaction_envs.env_step_p50_ms(steps=40))
    assert interaction_envs.same_world(sessions=6)
    assert interaction_envs.worlds_in_threads(threads=8) > 1  # else the comparison shows nothing


@pytest.mark.parametrize(
    ("text", "actions", "space", "action"),
    [
        ("<action>Up</action>", ["down", "up"], None, 1),
        ("<action>down</action> no, <action>up</action>", ["down", "up"], None, 1),
        ("I think.\n\n**up**\n", ["down", "up"], None, 1),
        ("go up", ["down", "up"], None, None),
        ("", ["down", "up"], None, None),
        ("3", None, 4, 3),
        ("4", None, 4, None),
        ("-1", None, 4, None),
        ("9" * 5000, None, 4, None),
        ("two\nlines", None, None, "two\nlines"),
        ("so <action> [5] </action>", None, None, "[5]"),
        ("", None, None, None),
        ("<action></action>", None, None, None),
    ],
)
def test_reading_an_action(text: str, actions: Any, space: int | None, action: Any) -> None:
    class Discrete:
        start, n = 0, space

    given = (text, actions, None if space is None else Discrete())
    if action is None:
        with pytest.raises(UnreadableError):
            read_action(*given)
    else:
        assert read_action(*given) == action


FAILED = [
    ("raise", "make", r"reset\(\) of the environment raised RuntimeError: the world .* ends \(worlds.py:\d+\)"),
    ("raise", "reset", r"reset\(\) of the environment raised RuntimeError"),
    ("raise", "step", r"step\(\) of the environment raised RuntimeError"),
    ("exit", "step", r"step\(\) of the environment raised SystemExit: 3"),
    ("die", "make", r"ended in the middle of reset\(\)"),
    ("die", "step", r"ended in the middle of step\(\)"),
    ("killed", "step", r"ended in the middle of step\(\)"),
    ("nan", "step", "the reward is nan, expected a finite number from"),
    ("far", "step", r"the reward is 1e\+39, expected a finite number from"),
    ("hang", "make", r"start did not return within 60 s"),
    ("hang", "step", r"reply did not return within 60 s"),
    ("deaf", "step", r"reply did not return within 60 s"),
]
WRONG = [
    ("none", "step", r"step\(\) returned 5, expected \(observation, reward, terminated, truncated, info\)"),
    ("short", "reset", r"reset\(\) returned \('seen',\), expected \(observation, info\)"),
    ("text reward", "step", "the reward is '1', expected a number"),
    ("no flag", "step", "returned 0 as terminated, expected True or False"),
]


async def test_faults_of_an_environment(tmp_path: Path) -> None:
    """Each ends its own conversation in time, gets a message, and leaves no process; the others go on."""

    async def ended(env: StepEnv, index: int, what: str, where: str) -> str:
        kwargs = {"seed": 1, "env_kwargs": {"what": what, "where": where}}
        try:
            async with InteractionSession(gate, f"c{index}", kwargs) as session:
                await session.start()
                await session.reply(said("go"))
        except (InteractionFailedError, InteractionContractError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async with world("Odd", env_kwargs={"folder": str(tmp_path)}) as env:
        env.name = "odd"
        gate = InteractionGate(env, 60.0)
        faults = [*FAILED, *WRONG, ("", "", "")]
        ending = [asyncio.ensure_future(ended(env, i, what, where)) for i, (what, where, _) in enumerate(faults)]
        hanging = [each for each, (what, _, _) in zip(ending, faults, strict=True) if what in ("hang", "deaf")]
        await asyncio.wait(set(ending) - set(hanging))
        await _until(lambda: len(list(tmp_path.glob("hangs-*"))) == len(hanging))
        assert not any(each.done() for each in hanging)
        hold_up(1000)  # their time is up
        found = await asyncio.gather(*ending)
        for (what, where, message), text in zip(faults, found, strict=True):
            kind = "InteractionContractError" if (what, where, message) in WRONG else "InteractionFailedError"
            assert re.search(f"^{kind}: .*{message}" if message else "^$", text), text
        (zygote,) = child_processes()
        await _until(lambda: not zygote.children(recursive=True))


async def test_odd_texts_go_through() -> None:
    async with world("Odd") as env:
        _, odd = await play(env, "a", "go", env_kwargs={"what": "surrogates"})
        _, large = await play(env, "b", "go \ud800", env_kwargs={"what": "large"})
        assert odd.text == "a\ud800b"
        assert len(large.text) == 10_000_000
        with pytest.raises(EnvironmentFailedError, match="answered with more than 64 MB"):
            await play(env, "c", "go", env_kwargs={"what": "huge"})


async def test_rewards_and_flags_may_be_arrays_without_dimensions() -> None:
    async with world("Odd") as env:
        _, seen = await play(env, "a", "go", env_kwargs={"what": "scalars"})
        assert (seen.reward, seen.done, seen.truncated) == (0.5, True, False)


async def test_a_child_that_a_step_forked_answers_nothing() -> None:
    async with world("Odd") as env:
        actions = [str(step) for step in range(8)]
        replies = await play(env, "a", *actions, env_kwargs={"what": "fork"})
        assert [reply.text for reply in replies[1:]] == [f"did {action}" for action in actions]
        await env.close("a")


async def test_a_program_that_a_step_starts_answers_nothing(tmp_path: Path) -> None:
    answer = {"text": "won", "state": None, "reward": 1.0, "done": True, "truncated": False}
    async with world("Shell") as env:
        first, second = (await play(env, "a", *[forger(tmp_path, answer)] * 2))[1:]
        assert [(reply.text, reply.reward, reply.done) for reply in (first, second)] == [("status 0", 0.0, False)] * 2
        await env.close("a")


def test_without_a_seed_forks_share_no_random_numbers() -> None:
    torch = pytest.importorskip("torch")
    drawn = set()
    for _ in range(4):
        torch.manual_seed(1)  # the state of the zygote
        seed_process(None)
        drawn.add(float(torch.rand(1)))
    assert len(drawn) == 4


async def test_a_cancelled_session_leaves_no_process(tmp_path: Path) -> None:
    async with world("Odd") as env:
        await play(env, "warm")
        for where in ("reset", "step"):
            name = f"hangs in {where}"
            folder = tmp_path / where
            folder.mkdir()
            kwargs = {"what": "hang", "where": where, "folder": str(folder)}
            playing = asyncio.ensure_future(play(env, name, "go", env_kwargs=kwargs))
            await _until(lambda: any(folder.iterdir()))  # noqa: B023 - awaited here
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            if where == "step":
                with pytest.raises(EnvironmentFailedError, match="nothing more can be played"):
                    await env.reply(name, said("go"))
            await env.close(name)
        for delay_s in (0.0, 0.001, 0.004, 0.01):  # in the middle of a fork
            starting = [asyncio.ensure_future(env.start(f"{delay_s} {index}")) for index in range(8)]
            await asyncio.sleep(delay_s)
            for each in starting:
                each.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            for index in range(8):
                await env.close(f"{delay_s} {index}")
        await env.close("warm")
        (zygote,) = child_processes()
        await _until(lambda: not zygote.children(recursive=True))


async def test_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world("Odd", env_kwargs={"folder": str(tmp_path)}) as env:
        await play(env, "a", "go")
        await play(env, "b", env_kwargs={"what": "hang", "where": "close"})
        await play(env, "c", "go", env_kwargs={"what": "child"})
        child = int((tmp_path / "child").read_text())
        assert psutil.pid_exists(child)
        with monkeypatch.context() as patience:
            patience.setattr(process, "_POLITE_S", 60.0)  # as long as a busy machine needs
            await asyncio.gather(*[env.close(name) for name in ("a", "c", "never")])
        await env.close("b")
        assert len([name for name in os.listdir(tmp_path) if name.startswith("closed-")]) == 2  # `a` and `c`
        await _until(lambda: not psutil.pid_exists(child))
        with pytest.raises(KeyError):
            await env.reply("a", said("go"))


async def test_a_zygote_that_dies_is_started_again() -> None:
    async with world("Odd") as env:
        await play(env, "a")
        (zygote,) = child_processes()
        (episode,) = zygote.children()
        zygote.kill()
        await _until(lambda: not episode.is_running() or episode.status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(EnvironmentFailedError, match=r"ended in the middle of step\(\)"):
            await env.reply("a", said("go"))  # the kernel has ended the episode with the zygote
        assert (await play(env, "b", "go"))[1].text == "did go"
        for name in "ab":
            await env.close(name)


async def test_a_zygote_that_was_stopped_goes_on() -> None:
    async with world("Odd") as env:
        await play(env, "a")
        (zygote,) = child_processes()
        zygote.suspend()
        await _until(lambda: zygote.status() == psutil.STATUS_STOPPED)
        assert (await play(env, "b", "go"))[1].text == "did go"
        assert (await env.reply("a", said("go"))).text == "did go"  # its process lived on
        assert child_processes() == [zygote]
        for name in "ab":
            await env.close(name)


async def test_a_zygote_that_is_stopped_again_and_again_is_replaced() -> None:
    async with world("Odd") as env:
        await play(env, "a", "go", env_kwargs={"what": "stops its zygote"})
        (zygote,) = child_processes()
        await _until(lambda: zygote.status() == psutil.STATUS_STOPPED)
        for name in "bcd":
            assert (await play(env, name, "go"))[1].text == "did go"
            await env.close(name)
        await env.close("a")


async def test_a_zygote_that_dies_as_it_is_asked_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = socket.send_fds

    def killed_first(channel: socket.socket, *args: Any) -> int:
        monkeypatch.setattr(socket, "send_fds", asked)
        (zygote,) = child_processes()
        zygote.kill()
        select.select([channel], [], [])  # until the kernel has closed its end
        return asked(channel, *args)

    async with world("Odd") as env:
        monkeypatch.setattr(socket, "send_fds", killed_first)
        assert (await play(env, "a", "go"))[1].text == "did go"


async def test_a_stopped_zygote_ends_with_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_POLITE_S", 60.0)  # as long as a busy machine needs
    async with world("Odd", env_kwargs={"folder": str(tmp_path)}) as env:
        await play(env, "a", "go", env_kwargs={"what": "child"})
        (zygote,) = child_processes()
        zygote.suspend()
        await _until(lambda: zygote.status() == psutil.STATUS_STOPPED)
        await env.close("a")
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_episodes_end_with_their_worker(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from verl_multiturn.interactions.step_env import StepEnv\n"
        "async def main():\n"
        "    env = StepEnv({'env': 'tests.worlds:Odd', 'env_kwargs': {'folder': sys.argv[1]}})\n"
        "    await env.start('a')\n"
        "    await env.start('b')\n"
        "    asyncio.get_running_loop().create_task(env.reply('b', [{'content': 'x'}]))\n"
        "    hanging = env.start('c', env_kwargs={'what': 'deaf', 'where': 'reset'})\n"
        "    asyncio.get_running_loop().create_task(hanging)\n"
        "    while not any(Path(sys.argv[1]).iterdir()):\n"
        "        await asyncio.sleep(0.01)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert worker.stdout is not None
    with worker.stdout as output:
        assert output.readline() == b"ready\n"
        family = psutil.Process(worker.pid).children(recursive=True)
        assert len(family) == 4  # the zygote and three episodes
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    while not all(map(has_ended, family)):
        time.sleep(0.01)


async def test_an_id_that_a_module_registers_at_import() -> None:
    async with world("tests.registered_world:RegisteredWorld-v0") as env:
        first, one, two = await play(env, "a", "1", "1")
        assert [reply.text for reply in (first, one, two)] == ["0", "1", "2"]
        assert (two.reward, two.done) == (1.0, True)
        assert (await play(env, "b", "1", env_kwargs={"target": 1}))[1].done
        for name in "ab":
            await env.close(name)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("tests.worlds:Mace", "'tests.worlds' has no 'Mace'; did you mean 'Maze'"),
        ("tests.worlds:not_callable", "is 3, expected a function or a class"),
        ("NoSuchLake-v1", r"write 'package\.module:NoSuchLake-v1' if a package registers it when it is imported"),
        ("RegisteredWorld-v0", r"write 'package\.module:RegisteredWorld-v0' if a package registers it"),
        ("FrozenLake-v9", "Environment version `v9` for environment `FrozenLake` doesn't exist"),
        ("tests.registered_world:NoSuchLake-v1", "'tests.registered_world' registers no 'NoSuchLake-v1'"),
        ("tests.no_such:NoSuchLake-v1", "env: cannot import 'tests.no_such'"),
        ("tests.no_such:Maze", "cannot import 'tests.no_such'"),
    ],
)
async def test_an_environment_that_cannot_be_imported(env: str, message: str) -> None:
    async with world(env) as made:
        for name in "ab":  # it is not tried again
            with pytest.raises(ConfigError, match=message):
                await made.start(name)
            await made.close(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "env: Field required, got nothing"),
        ({"env": "gem_of_nobody.envs:make"}, "needs the package 'gem_of_nobody', which is not installed; pip install"),
        ({"env": "world_of_nobody:World-v0"}, "needs the package 'world_of_nobody', which is not installed"),
        ({"env": "tests.worlds:Maze", "to_text": "tests.worlds.loud"}, "to_text: expected 'module:function'"),
        ({"env": "tests.worlds:Maze", "actions": ["up", "Up"]}, "actions: expected names that differ"),
        ({"env": "tests.worlds:Maze", "invalid": "ignore"}, "invalid: expected 'ask again' or a finite number from"),
        ({"env": "tests.worlds:Maze", "invalid": float("nan")}, "invalid: expected 'ask again' or a finite number"),
        ({"env": "tests.worlds:Maze", "invalid": -1e39}, "invalid: expected 'ask again' or a finite number from"),
        ({"env": "tests.worlds:Maze", "action": ["up"]}, "config.action: unknown setting; did you mean 'actions'"),
        ({"envs": "tests.worlds:Maze"}, "config.envs: unknown setting; did you mean 'env'"),
        ({"env": "tests.worlds.Maze"}, "'tests.worlds.Maze' is no id of Gymnasium; write a factory as 'tests.worlds:M"),
    ],
)
def test_settings(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepEnv(config)


def test_gymnasium_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'verl-multiturn\[gymnasium\]'"):
        StepEnv({"env": "FrozenLake-v1"})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seed": "7"}, "expected a whole number as 'seed', got '7'"),
        ({"env_kwargs": [1]}, r"expected a mapping as 'env_kwargs', got \[1\]"),
        ({"env_kwargs": {"a": object()}}, "'env_kwargs' must be plain values"),
    ],
)
async def test_a_row_that_cannot_be_played(kwargs: dict[str, Any], message: str) -> None:
    async with world("Maze") as env:
        with pytest.raises(ConfigError, match=message):
            await env.start("a", **kwargs)


async def _until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "in_reset", "in_step"),
    [
        (ConnectionRefusedError("the world's server"), True, False),  # an action may have ended it
        (OutageError("the world's server"), True, True),
        (ValueError("no such map"), False, False),
    ],
)
def test_an_error_of_a_connection_is_an_outage_in_reset_alone(error: Exception, in_reset: bool, in_step: bool) -> None:
    class World:
        def __init__(self, fails: bool) -> None:
            self._fails = fails

        def reset(self, seed: int | None) -> tuple[str, dict[str, Any]]:
            if self._fails:
                raise error
            return "here", {}

        def step(self, action: object) -> None:
            raise error

    ours, theirs = socket.socketpair()
    code = EnvironmentCode(World, None, lambda env, text: text, None, None)
    serving = threading.Thread(target=serve, args=(theirs, code))
    serving.start()
    with ours, ours.makefile("rw") as stream:

        def ask(**request: object) -> Any:
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            return json.loads(stream.readline())

        assert "process" in json.loads(stream.readline())
        assert ask(do="reset", seed=None, kwargs={"fails": True})["is_outage"] is in_reset
        assert "text" in ask(do="reset", seed=None, kwargs={"fails": False})
        assert ask(do="step", text="go")["is_outage"] is in_step
        ours.shutdown(socket.SHUT_RDWR)
    serving.join()
    theirs.close()
