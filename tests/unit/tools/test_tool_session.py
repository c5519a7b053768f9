"""`ToolSession`: the lifecycle, foreign tools, and faults of tools."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from tests.conftest import EchoTool, make_schema
from tests.sessions import HI, session
from verl_multiturn import BaseTool, ConfigError, ToolContractError, ToolResponse
from verl_multiturn.calls import calls as guarded
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.loading.call_limits import attach_limits
from verl_multiturn.tools.loading.kwargs import read_tools_kwargs
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession


async def test_kwargs_reach_each_method() -> None:
    tool = EchoTool()
    kwargs = {f"{method}_kwargs": {"for": method} for method in ("create", "execute", "calc_reward", "release")}
    async with session(tool, echo=kwargs) as opened:
        await opened.execute([HI])
        await opened.calc_rewards()
    assert tool.events == [
        ("create", "r1", {"for": "create"}),
        ("execute", "r1", {"text": "hi"}, {"for": "execute"}),
        ("calc_reward", "r1", {"for": "calc_reward"}),
        ("release", "r1", {"for": "release"}),
    ]


class Greedy(EchoTool):
    """A tool that keeps its row's values, and changes it with every call."""

    repeatable = True
    pure = True

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.config[instance_id] = kwargs["given"]["notes"]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.events.append((parameters.get("text"), len(kwargs["given"]["notes"])))
        kwargs["given"]["notes"].append("a call")
        self.config[instance_id].append(parameters.pop("text"))
        if self.config.pop("fails", False):
            raise ConnectionError("once")
        return "ok"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(len(self.config[instance_id]))


async def test_what_a_tool_does_to_a_rows_kwargs_stays_in_its_conversation() -> None:
    tool = Greedy()
    row = {"echo": {"create_kwargs": {"given": {"notes": []}}, "execute_kwargs": {"given": {"notes": []}}}}
    gates = Gates(Gate, 5.0)
    siblings = [ToolSession(f"r{number}", {"echo": tool}, row, gates, 8) for number in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        for sibling in siblings:
            await stack.enter_async_context(sibling)
        await asyncio.gather(*(sibling.execute([HI]) for sibling in siblings))
        assert [await sibling.calc_rewards() for sibling in siblings] == [{"echo": 1.0}] * 4
    assert row["echo"]["create_kwargs"] == {"given": {"notes": []}}
    assert tool.events[:4] == [("hi", 0)] * 4


async def test_a_repeated_call_gets_what_the_first_attempt_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.tools.running.session.BACKOFF_S", 0.001)
    tool = Greedy()
    tool.config["fails"] = True
    attach_limits(tool, {"retries": 1}, "limits")
    row = {name: {"given": {"notes": []}} for name in ("create_kwargs", "execute_kwargs")}
    async with session(tool, timeout_s=5.0, echo=row) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.attempts) == (CallStatus.OK, 2)
    assert tool.events[:2] == [("hi", 0)] * 2


async def test_the_cache_knows_a_row_by_what_it_gave_not_by_what_the_tool_left_of_it() -> None:
    class Table(EchoTool):
        pure = True

        async def create(self, instance_id: str, **kwargs: Any) -> None:
            self.config[instance_id] = kwargs["table"].pop("hi")

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return ToolResponse(self.config[instance_id]), 0.0, {"nested": {"list": []}}

    tool, gates = Table(), Gates(Gate, 5.0)
    attach_limits(tool, {"cache": 9}, "limits")
    answers = []
    for meaning in ("one", "two", "two"):
        row = {"echo": {"create_kwargs": {"table": {"hi": meaning}}}}
        async with ToolSession("r1", {"echo": tool}, row, gates, 8) as opened:
            (result,) = await opened.execute([HI])
        answers.append((result.text, result.cached, result.metrics))
        result.metrics["nested"]["list"].append("changed by whoever reads it")
    assert [answer[:2] for answer in answers] == [("one", False), ("two", False), ("two", True)]
    assert answers[1][2] is not answers[2][2]


