"""Every session's promises to an author's class: the sessions of tools and of interactions, by the same cases.

An author's class has a method that begins a conversation, one that is called in it, and one that ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.conftest import until
from tests.sessions import HI
from verl_multiturn import BaseTool, Interaction, Reply, ToolResponse, ToolSchema
from verl_multiturn.calls import calls
from verl_multiturn.calls.slots import Gates
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.interactions.running.replies import InteractionFailedError
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession

TIMEOUT_S = 0.5
Call = Callable[[], Awaitable[bool]]


class Author:
    """Actions of an author's methods in a test, and a log of them.

    Args:
        as_threads: Whether the methods are plain functions, which run in threads.
    """

    def __init__(self, as_threads: bool) -> None:
        self.as_threads = as_threads
        self.log: list[str] = []
        self.seen: list[Any] = []
        self.goes_on = threading.Event()
        self.hangs: set[str] = set()
        self.raises: dict[str, BaseException] = {}

    def begins_to(self, step: str, kwargs: dict[str, Any]) -> None:
        """Note a step, and change its kwargs."""
        self.log.append(step)
        self.seen.append({key: list(value) if isinstance(value, list) else value for key, value in kwargs.items()})
        for value in kwargs.values():
            if isinstance(value, list):
                value.append("changed")

    def run(self, step: str, answer: Any, kwargs: dict[str, Any]) -> Any:
        """Do a step, at once or as a coroutine."""
        self.begins_to(step, kwargs)
        if self.as_threads:
            if step in self.hangs:
                self.goes_on.wait()
            return self._ended(step, answer)
        return self._later(step, answer)

    async def _later(self, step: str, answer: Any) -> Any:
        if step in self.hangs:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.to_thread(self.goes_on.wait)  # it ignores its cancellation, as an author's code may
        return self._ended(step, answer)

    def _ended(self, step: str, answer: Any) -> Any:
        if step in self.raises:
            raise self.raises[step]
        self.log.append(f"{step} ended")
        return answer


class _Tool(BaseTool):
    def __init__(self, author: Author) -> None:
        super().__init__({})
        self.author = author

    def get_schema(self) -> ToolSchema:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        return ToolSchema.read({"type": "function", "function": {"name": "echo", "parameters": parameters}}, "echo")


class ToolCoroutines(_Tool):
    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await self.author.run("begin", None, kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return await self.author.run("call", ToolResponse("yes"), kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self.author.run("end", None, kwargs)


class ToolFunctions(_Tool):
    def create(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        self.author.run("begin", None, kwargs)

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:  # type: ignore[override]
        return self.author.run("call", ToolResponse("yes"), kwargs)

    def release(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        self.author.run("end", None, kwargs)


class _Interaction(Interaction):
    def __init__(self, author: Author) -> None:
        super().__init__({})
        self.name, self.author = "echo", author


class InteractionCoroutines(_Interaction):
    async def start(self, instance_id: str, **kwargs: Any) -> None:
        await self.author.run("begin", None, kwargs)

    async def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        return await self.author.run("call", Reply("yes"), kwargs)

    async def close(self, instance_id: str) -> None:
        await self.author.run("end", None, {})


class InteractionFunctions(_Interaction):
    def start(self, instance_id: str, **kwargs: Any) -> None:
        self.author.run("begin", None, kwargs)

    def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        return self.author.run("call", Reply("yes"), kwargs)

    def close(self, instance_id: str) -> None:
        self.author.run("end", None, {})


class Owner:
    """An author's class as its sessions use it.

    Args:
        kind: `tool` or `interaction`.
        as_threads: As in `Author`.
    """

    def __init__(self, kind: str, as_threads: bool) -> None:
        self.kind = kind
        self.author = Author(as_threads)
        if kind == "tool":
            self.tool = (ToolFunctions if as_threads else ToolCoroutines)(self.author)
            self.gates = Gates(Gate, TIMEOUT_S)
            self.slots = self.gates.of(self.tool)
        else:
            made = (InteractionFunctions if as_threads else InteractionCoroutines)(self.author)
            self.slots = InteractionGate(made, TIMEOUT_S)  # type: ignore[assignment]
        self._all = self.slots._free

    @property
    def running(self) -> int:
        """Return how many slots are taken."""
        return self._all - self.slots._free

    @contextlib.asynccontextmanager
    async def session(self, **row: Any) -> AsyncIterator[Call]:
        """Begin a conversation with a row's kwargs; yield a call, which returns whether it was answered."""
        if self.kind == "tool":
            given = {"echo": {f"{name}_kwargs": dict(row) for name in ("create", "execute")}} if row else {}
            async with ToolSession("r1", {"echo": self.tool}, given, self.gates, 8) as opened:

                async def execute() -> bool:
                    (result,) = await opened.execute([HI])
                    return result.status is CallStatus.OK

                yield execute
            return
        async with InteractionSession(self.slots, "r1", row) as talking:  # type: ignore[arg-type]

            async def reply() -> bool:
                try:
                    return (await talking.reply([{"role": "assistant", "content": "hi"}])).text == "yes"
                except InteractionFailedError:
                    return False

            with contextlib.suppress(InteractionFailedError):
                await talking.start()
            yield reply


