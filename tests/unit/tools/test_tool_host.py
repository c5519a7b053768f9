"""`ToolHost`: sessions of a server's clients, without a protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import EchoTool, make_schema
from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.tool_servers.sessions import IDLE_S, MOST_SESSIONS, ToolHost, unmarked
from verl_multiturn.tools.running.results import CallStatus


class Slow(EchoTool):
    """A tool that waits where its text says so."""

    opens: asyncio.Event | None = None

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await super().create(instance_id, **kwargs)
        if self.opens is not None:
            await self.opens.wait()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.events.append(("execute", instance_id, parameters["text"]))
        if parameters["text"] == "wait":
            await asyncio.Event().wait()
        if parameters["text"] == "wrong":
            return 7
        return "ok", 0.5, {"calls": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 3.0


def of(tool: EchoTool, event: str) -> int:
    """Return how often something happened to a tool."""
    return sum(each[0] == event for each in tool.events)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not holds():  # noqa: ASYNC110  # the event loop has no event for it
        await asyncio.sleep(0)


async def test_a_session_begins_with_its_first_call_and_ends_once() -> None:
    tool = Slow()
    host = ToolHost({"echo": tool}, {"echo": {"create_kwargs": {"a": 1}}})
    assert await host.end("none") is None
    assert tool.events == []
    answers = await asyncio.gather(*(host.call(key, "echo", {"text": "x"}) for key in "aab"))
    assert [(each.text, each.reward, each.metrics) for each in answers] == [("ok", 0.0, {})] * 3
    assert (host.number, of(tool, "create"), of(tool, "release")) == (2, 2, 0)
    await asyncio.gather(host.end("a"), host.end("a"))
    assert (host.number, of(tool, "release"), host.has_ended("a"), host.has_ended("b")) == (1, 1, True, False)
    late = await host.call("a", "echo", '{"text": "x"}')
    assert late.status is CallStatus.OVER_LIMIT
    assert unmarked(late) == "not executed, the session has ended: its client has ended it; begin another session"
    await host.aclose()
    assert of(tool, "release") == 2
    assert unmarked(await host.call("c", "echo", {"text": "x"})).endswith("the server ends; begin another session")


async def test_a_sessions_end_ends_its_calls_before_it_is_released() -> None:
    tool = Slow()
    host = ToolHost({"echo": tool})
    waits = asyncio.ensure_future(host.call("a", "echo", {"text": "wait"}))
    await until(lambda: of(tool, "execute") == 1)
    await host.end("a", "it was enough")
    answer = await waits
    assert unmarked(answer) == "not executed to its end, the session has ended: it was enough"
    assert [each[0] for each in tool.events] == ["create", "execute", "release"]


async def test_a_session_that_ends_while_it_opens_is_released() -> None:
    tool = Slow()
    tool.opens = asyncio.Event()
    host = ToolHost({"echo": tool}, report=lambda key, rewards: None)
    waits = asyncio.ensure_future(host.call("a", "echo", {"text": "x"}))
    await until(lambda: of(tool, "create") == 1)
    assert await host.end("a") is None
    assert "has ended" in (await waits).text
    assert [each[0] for each in tool.events] == ["create", "release"]


async def test_a_call_that_is_cancelled_takes_no_other_with_it() -> None:
    tool = Slow()
    tool.opens = asyncio.Event()
    host = ToolHost({"echo": tool})
    first, second = (asyncio.ensure_future(host.call("a", "echo", {"text": "x"})) for _ in range(2))
    await until(lambda: of(tool, "create") == 1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    tool.opens.set()
    assert (await second).text == "ok"
    await host.aclose()
    assert [each[0] for each in tool.events] == ["create", "execute", "release"]


async def test_a_session_in_use_is_not_idle_and_one_that_is_not_ends() -> None:
    tool = Slow()
    host = ToolHost({"echo": tool}, idle_s=0.05)
    with host.use("a"):
        await host.call("a", "echo", {"text": "x"})
        await asyncio.sleep(0.2)
        assert (await host.call("a", "echo", {"text": "x"})).text == "ok"
    await until(lambda: not host.number)
    await host.aclose()
    assert [each[0] for each in tool.events] == ["create", "execute", "execute", "release"]


async def test_rewards_are_for_those_who_take_them() -> None:
    taken: list[Any] = []
    host = ToolHost({"echo": Slow()}, report=lambda key, rewards: taken.append((key, rewards)), most=2)
    answer = await host.call("a", "echo", {"text": "x"})
    assert (answer.reward, answer.metrics) == (0.5, {"calls": 1})
    assert await host.end("a") == {"echo": 3.0}
    await host.call("b", "echo", {"text": "x"})
    await host.aclose()
    assert taken == [("a", {"echo": 3.0}), ("b", {"echo": 3.0})]


async def test_a_mistake_of_a_tools_author_is_an_answer_and_the_session_goes_on() -> None:
    host = ToolHost({"echo": Slow()}, most=1)
    wrong = await host.call("a", "echo", {"text": "wrong"})
    assert (wrong.status, "execute must return" in wrong.text) == (CallStatus.ERROR, True)
    assert unmarked(await host.call("a", "echo", {"text": "\ud800"})).startswith("the arguments hold half a character")
    assert (await host.call("a", "echo", {"text": "x"})).text == "ok"
    full = await host.call("b", "echo", {"text": "x"})
    assert (full.status, unmarked(full)) == (
        CallStatus.OVERLOADED,
        "not executed, all 1 sessions are in use; end one, or call it later",
    )
    await host.aclose()


async def test_after_a_tool_that_ends_a_conversation_nothing_is_called() -> None:
    tool = Slow()
    tool.ends_conversation = True  # type: ignore[misc]
    host = ToolHost({"echo": tool})
    await host.call("a", "echo", {"text": "x"})
    answer = await host.call("a", "echo", {"text": "x"})
    assert unmarked(answer) == "not executed, 'echo' was called and ends a session; begin another one"
    await host.aclose()
    assert of(tool, "execute") == 1


@pytest.mark.parametrize("kwargs", [{"no": {}}, {"echo": {"shown": False}}, {"echo": {"create": {}}}, {"echo": 3}])
def test_kwargs_that_do_not_fit_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--kwargs: "):
        ToolHost({"echo": Slow()}, kwargs)


class Opens(EchoTool):
    """A tool whose `create` does what a list has, first to last: raises an error, or returns a value."""

    def __init__(self, *created: Any, name: str = "echo") -> None:
        super().__init__(None, make_schema(name, text="string"))
        self.created = list(created)

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        await super().create(instance_id, **kwargs)
        made = self.created.pop(0) if self.created else None
        if isinstance(made, Exception):
            raise made
        return made


@pytest.mark.parametrize(
    ("fault", "said"),
    [(OSError("no room"), "the tool is not available (OSError: no room)"), (7, "create must return None or an instan")],
)
async def test_a_create_that_failed_is_tried_again_by_the_next_call(fault: Any, said: str) -> None:
    tool = Opens(fault)
    host = ToolHost({"echo": tool})
    first = await host.call("a", "echo", {"text": "x"})
    assert (first.status, said in first.text) == (CallStatus.ERROR, True)
    assert [(await host.call("a", "echo", {"text": "x"})).text for _ in range(2)] == ["x", "x"]
    await host.aclose()
    assert [each[0] for each in tool.events if each[0] != "execute"] == ["create", "release", "create", "release"]


async def test_one_tools_failed_create_does_not_touch_another_tool() -> None:
    broken, other = Opens(OSError("no room"), 7, OSError("none yet"), name="broken"), Slow()
    host = ToolHost({"broken": broken, "echo": other})
    answers = [unmarked(await host.call("a", name, {"text": "x"})) for name in ("echo", "broken", "echo", "broken")]
    assert answers[0::2] == ["ok", "ok"]
    assert "create must return None or an instance id, got 7" in answers[1]
    assert answers[3] == "the tool is not available (OSError: none yet)"
    assert unmarked(await host.call("a", "broken", {"text": "x"})) == "x"
    await host.aclose()
    assert (of(broken, "create"), of(broken, "release")) == (4, 4)
    assert (of(other, "create"), of(other, "release")) == (1, 1)


async def test_an_ended_session_is_not_opened_again_however_many_ended_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.tool_servers.sessions._KEPT_ENDS", 3)
    host = ToolHost({"echo": Slow()})
    for key in ("a", *"bcdef"):
        await host.end(key)
    assert host.has_ended("a")
    answer = await host.call("a", "echo", {"text": "x"})
    assert unmarked(answer) == "not executed, the session has ended: it was long ago; begin another session"
    assert (await host.call("g", "echo", {"text": "x"})).text == "ok"
    await host.aclose()


@pytest.mark.parametrize("command", ["mcp", "a2a"])
def test_the_commands_name_the_numbers_that_hold(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert (f"({MOST_SESSIONS})" in said, f"({IDLE_S:g})" in said) == (True, True)


class Waits(EchoTool):
    """A tool whose `create` ends as each of the given ones does: a fault, or what it waits for."""

    def __init__(self, *creates: Any, name: str = "waits") -> None:
        super().__init__({}, make_schema(name, text="string"))
        self.creates = list(creates)

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        self.events.append(("create", instance_id))
        how = self.creates.pop(0) if self.creates else None
        if isinstance(how, Exception):
            raise how
        return await how() if how is not None else None

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 3.0


async def test_a_tool_that_is_created_again_keeps_no_other_and_is_asked_for_no_reward() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    again, other, reported = Waits(OSError("down"), never, name="again"), EchoTool(), list[Any]()
    host = ToolHost({"again": again, "echo": other}, report=lambda key, rewards: reported.append(rewards))
    assert (await host.call("a", "echo", {"text": "x"})).status is CallStatus.OK
    hanging = asyncio.ensure_future(host.call("a", "again", {"text": "x"}))
    await until(lambda: of(again, "create") == 2)
    assert (await host.call("a", "echo", {"text": "y"})).status is CallStatus.OK
    await host.end("a", "the test ends it")
    await asyncio.wait({hanging})
    assert [set(each) for each in reported] == [{"echo"}]
    assert of(again, "release") == 2


async def test_a_failed_opening_whose_caller_is_gone_is_not_the_next_callers() -> None:
    gate = asyncio.Event()

    async def wrong() -> int:
        await gate.wait()
        return 5  # no create may return it

    tool, broken = Waits(wrong, name="waits"), Waits(OSError("down"), name="broken")
    host = ToolHost({"broken": broken, "waits": tool})
    gone = asyncio.ensure_future(host.call("a", "waits", {"text": "x"}))
    await until(lambda: of(tool, "create") == 1)
    gone.cancel()
    await asyncio.wait({gone})
    gate.set()
    await until(lambda: len(asyncio.all_tasks()) == 1)  # the opening has failed
    for name in ("broken", "waits", "waits"):
        assert (await host.call("a", name, {"text": "x"})).status is CallStatus.OK, name
    await host.aclose()
    assert (of(tool, "create"), of(tool, "release")) == (2, 2)