async def test_kwargs_that_cannot_be_copied_are_a_mistake_of_the_author() -> None:
    tool = EchoTool()
    with pytest.raises(ConfigError, match=r"tool 'echo': create_kwargs cannot be copied .* hand over plain data"):
        async with session(tool, echo={"create_kwargs": {"lock": threading.Lock()}}):
            pass
    assert tool.events == []


async def test_a_create_that_fails_or_hangs_is_released_and_its_calls_are_answered() -> None:
    for fault in (RuntimeError("boom"), "hang"):
        tool = EchoTool({"create": fault})
        async with session(tool) as opened:
            (result,) = await opened.execute([HI])
            assert await opened.calc_rewards() == {}
        assert result.status is CallStatus.ERROR
        assert "not available" in result.text
        assert tool.counts == {"create": 1, "release": 1}


async def test_execute_that_hangs_or_raises_is_answered() -> None:
    async with session(EchoTool({"execute": "hang"})) as opened:
        assert (await opened.execute([HI]))[0].status is CallStatus.TIMEOUT
    async with session(EchoTool({"execute": ValueError("no such page")})) as opened:
        assert (await opened.execute([HI]))[0].text == "Error: no such page"


async def test_a_synchronous_tool_does_not_hold_up_the_loop() -> None:
    begun, ticked = threading.Event(), threading.Event()

    class Slow(EchoTool):
        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            begun.set()
            return str(ticked.wait(550))

    async def tick() -> None:
        while not begun.is_set():  # noqa: ASYNC110  # a thread sets it
            await asyncio.sleep(0.01)
        ticked.set()

    async with session(Slow(), timeout_s=300) as opened:
        (result,), _ = await asyncio.gather(opened.execute([HI]), tick())
    assert result.text == "True"


class OldTool:
    """A tool as written for verl 0.4: `create` returns the id, `execute` a tuple with plain text."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.tool_schema, self.name, self.seen = tool_schema, tool_schema.function.name, []  # type: ignore[var-annotated]

    async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> str:
        self.seen.append(("create", ground_truth))
        return f"own-{instance_id}"

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float, dict[str, Any]]:
        self.seen.append(("execute", instance_id))
        return "old", -0.05, {"n": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 1.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.seen.append(("release", instance_id))


class NewTool(OldTool):
    """A tool as written for verl 0.9: `create` gets `create_kwargs` in one piece, and returns `(id, response)`."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.seen.append(("create", kwargs["create_kwargs"]["ground_truth"]))
        return f"own-{instance_id}", ToolResponse()


@pytest.mark.parametrize("kind", [OldTool, NewTool])
async def test_tools_written_for_verl(kind: type[OldTool]) -> None:
    tool = kind({}, make_schema("echo", text="string"))
    async with session(tool, echo={"create_kwargs": {"ground_truth": "42"}}) as opened:
        (result,) = await opened.execute([HI])
        assert await opened.calc_rewards() == {"echo": 1.0}
    assert (result.text, result.reward, result.metrics) == ("old", -0.05, {"n": 1})
    assert tool.seen == [("create", "42"), ("execute", "own-r1"), ("release", "own-r1")]


async def test_wrong_return_of_create_is_the_authors_mistake_and_releases() -> None:
    class Wrong(EchoTool):
        async def create(self, instance_id: str, **kwargs: Any) -> Any:
            return 42

    tool = Wrong()
    with pytest.raises(ToolContractError, match="create must return"):
        async with session(tool):
            pass
    assert tool.counts["release"] == 1


