"""`check-tool`: a tool that is broken in one way is caught by the check for it; sound tools pass."""

import asyncio
import json
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import ROOT, EchoTool
from tests.idle_loop import take
from tests.unit.tools import broken_tools
from tests.unit.tools.broken_tools import (
    Blocks,
    BlocksForEver,
    Chatty,
    CreateHangs,
    Demanding,
    EatsItsArguments,
    Exits,
    FewSeats,
    KeepsLock,
    KeepsTheRow,
    LeavesDescriptor,
    LeavesFolder,
    LeavesProcess,
    LeavesTask,
    LeavesThread,
    LeavesZombie,
    NoFiniteStep,
    NoId,
    NoNumber,
    NoResult,
    OneAfterTheOther,
    OneForAll,
    Raises,
    RaisesWhatCannotBeTold,
    ReleaseRaises,
    Remembers,
    ReturnsWhatCannotBeTold,
    SameId,
    SharedCounter,
    Sound,
    Spoiled,
    Stubborn,
    Unsure,
    on_any_machine,
)
from verl_multiturn import ConfigError, ToolResponse, load_tools
from verl_multiturn.checking import examination, instruments, trial_calls
from verl_multiturn.checking.tool_contract import CheckResult, Grade, check_tool, tools_to_check
from verl_multiturn.cli.main import app
from verl_multiturn.tools.loading.call_limits import attach_limits
from verl_multiturn.tools.loading.functions import FromRow

pytestmark = pytest.mark.slow

CALCULATOR = ROOT / "tool_configs" / "calculator.yaml"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    on_any_machine(monkeypatch)
    blocked = instruments.ExaminationWatch.blocked

    def sees(self: instruments.ExaminationWatch, *given: Any) -> None:
        blocked(self, *given)
        broken_tools.seen.set()

    monkeypatch.setattr(instruments.ExaminationWatch, "blocked", sees)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop block no longer than a user's may."""
    on_any_machine(monkeypatch, late_s=0.1)


def check(tool: Any, timeout_s: float | None = 1.0, **kwargs: Any) -> dict[str, CheckResult]:
    findings = check_tool(tool, timeout_s=timeout_s, **kwargs)
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def problems(findings: dict[str, CheckResult]) -> list[str]:
    return [name for name, finding in findings.items() if finding.verdict is Grade.PROBLEM]


def test_a_sound_tool_passes() -> None:
    findings = check(Sound(), timeout_s=10.0)
    assert {finding.verdict for finding in findings.values()} == {Grade.OK}, findings


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("tool", [Blocks, KeepsLock])
def test_a_tool_that_blocks_the_loop_is_told_where(tool: type[Sound]) -> None:
    for _ in range(20):  # of a lock that was given back, the place is known only if the watch had its turn in time
        finding = check(tool(), timeout_s=60.0)["event loop"]
        assert finding.verdict is Grade.PROBLEM
        assert finding.remedy
        assert "in select" not in finding.found
        if "in execute" in finding.found:
            return
    raise AssertionError(finding.found)


