"""Effects of a tool's code on the worker and the conversation, apart from its answers."""

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import EchoTool
from verl_multiturn.calls.closing import close_all
from verl_multiturn.calls.metrics import METRICS_CHARACTERS, plain_metrics
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.agent_data import AgentData
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession


class Counted(list[Any]):
    """A list that counts how many of its items were looked at."""

    looked = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.looked += 1
            yield item


@pytest.mark.parametrize("item", ["", [], {}, None, 0])
def test_items_without_characters_are_counted_too(item: Any) -> None:
    many = Counted([item] * 2 * METRICS_CHARACTERS)
    assert plain_metrics("t", {"small": 1, "many": many}) == {"small": 1}
    assert many.looked <= METRICS_CHARACTERS


def test_a_tensor_is_its_numbers() -> None:
    metrics = {"two": torch.tensor([1.0, 2.0]), "array": np.array([3]), "image": Image.new("L", (2, 2))}
    assert plain_metrics("t", metrics) == {
        "two": [1.0, 2.0],
        "array": [3],
        "image": "<PIL.Image.Image image mode=L size=2x2>",
    }
    assert plain_metrics("t", {"large": torch.zeros(METRICS_CHARACTERS + 1), "small": 1}) == {
        "large": "tensor([0., 0., 0.,  ..., 0., 0., 0.])",
        "small": 1,
    }


def test_what_a_tool_does_to_the_images_of_a_conversation_stays_with_it() -> None:
    image = Image.new("RGB", (4, 4))
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "look"}]}]
    data = AgentData("r1", {}, messages)
    shown = data.image_data
    assert shown is not None
    for given in (shown[0], data.messages[0]["content"][0]["image"]):
        assert given == image
        given.putpixel((0, 0), (255, 0, 0))
    assert image.getpixel((0, 0)) == (0, 0, 0)


class Closing(EchoTool):
    """A tool whose `aclose` raises."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def aclose(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), KeyboardInterrupt(), OSError("x")])
def test_a_tool_that_exits_while_it_is_closed_ends_nothing(error: BaseException, caplog: Any) -> None:
    async def main() -> str:
        await close_all([Closing(error)])
        return "went on"

    assert asyncio.run(main()) == "went on"
    assert f"aclose raised {type(error).__name__}" in caplog.text


def synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return wrapper


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("decorator", [synchronous, passing_on])
async def test_a_synchronous_wrapper_around_a_coroutine_runs_in_a_thread(decorator: Any) -> None:
    class Wrapped(EchoTool):
        @decorator  # type: ignore[untyped-decorator]
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return str(threading.current_thread() is threading.main_thread())

    tool = Wrapped()
    async with ToolSession("r1", {"echo": tool}, {}, Gates(Gate, 20), 8) as opened:
        (result,) = await opened.execute([ToolCall("echo", '{"text": "hi"}', "c1")])
    assert (result.status, result.text) == (CallStatus.OK, str(decorator is passing_on))
