"""`verl-multiturn serve`: an agent on a scripted model, and the part that would be trained."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.unit.proxy.test_opponents import server
from verl_multiturn.cli import main as cli
from verl_multiturn.runs.data import tool_call

pytestmark = pytest.mark.slow

AGENT = """\
import json, os, sys, urllib.request

def ask(messages):
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    body = json.dumps({"model": "m", "temperature": 0.3, "messages": messages, "tools": tools}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]

messages = json.load(open(sys.argv[1]))["messages"]
said = ask(messages)
answers = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in said["tool_calls"]]
assert ask([*messages, said, *answers])["content"] == "It is 5."
assert ask([{"role": "user", "content": "another root"}])["content"] == "The script has no more turns."
"""


def test_a_command_is_run_and_its_rows_are_shown(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "turns.txt").write_text("It is 5.\n\n")
    call = tool_call("add", {"a": 2, "b": 3})
    options = ["--turn", call, "--script", str(tmp_path / "turns.txt"), "--prompt", "2 + 3?"]
    done = CliRunner().invoke(
        cli.app, ["serve", *options, "--", sys.executable, str(tmp_path / "agent.py"), "{row}"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    assert "2 roots, 2 rows, 3 trained, temperature changes nothing (3 requests)" in done.output
    assert "0 violations" in done.output
    (second,) = [line for line in done.output.splitlines() if "It is 5." in line]
    assert [cell.strip() for cell in second.split("│")[1:3]] == ["1", "0"]
    assert "in row 0" in second
    assert "1 requests came after the script's last turn" in done.output
    assert "the agent gave no reward: in a run, compute_score decides" in done.output


GAME = """\
def play(row, session):
    from openai import OpenAI
    with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for role in ("white", "black"):
            client.chat.completions.create(model=role, messages=row["messages"])
    return {"roles": {"white": 1, "black": -1}}
