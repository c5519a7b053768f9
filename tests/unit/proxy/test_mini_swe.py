"""mini-swe-agent behind the endpoint: a scripted model, the agent's own loop, and a shell that remembers."""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.agent_sessions import call_text, certified, make_run, texts, turns
from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import ConfigError, OutageError
from verl_multiturn.harnesses import mini_swe
from verl_multiturn.harnesses.mini_swe import MiniSettings, solve
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.rollout.life import stopped
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.workspaces.workspace import CommandResult

pytest.importorskip("minisweagent")

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ROW = {"raw_prompt": [{"role": "user", "content": "Mend it."}], "extra_info": {}}


class FakeShell:
    """A shell with prepared results; it records the commands and the agent's result."""

    def __init__(self, **results: CommandResult | Exception) -> None:
        self.results = results
        self.commands: list[str] = []
        self.status = ""

    def run(
        self, command: str, *, timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        self.commands.append(command)
        if command.startswith("echo "):
            return CommandResult(command.removeprefix("echo ") + "\n", 0)
        result = self.results[command]
        if isinstance(result, Exception):
            raise result
        return result


SHELL = FakeShell()
LIMIT = 0


def agent(row: dict[str, Any], session: Any) -> float:
    SHELL.status = solve(row["messages"][-1]["content"], SHELL.run, session, MiniSettings(step_limit=LIMIT))
    return 1.0


def bash(command: Any) -> str:
    return call_text("bash", {"command": command})


async def play(monkeypatch: pytest.MonkeyPatch, shell: FakeShell, *said: str, steps: int = 0, **limits: int) -> Outcome:
    monkeypatch.setitem(globals(), "SHELL", shell)
    monkeypatch.setitem(globals(), "LIMIT", steps)
    runner = build_runner(ProxySettings(agent=f"{__name__}:agent"))
    run = make_run(turns(*said), **{"prompt_length": 30_000, "response_length": 30_000, **limits})
    watch = Outages(stopped=stopped).of("agent", OutageLimits(), 60)
    endpoint = Endpoint(run, runner, ProxyServer(), 60.0, -1.0, watch=watch)
    try:
        outcome, generations = await endpoint.run("r", ROW, {})
    finally:
        await endpoint.aclose()
    receipts = Receipts.of_rows("r", generations, outcome.places, "u", 0, False, not outcome.valid)
    assert certified(outcome, receipts) == []
    return outcome


def observed(outcome: Outcome) -> list[str]:
    """Return the model's inputs between its turns, of the only row."""
    (row,) = texts(outcome)
    return [text for source, text in row if source == "OBSERVATION"]


async def test_commands_run_and_the_work_is_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = FakeShell(ls=CommandResult("a.py\n", 0), bad=CommandResult("no\n", 2))
    outcome = await play(monkeypatch, shell, bash("ls"), bash("bad"), bash(SUBMIT))
    assert shell.commands == ["ls", "bad", SUBMIT]
    assert (shell.status, outcome.stop_reason, outcome.valid) == ("Submitted", StopReason.FINISHED, True)
    first, second = observed(outcome)
    assert ('"returncode": 0' in first, "a.py" in first) == (True, True)
    assert '"returncode": 2' in second


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ("I think.", "No tool calls found in the response"),
        (call_text("python", {"code": "1"}), "Unknown tool 'python'"),
        (call_text("bash", {"cmd": "ls"}), "Missing 'command' argument"),
        ('<tool_call>\n{"name": "bash", "arg', "No tool calls found in the response"),
        (bash(["ls"]), "The command is list, expected a text"),
    ],
)
async def test_a_turn_that_cannot_be_read_stays_in_its_row(
    monkeypatch: pytest.MonkeyPatch, spoilt: str, told: str
) -> None:
    shell = FakeShell()
    outcome = await play(monkeypatch, shell, spoilt, bash(SUBMIT))
    assert len(outcome.rows) == 1
    assert shell.commands == [SUBMIT]
    assert told in json.dumps(observed(outcome)[0]).replace('\\"', '"')
    assert shell.status == "Submitted"


async def test_it_gives_up_after_three_unreadable_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = await play(monkeypatch, shell := FakeShell(), "a", "b", "c")
    assert (shell.status, len(outcome.rows), outcome.stop_reason) == ("RepeatedFormatError", 1, StopReason.FINISHED)


async def test_several_commands_of_one_turn_are_answered_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = FakeShell(a=CommandResult("1\n", 0), b=CommandResult("2\n", 0))
    outcome = await play(monkeypatch, shell, bash("a") + bash("b"), bash(SUBMIT))
    assert shell.commands == ["a", "b", SUBMIT]
    assert observed(outcome)[0].count("returncode") == 2


async def test_a_late_command_is_told_with_what_it_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = FakeShell(slow=CommandResult("so far\n", None, timed_out=True))
    outcome = await play(monkeypatch, shell, bash("slow"), bash(SUBMIT))
    assert "so far" in observed(outcome)[0]
    assert "did not end within 30 seconds" in observed(outcome)[0]


async def test_what_the_model_can_cause_ends_the_agent_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = FakeShell(kill=CommandResult("", None, stopped="the workspace ended: killed"))
    outcome = await play(monkeypatch, ended, bash("kill"))
    assert (ended.status, outcome.stop_reason) == ("WorkspaceEnded", StopReason.FINISHED)
    long = FakeShell(ls=CommandResult("x" * 5_000, 0))
    outcome = await play(monkeypatch, long, bash("ls"), response_length=2_000)
    assert (long.status, outcome.stop_reason, outcome.valid) == ("LimitsExceeded", StopReason.FINISHED, True)
    many = FakeShell(ls=CommandResult("", 0))
    outcome = await play(monkeypatch, many, bash("ls"), bash("ls"), steps=2)
    assert (many.status, many.commands) == ("LimitsExceeded", ["ls", "ls"])


async def test_a_lost_sandbox_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = await play(monkeypatch, FakeShell(ls=OutageError("the sandbox is lost")), bash("ls"))
    assert (outcome.stop_reason, outcome.valid) == (StopReason.OUTAGE, False)


def test_an_unknown_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no configuration 'none\.yaml'.*such as 'mini\.yaml'"):
        mini_swe._read_config("none.yaml")


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    mini_swe.package.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "minisweagent", None)
    with pytest.raises(
        ConfigError, match=re.escape(f"{sys.executable} -m pip install --no-deps mini-swe-agent==2.4.6")
    ):
        mini_swe.package()