@pytest.fixture(params=["tool", "interaction"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[False, True], ids=["coroutines", "threads"])
def owner(request: pytest.FixtureRequest, kind: str) -> Iterator[Owner]:
    made = Owner(kind, request.param)
    yield made
    made.author.goes_on.set()  # no thread outlives its test


STEPS = ["begin", "begin ended", "call", "call ended", "end", "end ended"]


async def test_begin_then_calls_then_end_once(owner: Owner) -> None:
    async with owner.session() as call:
        assert await call()
    assert owner.author.log == STEPS


@pytest.mark.parametrize("raised", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("step", ["begin", "call", "end"])
async def test_what_the_authors_code_raises_stays_with_it(owner: Owner, step: str, raised: BaseException) -> None:
    owner.author.raises[step] = raised
    async with owner.session() as call:
        assert await call() is (step == "end") or step == "begin"
    assert [each for each in owner.author.log if each in ("begin", "end")] == ["begin", "end"]


async def test_a_late_call_is_given_up_keeps_its_slot_and_the_end_waits_for_it(owner: Owner) -> None:
    author = owner.author
    author.hangs = {"call"}
    async with owner.session() as call:
        assert not await call()
        assert owner.running == 1
        author.goes_on.set()
    assert author.log == STEPS
    await until(lambda: owner.running == 0)


async def test_the_end_waits_so_long_and_no_longer(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_ABANDONED_S", 0.01)
    author = owner.author
    author.hangs = {"call"}
    async with owner.session() as call:
        assert not await call()
    assert author.log == ["begin", "begin ended", "call", "end", "end ended"]
    author.goes_on.set()


async def test_a_cancelled_conversation_ends_too(owner: Owner) -> None:
    author = owner.author
    author.hangs = {"call"}

    async def converse() -> None:
        async with owner.session() as call:
            await call()

    conversation = asyncio.create_task(converse())
    await until(lambda: "call" in author.log)
    conversation.cancel()
    author.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await conversation
    assert author.log == STEPS


async def test_no_change_of_kwargs_is_seen_elsewhere(owner: Owner) -> None:
    row = {"goods": ["tea"]}
    async with owner.session(**row) as first, owner.session(**row) as second:
        for call in (first, second, first):
            assert await call()
    given = [seen["goods"] for seen in owner.author.seen if "goods" in seen]
    assert given == [["tea"]] * 5
    assert row == {"goods": ["tea"]}


async def test_nothing_runs_after_the_end(owner: Owner) -> None:
    async with owner.session() as call:
        pass
    with pytest.raises(MultiTurnError, match=r"after (release|close)"):
        await call()
    assert owner.author.log == [step for step in STEPS if "call" not in step]
