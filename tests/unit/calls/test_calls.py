"""The kernel of guarded calls, with an object that is neither a tool nor an interaction."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import until
from verl_multiturn.calls.calls import Calls
from verl_multiturn.calls.invocation import TimedOutError
from verl_multiturn.calls.limits import CallLimits
from verl_multiturn.calls.owner import Owner
from verl_multiturn.calls.slots import Slot, Slots
from verl_multiturn.errors import ToolContractError

METHODS = ("open", "ask", "rate", "shut")


class Base:
    async def open(self, instance_id: str) -> None: ...

    async def shut(self, instance_id: str) -> None: ...

    async def rate(self, instance_id: str) -> float:
        raise AssertionError("it is inherited, and not called")


class Oracle(Base):
    name = "delphi"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.goes_on = asyncio.Event()

    async def open(self, instance_id: str) -> None:
        self.log.append(f"open {instance_id}")

    async def ask(self, instance_id: str, question: str, **kwargs: Any) -> Any:
        while question == "why" and not self.goes_on.is_set():
            try:
                await self.goes_on.wait()
            except asyncio.CancelledError:
                continue  # it ignores its cancellation, as an author's code may
        return kwargs or question

    async def shut(self, instance_id: str) -> None:
        self.log.append(f"shut {instance_id}")


def calls_of(oracle: Oracle, **given: Any) -> tuple[Slots, Calls]:
    slots = Slots(Owner(oracle, "oracle", METHODS, Base, CallLimits(concurrency=2), ToolContractError), 0.05)
    return slots, Calls(slots, "r1", **{"kwargs": {}, **given})


async def test_what_began_is_ended_once_and_nothing_is_called_later() -> None:
    oracle = Oracle()
    _, calls = calls_of(oracle)
    await Calls.end([calls_of(oracle)[1]])  # it did not begin
    calls.begin()
    await calls.call("open")
    assert await calls.call("rate") is None
    calls.instance_id = "own"
    for _ in range(2):
        await Calls.end([calls])
    assert oracle.log == ["open r1", "shut own"]
    with pytest.raises(ToolContractError, match="oracle 'delphi': ask after shut"):
        await calls.call("ask", "what")


async def test_a_late_call_keeps_its_own_slot_and_no_other() -> None:
    oracle = Oracle()
    slots, calls = calls_of(oracle)

    async def ask(question: str) -> Any:
        with Slot(slots) as slot:
            await slot.take()
            return await calls.call("ask", question, slot=slot)

    with pytest.raises(TimedOutError, match="the oracle did not answer in time"):
        await ask("why")
    assert await ask("what") == "what"
    assert slots._free == 1
    oracle.goes_on.set()
    await until(lambda: slots._free == 2)


async def test_kwargs_are_copied_but_for_those_that_are_shared() -> None:
    row, shared = {"ask": {"goods": ["tea"]}}, ["one"]
    _, calls = calls_of(Oracle(), kwargs=row, uncopied={"ask": {"shared": shared}})
    seen = await calls.call("ask", "what")
    assert seen == {"goods": ["tea"], "shared": ["one"]}
    assert seen["goods"] is not row["ask"]["goods"]
    assert seen["shared"] is shared
