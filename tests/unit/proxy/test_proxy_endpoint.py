"""The endpoint: a real agent in a thread, a real socket, a scripted engine; and the fate of the session."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent_sessions import certified, make_run, turns
from tests.conftest import until
from tests.idle_loop import hold_up, skip_waits
from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.certificate.receipts import Receipt, Receipts
from verl_multiturn.config import OutageSettings, ProxySettings
from verl_multiturn.errors import AgentContractError, CertificateError, ConfigError, EngineError
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.proxy.agents import thread_runner
from verl_multiturn.proxy.agents.end import AgentEnd, EndKind
from verl_multiturn.proxy.endpoint import Endpoint, stop_reason
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.engines.protocol import Generation
from verl_multiturn.rollout.life import Life, live, stopped
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome, SessionReport

ROW = {"raw_prompt": [{"role": "user", "content": "1+1?"}], "extra_info": {"index": 7}}


@asynccontextmanager
async def serving(agent: str, *said: str, engine: Any = None, **settings: Any) -> AsyncIterator[Endpoint]:
    limits = {key: settings.pop(key) for key in ("prompt_length",) if key in settings}
    runner = build_runner(ProxySettings(agent=f"tests.endpoint_agents:{agent}"))
    endpoint = Endpoint(
        make_run(engine or turns(*said), **limits), runner, ProxyServer(), settings.pop("wall_clock_s", 30.0), -1.0
    )
    try:
        yield endpoint
    finally:
        await endpoint.aclose()


def check(outcome: Outcome, generations: list[Receipt]) -> None:
    """Compare the rows with the receipts."""
    receipts = Receipts.of_rows("r", generations, outcome.places, "u", 0, False, not outcome.valid)
    assert certified(outcome, receipts) == []


async def play(agent: str, *said: str, **settings: Any) -> Outcome:
    async with serving(agent, *said, **settings) as endpoint:
        outcome, receipts = await endpoint.run("r", ROW, {"temperature": 1.0})
    check(outcome, receipts)
    return outcome


async def test_an_agent_and_its_rewards() -> None:
    outcome = await play("chat", "a", "b")
    assert (outcome.stop_reason, outcome.valid, outcome.error) == (StopReason.FINISHED, True, "")
    assert outcome.session is not None
    assert replace(outcome.session, requests=(), events=()) == SessionReport(
        1, {"temperature": 2}, 1.0, False, "returned"
    )
    assert (outcome.places, [turn.parent for turn in outcome.turns]) == ([0, 0], [None, 0])
    assert [turn.reward for turn in outcome.turns] == [0.25, 0.5]
    assert [turn.said.content for turn in outcome.turns if turn.said] == ["a", "b"]


async def test_the_record_of_a_session() -> None:
    async with serving("chat", "a", "b") as endpoint:
        outcome, generations = await endpoint.run("r", ROW, {"temperature": 1.0})
    life = Life("r", "u", row=ROW, outcome=outcome, generations=generations)
    record = json.loads(line_of(record_of(life)))
    assert verify_record(record).violations == []
    session = record["session"]
    first, second = session.pop("requests")
    asked = [[what, number, number] for number in (0, 1) for what in ("request", "samples")]
    assert session.pop("events") == [*asked[:2], ["delivered", 0, 1], *asked[2:], ["delivered", 1, 2]]
    assert session == {
        "roots": 1,
        "unenforced": {"temperature": 2},
        "reward": 1.0,
        "by_id": False,
        "rewards": {},
        "roles": [],
        "trained": [],
        "opponents": {},
        "end": "returned",
        "problem": "",
        "task": None,
        "user": None,
    }
    assert [(each["protocol"], each["parent"], each["shared"], each["generations"]) for each in (first, second)] == [
        ("chat", None, 0, [0]),
        ("chat", 0, 2, [1]),
    ]
    assert [(each["delivered"], each["order"]) for each in (first, second)] == [(True, 0), (True, 1)]
    kept = [(each["parent"], each["row"], each["reward"], each["text"]) for each in record["generations"]]
    assert kept == [(None, 0, 0.25, "a"), (0, 0, 0.5, "b")]
    record["generations"][1]["cause"] = "undelivered"
    with pytest.raises(CertificateError, match="expected a row and its start, or a cause and its tokens"):
        verify_record(record)


async def test_an_agent_that_leaves_the_score_to_others() -> None:
    outcome = await play("undecided", "a")
    assert outcome.session is not None
    assert replace(outcome.session, requests=(), events=()) == SessionReport(1, {}, None, False, "returned")
    assert outcome.valid


async def test_an_agent_that_asks_nothing() -> None:
    outcome = await play("idle")
    assert (outcome.stop_reason, outcome.valid) == (StopReason.AGENT_FAILED, False)
    assert len(outcome.rows) == 1


@pytest.mark.parametrize(
    ("agent", "reason", "valid"),
    [("broken", StopReason.AGENT_ERROR, True), ("broken_at_once", StopReason.AGENT_FAILED, False)],
)
async def test_an_agent_that_raises(agent: str, reason: StopReason, valid: bool) -> None:
    outcome = await play(agent, "a")
    assert (outcome.stop_reason, outcome.valid) == (reason, valid)
    assert outcome.session is not None
    assert outcome.session.reward == -1.0
    assert "no such planet" in outcome.error


async def test_a_key_is_in_no_message() -> None:
    outcome = await play("tell_tale")
    assert "/s/[key]/v1" in outcome.error


async def test_an_agent_whose_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_runner, "_INTERRUPTED_S", 60.0)  # as long as a busy machine needs
    noted = tmp_path / "noted"
    async with serving("slow", "a", wall_clock_s=60.0) as endpoint:
        running = asyncio.ensure_future(endpoint.run("r", ROW | {"noted": str(noted)}, {"temperature": 1.0}))
        await until(noted.exists)
        hold_up(100)
        outcome, receipts = await running
    check(outcome, receipts)
    assert (outcome.stop_reason, outcome.valid) == (StopReason.WALL_CLOCK, True)
    assert outcome.session is not None
    assert (outcome.session.reward, outcome.session.stuck) == (-1.0, False)


async def test_a_prompt_that_is_too_long() -> None:
    outcome = await play("undecided", "a", prompt_length=3)
    assert (outcome.stop_reason, outcome.valid) == (StopReason.PROMPT_TOO_LONG, False)
    assert outcome.trajectory.prompt_length == 3


async def test_a_reward_for_what_was_never_said() -> None:
    with pytest.raises(AgentContractError, match="chatcmpl-of-a-dream") as caught:
        await play("dreamer", "a")
    assert len(str(caught.value)) < 300


class Broken:
    """An engine that fails."""

    async def generate(self, *arguments: Any, **more: Any) -> Generation:
        raise EngineError("out of memory")


async def test_an_engine_that_fails() -> None:
    outcome = await play("undecided", engine=Broken())
    assert (outcome.stop_reason, outcome.valid) == (StopReason.ENGINE_ERROR, False)
    assert "out of memory" in outcome.error


class Standing:
    """An engine that stalls for longer than the session's time, twice at once."""

    def __init__(self) -> None:
        self.asked = 0

    async def generate(self, *arguments: Any, **more: Any) -> Generation:
        self.asked += 1
        with stopped():
            await asyncio.sleep(0.01)
            hold_up(100)
        return Generation([5], [-0.5], [0], "stop")


