"""A session's handling of a tool's answers, rewards, metrics and errors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from fractions import Fraction
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import EchoTool, make_schema
from tests.long.tools.faulty_tools import FarUnspeakable, Unspeakable
from tests.sessions import HI, session
from verl_multiturn import ToolContractError
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.loading.call_limits import attach_limits
from verl_multiturn.tools.running.answers import as_error
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession


class Number(float):
    """A float of a class of its own, such as numpy's."""


class Tensor:
    """An object that holds one number without being one, such as torch's."""

    def item(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [("nan", float("nan")), ("inf", float("-inf")), ("integer", 10**400), ("fraction", Fraction(10**400))],
)
async def test_a_reward_that_is_no_finite_number_is_left_out_and_told_once(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Divides(EchoTool):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return value

    tool = Divides({"returns": ("x", value, {})}, make_schema(name, text="string"))
    for _ in range(2):
        async with session(tool) as opened:
            (result,) = await opened.execute([ToolCall(name, '{"text": "hi"}', "c1")])
            assert await opened.calc_rewards() == {}
        assert (result.status, result.text, result.reward) == (CallStatus.OK, "x", 0.0)
    assert [record.message.partition(":")[2][:32] for record in caplog.records] == [
        " the reward of execute is no fin",
        " the reward of calc_reward is no",
    ]
    assert f"tool {name!r}" in caplog.text


@pytest.mark.parametrize("value", [Tensor(), [0.5], "0.5", None], ids=lambda value: type(value).__name__)
async def test_a_reward_of_another_type_is_a_mistake_of_the_author(value: Any) -> None:
    class Returns(EchoTool):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return value

    with pytest.raises(ToolContractError, match="tool 'echo': the reward of calc_reward must be a number, got"):
        async with session(Returns()) as opened:
            await opened.calc_rewards()
    async with session(EchoTool({"returns": ("x", Number(0.5), {})})) as opened:
        assert (await opened.execute([HI]))[0].reward == 0.5


@pytest.mark.parametrize("error", [Unspeakable(), FarUnspeakable()], ids=["Exception", "BaseException"])
@pytest.mark.parametrize("in_thread", [False, True], ids=["async", "thread"])
async def test_an_error_that_cannot_be_told_is_an_error_like_others(error: BaseException, in_thread: bool) -> None:
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        raise error

    def synchronous(*args: Any, **kwargs: Any) -> Any:
        raise error

    methods = dict.fromkeys(("execute", "calc_reward", "release"), synchronous if in_thread else asynchronous)
    tool = type("Breaks", (EchoTool,), methods)()
    gates = Gates(Gate, 5.0)
    attach_limits(tool, {"concurrency": 1, "queue_timeout_s": 0.5}, "limits")
    for number in range(3):
        async with ToolSession(f"r{number}", {"echo": tool}, {}, gates, 8) as opened:
            (result,) = await opened.execute([HI])
            assert await opened.calc_rewards() == {}
        assert (result.status, result.attempts) == (CallStatus.ERROR, 1)
        assert "Unspeakable" in result.text
    create = type("BreaksAtOnce", (EchoTool,), {"create": methods["execute"]})()
    async with session(create, timeout_s=5.0) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, create.counts) == (CallStatus.ERROR, {"release": 1})


async def test_what_cannot_be_told_in_a_result() -> None:
    async with session(EchoTool({"returns": ("x", 1.0, {"odd": Unspeakable(), "deep": [Unspeakable()]})})) as opened:
        (result,) = await opened.execute([HI])
    told = "Unspeakable: its message cannot be read: AttributeError"
    assert result.metrics == {"odd": told, "deep": [told]}
    for returned in (Unspeakable(), ("x", Unspeakable(), {}), {"a": Unspeakable()}):
        with pytest.raises(ToolContractError, match="Unspeakable whose repr raises"):
            async with session(EchoTool({"returns": returned})) as opened:
                await opened.execute([HI])


async def test_a_message_has_no_address_in_it() -> None:
    async with session(EchoTool({"execute": OSError(f"cannot read {object()}")})) as opened:
        (result,) = await opened.execute([HI])
    assert result.text == "Error: OSError: cannot read <object object>"


