"""Clients that leave and ask again, over real sockets and a real session: nothing is sampled or trained twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.agent_sessions import END, certified, make_run
from tests.proxy_clients import HELLO, answer, connect, post, until
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer

STREAMED = {**HELLO, "stream": True}
OTHER = {"model": "m", "messages": [{"role": "user", "content": "other"}]}


class GatedEngine:
    """An engine that answers when `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0

    async def generate(self, ask: Ask) -> Generation:
        self.asked += 1
        number = self.asked
        await self.gate.wait()
        said = tiny_tokenizer().encode(f"answer {number}{END}")
        return Generation(said, [-0.5] * len(said), [0] * len(said), "stop")


@dataclass
class World:
    engine: GatedEngine
    session: AgentSession
    address: SessionAddress
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def ask(self, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request, and return its connection."""
        reader, writer = await connect(self.address)
        self.writers.append(writer)
        writer.write(post(self.address, body))
        return reader, writer

    async def end(self) -> Outcome:
        """End the session; its rows are right."""
        self.session.end()
        await self.session.closed()
        outcome = self.session.outcome(StopReason.FINISHED)
        receipts = Receipts.of_rows("s", self.session.receipts(), outcome.places, "u", 0, False, not outcome.valid)
        assert certified(outcome, receipts) == []
        return outcome


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    engine = GatedEngine()
    session = AgentSession("s", make_run(engine), {})
    async with ProxyServer(ping_s=0.01) as server:
        made = World(engine, session, server.open(session))
        yield made
        session.end()
        await session.closed()
        for writer in made.writers:
            writer.close()


@pytest.mark.parametrize("body", [HELLO, STREAMED])
async def test_who_asks_again_takes_over_the_generation_under_way(body: Any) -> None:
    async with world() as one:
        _, writer = await one.ask(body)
        await until(lambda: one.engine.asked == 1)
        writer.close()
        await until(lambda: not [task for task in asyncio.all_tasks() if "_handle_request" in repr(task)])
        reader, _ = await one.ask(HELLO)
        await asyncio.sleep(0.1)
        one.engine.gate.set()
        assert b"answer 1" in (await answer(reader))[2]
        assert one.engine.asked == 1
        assert (await one.end()).places == [0]


async def test_who_asks_again_later_gets_the_completion_that_was_kept() -> None:
    async with world() as one:
        _, writer = await one.ask(HELLO)
        await until(lambda: one.engine.asked == 1)
        writer.close()
        one.engine.gate.set()
        await until(lambda: one.session.forest.completions)
        reader, _ = await one.ask(OTHER)
        assert b"answer 2" in (await answer(reader))[2]
        reader, _ = await one.ask(HELLO)
        assert b"answer 1" in (await answer(reader))[2]
        assert (await one.end()).places == [0, 1]


async def test_what_nobody_fetches_is_not_trained() -> None:
    async with world() as one:
        _, writer = await one.ask(HELLO)
        reader, _ = await one.ask(OTHER)
        await until(lambda: one.engine.asked == 2)
        writer.close()
        one.engine.gate.set()
        assert (await answer(reader))[0] == 200
        await until(lambda: len(one.session.forest.completions) == 2)
        assert sorted(map(str, (await one.end()).places)) == ["0", "undelivered"]


async def test_two_that_wait_for_the_same_are_two_samples() -> None:
    async with world() as one:
        readers = [(await one.ask(HELLO))[0] for _ in range(2)]
        await until(lambda: one.engine.asked == 2)
        one.engine.gate.set()
        assert {(await answer(reader))[0] for reader in readers} == {200}
        assert len((await one.end()).rows) == 2


async def test_the_end_of_a_session_answers_who_waits() -> None:
    async with world() as one:
        reader, _ = await one.ask(HELLO)
        await until(lambda: one.engine.asked == 1)
        one.session.end()
        status, _, content = await answer(reader)
        assert (status, b"session_over" in content) == (400, True)
        reader, _ = await one.ask(HELLO)
        assert (await answer(reader))[0] == 400


async def test_a_mistake_of_ours_makes_the_session_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as one:
        one.engine.gate.set()
        monkeypatch.setattr(AgentSession, "_prompt", lambda *_: 1 / 0)
        reader, _ = await one.ask(HELLO)
        assert (await answer(reader))[0] == 400
        assert one.session.failed == "the proxy failed: ZeroDivisionError: division by zero"