@pytest.mark.parametrize(
    ("kind", "name", "found"),
    [
        (NoResult, "execute", "execute must return"),
        (NoResult, "execute", " (broken_tools.py:"),
        (NoId, "create", "returned 42 (broken_tools.py:"),
        (NoNumber, "calc_reward", "must be a finite number from -1e+12 to 1e+12, got nan"),
        (NoFiniteStep, "execute", "the step reward must be a finite number from -1e+12 to 1e+12, got inf"),
        (RaisesWhatCannotBeTold, "execute", "raised Unspeakable: its message cannot be read: AttributeError"),
        (ReturnsWhatCannotBeTold, "execute", "got <Unspeakable whose repr raises AttributeError>"),
        (Raises, "execute", "raised AttributeError: no such thing"),
        (Exits, "execute", "called exit(3)"),
        (CreateHangs, "create", "hangs: no answer within 1 s (broken_tools.py:"),
        (ReleaseRaises, "release", "raised RuntimeError: boom"),
        (OneForAll, "isolation", "a conversation reads what another one wrote"),
        (SameId, "isolation", "the id 'me'"),
        (FewSeats, "concurrency", "create failed in 56 of 64 conversations at once: hangs"),
        (LeavesTask, "cancel execute", "tasks (left behind"),
        (LeavesProcess, "cancel execute", "sleep"),
        (LeavesFolder, "cancel create", "temporary file"),
        (LeavesDescriptor, "cancel release", "file descriptor"),
        (LeavesThread, "leftovers", "thread (left behind)"),
        (LeavesZombie, "leftovers", "1 process"),
        (Remembers, "leftovers", "in self.notes"),
        (Stubborn, "cancel execute", "goes on after it was cancelled"),
        (Spoiled, "cancel execute", "release raised KeyError"),
        (Demanding, "bad arguments", "nothing: raised KeyError: 'text'"),
    ],
)
def test_a_broken_tool_is_caught_by_the_check_that_is_meant_for_it(kind: type[Sound], name: str, found: str) -> None:
    findings = check(kind())
    assert findings[name].verdict is Grade.PROBLEM, findings
    assert found in findings[name].found
    assert findings[name].remedy
    while broken_tools.processes:
        process = broken_tools.processes.pop()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("kind", "name", "found"),
    [
        (SharedCounter, "isolation", "self.calls shows in it"),
        (OneAfterTheOther, "concurrency", "64 conversations took"),
        (Spoiled, "release after a failed create", "raised KeyError"),
        (Chatty, "answer size", "50000 characters"),
        (EatsItsArguments, "given data", "what execute was given has changed"),
        (Unsure, "descriptions", "none of the tool, text"),
        (Unsure, "name", "'no.tes'"),
    ],
)
def test_what_may_be_wrong_is_a_warning(kind: type[Sound], name: str, found: str) -> None:
    finding = check(kind(), timeout_s=60.0)[name]
    assert finding.verdict is Grade.WARNING
    assert found in finding.found


def test_a_row_that_a_tool_writes_into_is_found() -> None:
    finding = check(KeepsTheRow(), timeout_s=5.0, create_kwargs={"notes": []})["given data"]
    assert (finding.verdict, finding.found[:22]) == (Grade.WARNING, "what create was given ")


def test_what_the_schema_requires_and_does_not_describe() -> None:
    findings = check(Unsure())
    assert problems(findings) == ["schema", "example"]
    assert findings["isolation"].verdict is Grade.SKIPPED


@pytest.mark.usefixtures("strict")
def test_a_loop_that_is_blocked_for_ever_is_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "AT_ONCE", 8)
    finding = check(BlocksForEver(), timeout_s=0.2)["event loop"]
    broken_tools.never.set()
    broken_tools.never.clear()
    assert finding.verdict is Grade.PROBLEM
    assert "broken_tools.py" in finding.found
    assert "in execute" in finding.found


# All that can be checked: tools, functions, MCP servers, YAML files.


def test_the_calculator_passes_with_guessed_and_with_given_arguments() -> None:
    tool = load_tools(CALCULATOR)["calculator"]
    assert problems(check(tool)) == []
    findings = check(tool, arguments={"expression": "1 + 2"})
    assert {finding.verdict for finding in findings.values()} == {Grade.OK}
    assert check(tool, arguments={"expression": "1 +"})["execute"].verdict is Grade.PROBLEM
    assert "is not of type" in check(tool, arguments={"expression": 3})["example"].found


def double(number: int, *, unit: Annotated[str, FromRow] = "") -> str:  # noqa: D417  # the docstring is data
    """Twice a number.

    Args:
        number: The number.
    """
    return f"{2 * number} {unit}"


async def test_functions_and_row_kwargs_also_while_a_loop_runs() -> None:
    assert problems(check(double, execute_kwargs={"unit": "m"})) == []
    with pytest.raises(ConfigError, match="execute_kwargs"):
        check(double, execute_kwargs={"unti": "m"})
    with pytest.raises(ConfigError, match="expected a function"):
        check_tool(42)