async def test_time_in_which_the_engine_stands_does_not_count() -> None:
    outcome = await play("undecided", engine=Standing(), wall_clock_s=60.0)
    assert (outcome.stop_reason, outcome.valid) == (StopReason.FINISHED, True)


async def test_sessions_at_once_and_nothing_is_left() -> None:
    async with serving("undecided", *["a"] * 20) as endpoint:
        made = await asyncio.gather(*(endpoint.run(f"r{i}", ROW, {}) for i in range(20)))
        port = int(endpoint._server.address.rpartition(":")[2])
    assert [outcome.stop_reason for outcome, _ in made] == [StopReason.FINISHED] * 20
    assert {len(receipts) for _, receipts in made} == {1}
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


async def test_a_cancelled_session_leaves_nothing() -> None:
    async with serving("slow", "a") as endpoint:
        before = asyncio.all_tasks()
        running = asyncio.ensure_future(endpoint.run("r", ROW, {}))
        while not endpoint._run.engine._open:  # noqa: ASYNC110  # the engine sends no event
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert endpoint._run.engine._open == {}
        assert not endpoint._server._open
        # The connection's own task ends when it has seen that its client is gone.
        await until(lambda: not [task for task in asyncio.all_tasks() - before if "Server" not in repr(task)])


async def test_a_cancelled_sessions_record_has_what_was_said_until_then(tmp_path: Path) -> None:
    noted, life = tmp_path / "noted", Life("r")
    async with serving("slow", "Two.") as endpoint:

        async def lives() -> None:
            with live(life):
                await endpoint.run("r", {**ROW, "noted": str(noted)}, {})

        running = asyncio.ensure_future(lives())
        await until(noted.exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    record = record_of(life)
    line_of(record)
    assert (record["status"], record["rows"], record["generations"]) == ("cancelled", [], [])
    assert [message["content"] for message in record["messages"]] == ["1+1?", "Two."]


async def test_an_agents_outage_is_not_trained_and_new_sessions_wait_before_their_first_token() -> None:
    outages = Outages(stopped=stopped)
    watch = outages.of("agent x", OutageLimits(), 60)
    async with serving("out", *"abcdefghijklmnop", wall_clock_s=5.0) as endpoint:
        endpoint._watch = watch
        ended = [await endpoint.run(f"r{each}", ROW, {}) for each in range(8)]
        for outcome, generations in ended:
            check(outcome, generations)
            assert (outcome.stop_reason, outcome.valid, outcome.outages) == (StopReason.OUTAGE, False, ["agent x"])
        assert "the database does not answer" in ended[0][0].error
        assert watch is not None
        assert watch.is_open
        up = {**ROW, "up": True}
        waiting = [asyncio.ensure_future(endpoint.run(f"w{each}", up, {})) for each in range(4)]
        hold_up(0.5)
        await asyncio.sleep(0)
        assert not endpoint._server._open  # none has a session yet
        done = await asyncio.gather(*waiting)
        assert [outcome.stop_reason for outcome, _ in done] == [StopReason.FINISHED] * 4
        assert not watch.is_open


async def test_a_session_that_cannot_be_judged_is_invalid_and_no_outage() -> None:
    watch = Outages(stopped=stopped).of("agent x", OutageLimits(), 60)
    assert watch is not None
    async with serving("ungraded", *"abcdefghijklmnop") as endpoint:
        endpoint._watch = watch
        for each in range(9):  # eight outages would open the breaker
            outcome, generations = await endpoint.run(f"r{each}", ROW, {})
            check(outcome, generations)
            assert (outcome.stop_reason, outcome.valid, outcome.outages) == (StopReason.UNJUDGED, False, [])
            assert "the grader is lost" in outcome.error
    assert not watch.is_open


async def test_where_nobody_asks_an_agents_outage_is_an_error_of_the_agent() -> None:
    outcome = await play("out", "a")
    assert (outcome.stop_reason, outcome.valid, outcome.outages) == (StopReason.AGENT_ERROR, True, [])
    assert outcome.session is not None
    assert outcome.session.reward == -1.0


async def test_a_session_that_waited_for_too_long_has_an_outcome() -> None:
    watch = Outages(OutageSettings(stop_s=3), stopped=stopped).of("agent x", OutageLimits(), 60)
    async with serving("out", *"abcdefghijklmnop") as endpoint:
        endpoint._watch = watch
        for each in range(8):
            await endpoint.run(f"r{each}", ROW, {})
        results = await asyncio.gather(*(endpoint.run(f"w{each}", ROW, {}) for each in range(4)))
    late = [outcome for outcome, generations in results if not generations]
    assert late
    assert {outcome.stop_reason for outcome, _ in results} == {StopReason.OUTAGE}
    assert "more than 3 s" in late[0].error
    check(late[0], [])


class Ending:
    """A runner whose agents take so many seconds and end so, without a request."""

    stuck = 0

    def __init__(self, kind: EndKind, seconds: float = 0.0) -> None:
        self.kind, self.seconds = kind, seconds

    async def run(self, row: Any, address: Any, time_up: Any, returned: Any = None) -> AgentEnd:
        kind, seconds = self.kind, self.seconds
        await asyncio.sleep(seconds)
        return AgentEnd(kind)

    async def aclose(self) -> None:
        """Do nothing."""


async def test_an_agent_that_runs_shows_that_what_it_needs_is_there_long_before_it_ends() -> None:
    watch = Outages(stopped=stopped).of("agent x", OutageLimits(), 60)
    assert watch is not None
    async with serving("out", wall_clock_s=7200.0) as endpoint:
        endpoint._watch, endpoint._agents = watch, (agents := Ending("outage"))
        for each in range(8):
            await endpoint.run(f"r{each}", ROW, {})
        await until(lambda: watch.is_open)
        agents.kind, agents.seconds = "returned", 3600.0
        skip_waits()
        began = asyncio.get_running_loop().time()
        waiting = [asyncio.ensure_future(endpoint.run(f"w{each}", ROW, {})) for each in range(4)]
        await until(lambda: not watch.is_open)
        assert asyncio.get_running_loop().time() - began > 90, "three sessions of 30 s, one after the other"
        assert not any(task.done() for task in waiting)
        assert [outcome.stop_reason for outcome, _ in await asyncio.gather(*waiting)] == [StopReason.AGENT_FAILED] * 4
        assert not watch.is_open


@pytest.mark.parametrize(
    ("kind", "answered"),
    [
        ("returned", 1),
        ("raised", 1),
        ("exited", 1),
        ("timed_out", 0),
        ("stuck", 0),
        ("failed", 0),
        ("unjudged", 0),
        ("misconfigured", 0),
    ],
)
async def test_an_agent_that_came_to_no_end_of_its_own_says_nothing_of_what_it_needs(
    kind: EndKind, answered: int
) -> None:
    watch = Outages(stopped=stopped).of("agent x", OutageLimits(), 60)
    assert watch is not None
    async with serving("out") as endpoint:
        endpoint._watch, endpoint._agents = watch, Ending(kind)
        with suppress(ConfigError):  # of `misconfigured`
            await endpoint.run("r", ROW, {})
        assert watch.take().answered == answered


def test_the_order_of_reasons() -> None:
    assert stop_reason(AgentEnd("outage"), True, "") is StopReason.OUTAGE
    assert stop_reason(AgentEnd("unjudged"), True, "") is StopReason.UNJUDGED
    assert stop_reason(AgentEnd("unjudged"), False, "") is StopReason.UNJUDGED
    returned, raised, late = AgentEnd("returned"), AgentEnd("raised"), AgentEnd("timed_out")
    assert stop_reason(late, False, "broken", True) is StopReason.ENGINE_ERROR
    assert stop_reason(late, False, "", True) is StopReason.PROMPT_TOO_LONG
    assert stop_reason(late, False, "") is StopReason.AGENT_FAILED
    assert stop_reason(late, True, "") is StopReason.WALL_CLOCK
    assert stop_reason(late, False, "", alone=True) is StopReason.AGENT_FAILED
    assert stop_reason(AgentEnd("returned"), False, "", alone=True) is StopReason.NO_COMPLETION
    assert stop_reason(AgentEnd("returned"), False, "", True, alone=True) is StopReason.PROMPT_TOO_LONG
    assert stop_reason(AgentEnd("stuck"), True, "") is StopReason.WALL_CLOCK
    assert stop_reason(raised, True, "") is StopReason.AGENT_ERROR
    assert stop_reason(returned, True, "", True) is StopReason.FINISHED