"""


def test_roles_are_shown_and_those_beside_train_are_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--agent", "served_game:play", "--turn", "e4", "--turn", "e5", "--role", "white", "--role", "black"]
    done = CliRunner().invoke(cli.app, ["serve", *options, "--train", "white"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "2 roots, 1 rows, 1 trained, 1 not_trained_role" in done.output
    assert "the session's rewards are of white 1, of black -1" in done.output
    (black,) = [line for line in done.output.splitlines() if "e5" in line]
    assert [cell.strip() for cell in black.split("│")[1:3]] == ["1", "black"]
    wrong = CliRunner().invoke(cli.app, ["serve", "--role", "white", "--train", "red"])
    assert (wrong.exit_code, "--train: 'red' is not a role; name some of --role=['white']" in wrong.output) == (2, True)


ONE_REWARD = GAME.replace('{"roles": {"white": 1, "black": -1}}', "0.5")


def test_one_number_is_shown_as_the_reward_of_each_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "even_game.py").write_text(ONE_REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--agent", "even_game:play", "--turn", "e4", "--turn", "e5", "--role", "white", "--role", "black"]
    for train, said in (([], "of white 0.5, of black 0.5"), (["--train", "black"], "of black 0.5")):
        done = CliRunner().invoke(cli.app, ["serve", *options, *train], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        assert f"the session's rewards are {said}\n" in done.output


@contextmanager
def serving(*answers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve chat completions in a thread: `serve` needs the main one, for its signals."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = server(*answers)
    try:
        yield asyncio.run_coroutine_threadsafe(made.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(made.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_opponent_at_an_address_plays_its_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "opposed_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["serve", "--agent", "opposed_game:play", "--turn", "e4", "--role", "white", "--role", "black"]
    with serving("c5") as (address, bodies):

        def served(*more: str) -> Any:
            return CliRunner().invoke(cli.app, [*options, *more], env={"COLUMNS": "200"})

        done = served("--opponent", f"black={address}#big")
        assert done.exit_code == 0, done.output
        assert "1 roots, 1 rows, 1 trained" in done.output
        assert f"black was played by {address}#big: 1 answers, in no row" in done.output
        assert "the session's rewards are of white 1, of black -1 (no row)" in done.output
        assert bodies[0]["model"] == "big"
        for given, problem in (
            ("black=4", "--opponent: black: the opponent 4 is served by a run alone; serve a model yourself"),
            ("black=models/old", "--opponent: black: the opponent models/old is served by a run alone"),
            ("black", "--opponent: expected ROLE=ADDRESS"),
            ("red=http://127.0.0.1:9/v1", "--opponent: 'red' is no role; name some of --role=['white', 'black']"),
            ("black=policy", "--opponent: black: 'policy' alone is the trained model"),
        ):
            refused = served("--opponent", given)
            assert (refused.exit_code, problem in " ".join(refused.output.split())) == (2, True), refused.output


def test_an_opponent_that_is_not_there_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lone_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["serve", "--agent", "lone_game:play", "--turn", "e4", "--role", "white", "--role", "black"]
    done = CliRunner().invoke(cli.app, [*options, "--opponent", "black=http://127.0.0.1:9/v1"], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "error outage: the opponent http://127.0.0.1:9/v1: " in done.output


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "agent_failed"),
        ("raise SystemExit(75)", "error outage"),
        ("import urllib.request; urllib.request.urlopen('http:x')", "URLError"),
    ],
)
def test_an_agent_that_fails_ends_with_1(program: str, said: str) -> None:
    done = CliRunner().invoke(cli.app, ["serve", "--", sys.executable, "-c", program], env={"COLUMNS": "200"})
    assert done.exit_code == 1, done.output
    assert said in done.output
    assert "0 roots, 0 rows, 0 trained" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--script", "nowhere.txt"], "'nowhere.txt' cannot be read"),
        (["--agent", "nowhere:run"], "nowhere"),
        (["--", "no-such-program"], "'no-such-program'"),
        (["--agent", "os:getcwd", "--", "true"], "--agent, COMMAND: one of them is the agent; leave one out"),
        (["--host", "0.0.0.0"], "--host='0.0.0.0' stands for all interfaces"),
        (["--host", "203.0.113.1"], "--host='203.0.113.1': cannot listen there"),
        (["--host", ""], "--host='' stands for all interfaces"),
        (["--agent", "os:getcwd"], "--agent: 'os:getcwd' takes no data row; write it as f(row, session)"),
        (
            ["--agent", "broken_agent:run"],
            "--agent: cannot import 'broken_agent' (ValueError: not today (broken",
        ),
        (["--agent", "threads:run"], "--agent: importing 'threads:run' starts threads (early), which a forked"),
        (["--select", "nowhere"], "--select='nowhere' is no function"),
        (["--turn", "x", "--agent", "asks:run", "--select", "asks:none"], "--select=asks:none returned None, expected"),
        (["--", "./not-executable"], "COMMAND: './not-executable' is no program that can be started"),
        (["--", "true", "{rows}"], "COMMAND: nothing takes the place of '{rows}'"),
        (["--agent", ""], "--agent: String should have at least 1 character"),
        (["--row", "row.json"], "--row 'row.json' is for an agent that is run here; give --agent or -- COMMAND, too"),
    ],
)
def test_what_cannot_be_served(options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "not-executable").touch()
    (tmp_path / "broken_agent.py").write_text("raise ValueError('not today')")
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='early', daemon=True).start()\n"
        "def run(row): return 0.0\n"
    )
    (tmp_path / "asks.py").write_text(SELECTS + "\n\ndef run(row, session):\n    ask(session, 'x')\n\n\n"
                                      "def none(completions):\n    return None\n")  # fmt: skip
    done = CliRunner().invoke(cli.app, ["serve", *options])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
    assert "actor_rollout_ref" not in done.output  # it is not a key that was written here
    assert "proxy." not in done.output


def test_a_network_proxy_before_an_agent_is_named_with_what_can_be_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(cli.app, ["serve", "--agent", "tests.endpoint_agents:idle", "--host", "127.0.0.2"])
    assert done.exit_code == 2, done.output
    assert "which cannot reach 127.0.0.2; add 127.0.0.2 to NO_PROXY, or run it as a command" in (
        " ".join(done.output.split())
    )


def test_an_agent_that_is_started_elsewhere_is_over_at_ctrl_c() -> None:
    serving = subprocess.Popen(
        [sys.executable, "-m", "verl_multiturn.cli", "serve", "--turn", "Hello!"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert serving.stdout is not None
    said = dict(serving.stdout.readline().removeprefix("export ").strip().split("=", 1) for _ in range(4))
    serving.stdout.readline()
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    asked = urllib.request.Request(
        said["ANTHROPIC_BASE_URL"] + "/v1/messages", orjson.dumps(body), {"x-api-key": said["ANTHROPIC_API_KEY"]}
    )
    with urllib.request.urlopen(asked) as got:
        assert orjson.loads(got.read())["content"] == [{"type": "text", "text": "Hello!"}]
    assert said["OPENAI_BASE_URL"] == said["ANTHROPIC_BASE_URL"] + "/v1"
    assert said["OPENAI_API_KEY"] == said["ANTHROPIC_API_KEY"]
    serving.send_signal(signal.SIGINT)
    rest, _ = serving.communicate(timeout=550)
    assert serving.returncode == 0, rest
    assert "1 roots, 1 rows, 1 trained" in rest
    assert "reward" not in rest


SELECTS = """\
import json, urllib.request