def test_synchronous_methods_are_called_in_threads() -> None:
    class Slow(Sound):
        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            take(0.11)
            return ToolResponse("ok")

    findings = check(Slow(), timeout_s=5.0)
    assert problems(findings) == []
    took = re.search(r"execute (\d+) ms", findings["event loop"].found)
    assert took is not None
    assert int(took[1]) >= 110


def test_a_pool_that_is_kept_is_no_leak() -> None:
    class Pool(Sound):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            if not hasattr(self, "connection"):
                self.connection = os.open(os.devnull, os.O_RDONLY)
                self.keeper = asyncio.create_task(asyncio.Event().wait())
            return ToolResponse("ok")

    tool = Pool()
    assert problems(check(tool)) == []
    os.close(tool.connection)


def test_an_mcp_server_passes() -> None:
    tools = load_tools(ROOT / "tool_configs" / "mcp.yaml")
    findings = check(tools["text_count_words"], timeout_s=60.0)  # the server's start included
    assert problems(findings) == [], findings


def test_the_process_is_as_before() -> None:
    before, threads = (os.environ.get("TMPDIR"), tempfile.gettempdir()), set(threading.enumerate())
    check(Sound())
    assert (os.environ.get("TMPDIR"), tempfile.gettempdir()) == before
    for thread in set(threading.enumerate()) - threads:
        thread.join(60.0)  # a call's thread may have given its result and not have ended yet
        assert not thread.is_alive(), thread.name


def test_what_a_command_line_may_name(tmp_path: Path) -> None:
    function = f"{__name__}.double"
    assert [tool.name for tool in tools_to_check(str(CALCULATOR), None, None)] == ["calculator"]
    assert [tool.name for tool in tools_to_check(function, None, None)] == ["double"]
    (made,) = tools_to_check(f"{broken_tools.__name__}.Sound", {"a": 1}, None)
    assert made.config == {"a": 1}
    calculator = "verl_multiturn.tools.calculator.CalculatorTool"
    assert [tool.name for tool in tools_to_check(calculator, None, CALCULATOR)] == ["calculator"]
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps({"tools": [{"function": function}]}))
    assert [tool.name for tool in tools_to_check(function, None, path)] == ["double"]
    for target, tool_config, message in [
        (calculator, None, "has no tool_schema.*check-tool TOOLS.yaml, or --tool-config"),
        (calculator, path, "no entry names"),
        ("nowhere.Tool", None, "cannot import 'nowhere'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tools_to_check(target, None, tool_config)


def test_command_line() -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["check-tool", str(CALCULATOR), "--arguments", '{"expression": "1 + 2"}'])
    assert good.exit_code == 0
    assert "isolation" in good.output
    bad = runner.invoke(app, ["check-tool", f"{broken_tools.__name__}.Raises"])
    assert bad.exit_code == 1
    assert "AttributeError" in bad.output
    for option in (["--arguments", "{"], ["--arguments", "[1]"], ["--config", "3"]):
        assert runner.invoke(app, ["check-tool", f"{broken_tools.__name__}.Sound", *option]).exit_code == 2


def test_the_tests_own_tool_is_told_from_a_hanging_one() -> None:
    assert problems(check(EchoTool({"execute": "hang"}))) == ["execute"]


@pytest.mark.parametrize(
    ("limit", "given", "called", "ended"),
    [(0.2, None, 10.0, 10.0), (40.0, None, 40.0, 10.0), (900.0, None, 60.0, 10.0), (60.0, 0.3, 0.3, 0.3)],
)
def test_a_call_has_as_long_as_its_entry_says(limit: float, given: float | None, called: float, ended: float) -> None:
    tool = Sound()
    attach_limits(tool, {"timeout_s": limit}, "tools[0].limits")
    probe = trial_calls.ToolProbe(tool, {}, given)
    assert (probe.timeout_s, probe.end_s) == (called, ended)


def test_the_end_of_a_conversation_has_no_longer_for_it() -> None:
    tool = ReleaseHangs()
    attach_limits(tool, {"timeout_s": 900}, "tools[0].limits")
    probe = trial_calls.ToolProbe(tool, {}, None)
    probe.end_s = 0.1
    assert str(asyncio.run(probe.call("release", "a")).error) == "no answer within 0.1 s"


class ReleaseHangs(Sound):
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await asyncio.sleep(3600)


def takes_rounds(rounds: int) -> str:
    """Wait some rounds.

    Args:
        rounds: How many.
    """
    time.sleep(min(rounds, 300) * 0.001)
    return "done"


def test_guessed_numbers_are_small() -> None:
    assert problems(check(takes_rounds)) == []
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "x": {"type": "number", "maximum": 0.5}}}
    assert trial_calls.example_arguments({**schema, "required": ["n", "x"]}) == {"n": 1, "x": 0.5}
    numbers = [
        value
        for case in trial_calls.bad_arguments(schema, {"n": 1}).values()
        for value in case.values()
        if isinstance(value, int)
    ]
    assert max(numbers) < 10