async def test_metrics_have_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    returned = {"small": 1, "text": "x" * 1_000, "many": list(range(10_000_000)), "more": 1}
    schema = make_schema("verbose", text="string")
    async with session(EchoTool({"returns": ("ok", 0.5, returned)}, schema), timeout_s=5.0) as opened:
        (result,) = await opened.execute([ToolCall("verbose", '{"text": "hi"}', "c1")])
    assert (result.text, result.reward, result.metrics) == ("ok", 0.5, {"small": 1, "text": "x" * 1_000})
    assert "metrics of over 100,000 characters are left out, from 'many' on" in caplog.text
    kinds = {"n": np.float32(0.5), "i": np.int64(3), ("a", 1): {"x": (1, None)}, "s": {1}, "b": True, "l": 10**400}
    async with session(EchoTool({"returns": ("ok", 0.5, kinds)})) as opened:
        (result,) = await opened.execute([HI])
    assert result.metrics.pop("l").startswith("1000")
    assert result.metrics == {"n": 0.5, "i": 3, "('a', 1)": {"x": [1, None]}, "s": [1], "b": True}


async def test_metrics_have_the_form_of_json() -> None:
    given = {
        "d": Decimal("0.5"),
        "a": np.array([[1, 2]]),
        "t": date(2026, 1, 2),
        "x": b"\xff",
        "l": Lock(),
        "g": broken(),
    }
    async with session(EchoTool({"returns": ("ok", 0.5, given)})) as opened:
        (result,) = await opened.execute([HI])
    assert result.metrics == {
        "d": 0.5,
        "a": [[1, 2]],
        "t": "2026-01-02",
        "x": "/w==",
        "l": "<unlocked _thread.lock object>",
        "g": "<generator object broken>",
    }


def broken() -> Iterator[int]:
    raise RuntimeError("boom")
    yield 1


class FarOut(BaseException):
    """An error such as libraries derive so that no `except Exception` catches it."""


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_what_is_no_exception_does_not_escape(method: str, in_thread: bool) -> None:
    tool = EchoTool({method: FarOut("timed out")})
    if in_thread:

        def plain(*args: Any, **kwargs: Any) -> Any:
            tool.counts[method] += 1
            raise FarOut("timed out")

        setattr(tool, method, plain)
    async with session(tool, timeout_s=20) as opened:
        (result,) = await opened.execute([HI])
        await opened.calc_rewards()
    expected = CallStatus.ERROR if method in ("create", "execute") else CallStatus.OK
    assert result.status is expected
    assert ("timed out" in result.text) == (expected is CallStatus.ERROR)
    assert tool.counts["release"] == 1


async def test_metrics_can_be_written_down() -> None:
    async with session(EchoTool({"returns": ("x", 0.0, {("a", 1): object, "n": 2})})) as opened:
        metrics = (await opened.execute([HI]))[0].metrics
    assert metrics == {"('a', 1)": "<class 'object'>", "n": 2}


class Lost(UserDict[str, float]):
    """Metrics that are read from a place that is not there any more."""

    def items(self) -> Any:
        raise OSError("the file has gone")


async def test_an_answer_that_cannot_be_read_leaves_nothing_in_the_result() -> None:
    tool = EchoTool({"returns": (SimpleNamespace(text="ok", image=[object()], video=None), 1.0, Lost(a=1.0))})
    async with session(tool) as opened:
        (result,) = await opened.execute([HI])
    assert (result.status, result.text) == (CallStatus.ERROR, "Error: OSError: the file has gone")
    assert (result.reward, result.images, result.metrics) == (0.0, (), {})


async def test_images_are_handed_on_and_videos_refused() -> None:
    picture, video = object(), object()
    async with session(EchoTool({"returns": SimpleNamespace(text=None, image=[picture], video=None)})) as opened:
        assert (await opened.execute([HI]))[0].images == (picture,)
    for returned in (SimpleNamespace(text="", video=[video]), SimpleNamespace(text="", image=picture)):
        async with session(EchoTool({"returns": returned})) as opened:
            with pytest.raises(ToolContractError, match="images"):
                await opened.execute([HI])


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("no such file", "Error: no such file"),
        ("Error: no such file", "Error: no such file"),
        ("error: Error: no such file", "Error: no such file"),
        ("[ERROR] no such file", "Error: no such file"),
        ("**Error:** no such file", "Error: no such file"),
        ("Error executing tool f: no such file", "Error executing tool f: no such file"),
        ("ERROR", "ERROR"),
        ("Error:", "Error:"),
        ("", "Error: "),
        ("errors: 3", "Error: errors: 3"),
        ("an error: it hurts", "Error: an error: it hurts"),
        ("ValueError: no such file", "Error: ValueError: no such file"),
        ("Error::new failed", "Error::new failed"),
    ],
)
async def test_a_failure_is_marked_once(said: str, read: str) -> None:
    assert as_error(said) == read

    class Failing(EchoTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
            raise ValueError(said)

    async with session(Failing(), timeout_s=60) as tools:
        (result,) = await tools.execute([HI])
    assert result.text == (read if said else "Error: ValueError")