def test_tools_kwargs_of_parquet_rows() -> None:
    raw = {"a": {"create_kwargs": {"x": 1, "y": None}, "execute_kwargs": None}, "b": None}
    assert read_tools_kwargs(raw, "row 1") == {"a": {"create_kwargs": {"x": 1}}}
    assert read_tools_kwargs(None, "row 1") == {}
    with pytest.raises(ConfigError, match=r"row 1.*unknown key 'creat_kwargs'"):
        read_tools_kwargs({"a": {"creat_kwargs": {}}}, "row 1")


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
@pytest.mark.parametrize("fault", [SystemExit(3), asyncio.CancelledError(), TimeoutError("db locked")])
async def test_what_a_tool_raises_stays_with_the_tool(method: str, fault: BaseException) -> None:
    tool = EchoTool({method: fault})
    async with session(tool) as opened:
        (result,) = await opened.execute([HI])
        await opened.calc_rewards()
    assert tool.counts["release"] == 1
    assert result.status is (CallStatus.ERROR if method in ("create", "execute") else CallStatus.OK)
    if method == "execute" and isinstance(fault, TimeoutError):
        assert "db locked" in result.text


async def test_synchronous_tools_that_hang_do_not_starve_the_others() -> None:
    ended = threading.Event()
    order: list[str] = []

    class Hanging(EchoTool):
        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            ended.wait()
            order.append("execute")

        def release(self, instance_id: str, **kwargs: Any) -> Any:  # type: ignore[override]
            order.append("release")

    async def one() -> None:
        async with session(Hanging()) as opened:
            (result,) = await opened.execute([HI])
            statuses.append(result.status)
            if len(statuses) == 40:
                ended.set()

    statuses: list[CallStatus] = []
    await asyncio.gather(*(one() for _ in range(40)))
    assert statuses == [CallStatus.TIMEOUT] * 40
    assert order.count("release") == 40
    # A call that was given up ends before its tool is released.
    assert order.index("release") > 0
    assert order.count("execute") == 40


async def test_a_call_that_cannot_run_takes_no_place() -> None:
    bad = ToolCall("echo", '{"text": 1}', "c0")
    opened = ToolSession("r1", {"echo": EchoTool()}, {}, Gates(Gate, 5), max_parallel_calls=1, max_calls=1)
    async with opened:
        results = await opened.execute([bad, HI, HI])
        assert [str(result.status) for result in results] == ["bad_arguments", "ok", "over_limit"]
        assert opened.calls_used_up


async def test_kwargs_that_do_not_fit_are_the_rows_mistake() -> None:
    class Strict(EchoTool):
        async def create(self, instance_id: str, ground_truth: str) -> None:  # type: ignore[override]
            ...

    with pytest.raises(ConfigError, match=r"create.* cannot be called with create_kwargs \{'truth': 1\}"):
        async with session(Strict(), echo={"create_kwargs": {"truth": 1}}):
            pass
    with pytest.raises(ConfigError, match="must be a mapping"):
        read_tools_kwargs({"a": {"create_kwargs": [1]}}, "row 1")


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
async def test_kwargs_of_every_method_are_looked_at_before_anything_begins(method: str) -> None:
    class Strict:
        name, tool_schema = "strict", make_schema("strict")
        created = 0

        async def create(self, instance_id: str) -> None:
            Strict.created += 1

        async def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
            return ""

        async def calc_reward(self, instance_id: str) -> float:
            return 0.0

        async def release(self, instance_id: str) -> None: ...

    with pytest.raises(ConfigError, match=f"{method}_kwargs"):
        async with session(Strict(), strict={f"{method}_kwargs": {"x": 1}}):
            pass
    assert Strict.created == 0


def test_a_synchronous_tool_that_never_returns_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_ABANDONED_S", 0.05)
    never = threading.Event()

    class Stuck(EchoTool):
        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            never.wait()

    async def main() -> None:
        async with session(Stuck()) as opened:
            assert (await opened.execute([HI]))[0].status is CallStatus.TIMEOUT

    try:
        asyncio.run(main())
    finally:
        never.set()


def test_a_tool_without_execute_says_so() -> None:
    class Nothing(BaseTool):
        pass

    with pytest.raises(ConfigError, match="no tool_schema"):
        Nothing({})