def ask(session, content, **more):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more}).encode()
    head = {"authorization": "Bearer " + session.api_key, "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(session.base_url + "/chat/completions", body, head)))

def run(row, session):
    assert row == {"messages": [{"role": "user", "content": "2 + 3?"}], "extra_info": {"index": 7}}
    first, second = ask(session, "2 + 3?"), ask(session, "Name this chat.")
    return {"reward": 0.5, "completions": {first["id"]: 0.25}}

def too_long(row, session):
    try:
        ask(session, "many words " * 50)
    except urllib.error.HTTPError as refused:
        assert "context_length_exceeded" in refused.read().decode()

def no_titles(completions):
    return [each.id for each in completions if each.messages[0]["content"] != "Name this chat." and not each.calls]

def wrong(completions, more):
    return []
"""


def test_a_function_with_its_row_select_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chooser.py").write_text(SELECTS)
    (tmp_path / "row.json").write_text(
        '{"prompt": [{"role": "user", "content": "2 + 3?"}], "extra_info": {"index": 7}}'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--agent", "chooser:run", "--row", str(tmp_path / "row.json"), "--select", "chooser:no_titles"]
    done = CliRunner().invoke(cli.app, ["serve", *options, "--turn", "5", "--turn", "Sums"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "2 roots, 1 rows, 1 trained, 1 not_selected" in done.output
    assert "the session's reward is 0.5\ncompletion 0 has a reward of its own, 0.25" in done.output
    done = CliRunner().invoke(cli.app, ["serve", "--agent", "chooser:too_long", "--prompt-length", "30"])
    assert done.exit_code == 1, done.output
    assert "prompt_too_long: no request of the agent got a completion" in done.output
    assert "the session's reward" not in done.output
    done = CliRunner().invoke(cli.app, ["serve", "--agent", "chooser:run", "--select", "chooser:wrong"])
    assert done.exit_code == 2, done.output
    assert "--select='chooser:wrong' cannot be called with one argument (missing a required argument: 'more')" in (
        " ".join(done.output.split())
    )
    (tmp_path / "row.json").write_text("[]")
    done = CliRunner().invoke(cli.app, ["serve", "--agent", "chooser:run", "--row", str(tmp_path / "row.json")])
    assert done.exit_code == 2, done.output
    assert "has a JSON list, expected an object" in done.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_ends_and_is_shown(number: signal.Signals, tmp_path: Path) -> None:
    program = f"{AGENT}\nopen(sys.argv[2], 'w').close()\nimport time\ntime.sleep(1000)"
    (tmp_path / "agent.py").write_text(program)
    turns = ["--turn", tool_call("add", {"a": 2, "b": 3}), "--turn", "It is 5."]
    command = [sys.executable, str(tmp_path / "agent.py"), "{row}", str(tmp_path / "asked")]
    serving = subprocess.Popen(
        [sys.executable, "-m", "verl_multiturn.cli", "serve", *turns, "--", *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )
    while not (tmp_path / "asked").exists():
        assert serving.poll() is None
        time.sleep(0.05)
    serving.send_signal(number)
    said, _ = serving.communicate(timeout=550)
    assert serving.returncode == 130, said
    assert "2 roots, 2 rows, 3 trained" in said
    assert "wall_clock: the session's time was up" in said
    assert "0 violations" in said