async def forgetful(text: str) -> str:
    """Answers.

    Args:
        text: What to say.
    """
    time.sleep(0.15)  # noqa: ASYNC251  # the fault that the check must find
    return text


def numberless(text: str) -> Any:
    return object()


def test_where_the_service_is_down_the_advice_is_to_start_it() -> None:
    finding = check(broken_tools.WithoutItsService())["execute"]
    assert ", an outage in a run" in finding.found
    assert finding.remedy == "do what the error names; start the service where it is down, and check again"


@pytest.mark.usefixtures("strict")
def test_advice_for_a_function_is_the_functions_way() -> None:
    said = [finding.remedy for tool in (forgetful, numberless) for finding in check(tool, timeout_s=5.0).values()]
    assert any("write `def`, not `async def`" in remedy for remedy in said)
    assert any("write a docstring with an `Args:` section" in remedy for remedy in said)
    assert any("or what JSON can express" in remedy for remedy in said)
    for word in ("method", "instance_id", "the schema", "tool_schema"):
        assert not any(word in remedy for remedy in said), word


def test_a_yaml_is_checked_to_its_end(tmp_path: Path) -> None:
    """A tool that needs a row's kwargs does not stop the check; `--tool` checks one tool alone."""
    function = {"function": f"{__name__}.double"}
    needy = yaml.safe_load((ROOT / "tool_configs" / "gsm8k.yaml").read_text())["tools"][0]
    needy["class_name"] = f"{__name__}.Needy"
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [needy, function]}))
    name = needy["tool_schema"]["function"]["name"]
    done = CliRunner().invoke(app, ["check-tool", str(path)])
    assert done.exit_code == 1
    assert "row kwargs" in done.output
    assert "tool double" in done.output
    assert "isolation" in done.output
    for more, code in (["--tool", "double"], 0), (["--tool", name, "--create-kwargs", '{"truth": "4"}'], 0):
        done = CliRunner().invoke(app, ["check-tool", str(path), *more])
        assert done.exit_code == code, done.output
        assert done.output.count("isolation") == 1
    done = CliRunner().invoke(app, ["check-tool", str(path), "--tool", "duoble"])
    assert "no tool 'duoble'; known are" in done.output


class Needy(Sound):
    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__()
        self.config, self.tool_schema, self.name = config, tool_schema, tool_schema.function.name

    async def create(self, instance_id: str, truth: str) -> None: ...  # type: ignore[override]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse("ok")

    async def release(self, instance_id: str) -> None: ...  # type: ignore[override]


def test_a_config_beside_a_yaml_counts(tmp_path: Path) -> None:
    entry = {"class_name": f"{__name__}.Needy", "config": {"a": 1}}
    schema = yaml.safe_load(CALCULATOR.read_text())["tools"][0]["tool_schema"]
    broken = {"class_name": "nowhere.at_all.Tool"}
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [broken, {**entry, "tool_schema": schema}]}))
    assert tools_to_check(entry["class_name"], None, path)[0].config == {"a": 1}
    assert tools_to_check(entry["class_name"], {"a": 2}, path)[0].config == {"a": 2}
    for target, config, tool_config in [
        (str(CALCULATOR), {"a": 1}, None),
        (f"{__name__}.double", {"a": 1}, None),
        (str(CALCULATOR), None, path),
    ]:
        with pytest.raises(ConfigError, match="leave"):
            tools_to_check(target, config, tool_config)
