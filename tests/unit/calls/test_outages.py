"""Outages among the processes of a run: who waits, who is a probe, who is affected, and the state after a dead keeper.

Each `Outages` represents a process; they share a keeper as workers share the actor of a run.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
import ssl
import sys
import time
import urllib.error
from collections import Counter
from collections.abc import Awaitable, Callable
from email.message import Message
from email.utils import formatdate
from typing import Any

import httpx
import pytest

from tests.idle_loop import hold_up, skip_waits
from verl_multiturn import BaseTool, ConfigError, OutageError, ToolContractError, UnjudgedError
from verl_multiturn.calls.invocation import BusyError, TimedOutError
from verl_multiturn.calls.limits import CallLimits, OutageLimits, outage_rules, set_limits
from verl_multiturn.calls.outages.breaker import Outage
from verl_multiturn.calls.outages.causes import Timeouts, agents_cause, cause_of, next_try_s, retry_after_s, status_kind
from verl_multiturn.calls.outages.guarded_call import GuardedCall
from verl_multiturn.calls.outages.messages import OutageState, StoreLostError, Sums
from verl_multiturn.calls.outages.process import REPORT_S, OutageEndError, Outages, Watch
from verl_multiturn.calls.outages.store import OutageStore
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.clients.chat_endpoint import EndpointError
from verl_multiturn.config import OutageSettings
from verl_multiturn.interactions.errors import EnvironmentFailedError, EnvironmentOutageError
from verl_multiturn.sandbox.launch import SandboxError
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.session import ToolSession
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.http_client import LateError, UnavailableError

NAME = "tool search"


def _date(after_s: float) -> str:
    return formatdate(time.time() + after_s, usegmt=True)


def _class(module: str, name: str, base: type[Exception] = Exception) -> type[Exception]:
    """Return a class as a client that need not be installed here has it."""
    return type(name, (base,), {"__module__": module, "__qualname__": name})


def _named(module: str, name: str, *args: object, base: type[Exception] = Exception) -> Exception:
    return _class(module, name, base)(*args)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutageError("down"), "outage"),
        (UnavailableError("503"), "outage"),
        (EndpointError("refuses"), "outage"),
        (SandboxError("no user namespaces"), "outage"),
        (EnvironmentOutageError("no server"), "outage"),
        (ConnectionRefusedError(), "outage"),
        (httpx.ConnectError("refused"), "outage"),
        (httpx.ReadError("broke off"), "outage"),
        (ssl.SSLError(), "outage"),
        (httpx.ConnectTimeout("no host there"), "outage"),
        (_named("requests.exceptions", "ConnectionError", _named("urllib3.exceptions", "ProtocolError")), "outage"),
        (_named("requests.exceptions", "ConnectionError"), "outage"),
        (_named("urllib3.exceptions", "MaxRetryError", ConnectionRefusedError()), "outage"),
        (_named("aiohttp.client_exceptions", "ClientPayloadError"), "outage"),
        (_named("httpx2", "ConnectError", base=_class("httpx2", "TransportError")), "outage"),
        (urllib.error.URLError(ConnectionRefusedError()), "outage"),
        (urllib.error.URLError(socket.gaierror(socket.EAI_AGAIN, "again")), "outage"),
        (socket.gaierror(socket.EAI_AGAIN, "again"), "outage"),
        (OSError(errno.EHOSTUNREACH, "no route"), "outage"),
        (OSError(errno.ENETUNREACH, "no network"), "outage"),
        (OSError(errno.ENOSPC, "no space"), "bug"),
        # An address that a model writes is its own mistake.
        (socket.gaierror(socket.EAI_NONAME, "no such host"), "model"),
        (urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "no such host")), "model"),
        (httpx.UnsupportedProtocol("foo://"), "model"),
        (httpx.InvalidURL("too long"), "model"),
        (httpx.LocalProtocolError("a header"), "model"),
        (_named("urllib3.exceptions", "LocationValueError", base=ValueError), "model"),
        # So may be the program that a pipe leads to, and that has ended.
        (BrokenPipeError(), "bug"),
        (ConnectionResetError("Connection lost"), "bug"),
        (BusyError("no slot"), "busy"),
        (EnvironmentFailedError("step() raised KeyError"), "bug"),
        (ValueError("no such column"), "model"),
        (ConfigError("row"), "model"),
        (KeyError("x"), "bug"),
        (RuntimeError(), "bug"),
    ],
)
@pytest.mark.parametrize("timeouts", ["model", "outage"])
def test_whose_a_failure_is(error: Exception, cause: str, timeouts: Timeouts) -> None:
    assert cause_of(error, timeouts) == cause


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        *((status, "outage") for status in (407, 429, 502, 503, 511)),
        (504, "late"),
        *((status, "bug") for status in (302, 401, 403, 404, 422, 500, 501)),
    ],
)
@pytest.mark.parametrize("timeouts", ["model", "outage"])
def test_a_status_says_whose_it_is(status: int, cause: str, timeouts: Timeouts) -> None:
    response = httpx.Response(status, request=httpx.Request("GET", "http://x"))
    openais = _named("openai", "InternalServerError", base=_class("openai", "APIStatusError"))
    openais.status_code = status  # type: ignore[attr-defined]
    requests = _named("requests.exceptions", "HTTPError", base=OSError)
    requests.response = response  # type: ignore[attr-defined]
    aiohttps = _named("aiohttp.client_exceptions", "ClientResponseError")
    aiohttps.status = status  # type: ignore[attr-defined]
    for error in (
        httpx.HTTPStatusError("x", request=response.request, response=response),
        urllib.error.HTTPError("http://x", status, "no", None, None),  # type: ignore[arg-type]
        openais,
        requests,
        aiohttps,
    ):
        assert cause_of(error, timeouts) == (timeouts if cause == "late" else cause), error


def test_what_each_status_says_where_the_address_is_configured() -> None:
    kinds: dict[str, list[int]] = {}
    for status in range(200, 600):
        kinds.setdefault(status_kind(status), []).append(status)
    refused = kinds.pop("refused")
    assert {400, 408, 409, 412, 413, 416, 418, 422, 423, 425, 428, 431, 451} <= set(refused)
    failed = kinds.pop("failed")
    assert {500, 506, 507, 508, 510, 520, 529, 599} <= set(failed)
    assert kinds == {
        "answer": list(range(200, 300)),
        "address": [*range(300, 400), 404, 405, 406, 410, 411, 414, 415, 417, 421, 426, 501, 505],
        "key": [401, 402, 403],
        "network": [407, 511],
        "away": [429, 502, 503],
        "late": [504],
    }


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0), ("7", 7), (" 7 ", 7), ("1.5", 1.5), ("2.", 2), ("60", 60), ("61", 60), ("9" * 400, 60),
        pytest.param(_date(0), 0, id="now"), pytest.param(_date(-3600), 0, id="an hour ago"),
        pytest.param(_date(3600), 60, id="in an hour"), ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wednesday, 21-Oct-15 07:28:00 GMT", 0), ("Fri, 31 Dec 9999 23:59:59 GMT", 60),
        (None, None), ("", None), ("-1", None), ("soon", None), ("nan", None), ("inf", None), ("1e3", None),
        ("1_0", None), ("٣", None), ("5, 10", None), ("5 seconds", None), ("0x10", None), (5, None), (b"5", None),
        ("Wed, 99 Oct 2015 99:28:00 GMT", None),
    ],
)  # fmt: skip
def test_what_a_retry_after_says(header: Any, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds


def test_the_next_try_is_read_from_the_errors_of_all_clients() -> None:
    response = httpx.Response(503, headers={"Retry-After": "7"}, request=httpx.Request("GET", "http://x"))
    message = Message()
    message["Retry-After"] = "7"
    openais = _named("openai", "RateLimitError", base=_class("openai", "APIStatusError"))
    openais.response = response  # type: ignore[attr-defined]
    aiohttps = _named("aiohttp.client_exceptions", "ClientResponseError")
    aiohttps.headers = {"retry-after": "7"}  # type: ignore[attr-defined]
    own = UnavailableError("503")
    own.next_try_s = 7.0
    wrapped = OutageError("the service is away")
    wrapped.__cause__ = own
    for error in (
        httpx.HTTPStatusError("x", request=response.request, response=response),
        urllib.error.HTTPError("http://x", 503, "no", message, None),
        openais,
        aiohttps,
        own,
        wrapped,
    ):
        assert next_try_s(error) == 7, error
    for silent in (UnavailableError("x"), ValueError(), httpx.ReadError("x"), TimeoutError()):
        assert next_try_s(silent) is None


async def test_the_next_probe_follows_when_the_service_says() -> None:
    keeper = OutageStore()
    outages = [Outage(each, 0) for each in "abababab"]
    await keeper.report({"tool a": Sums(outages=outages, next_try_s=30.0), "tool b": Sums(outages=outages)})
    now = asyncio.get_running_loop().time()
    waits = [keeper._of(f"tool {name}").breaker.next_probe_s(now) for name in "ab"]
    assert 29 < waits[0] <= 30
    assert waits[1] <= 1


@pytest.mark.parametrize(
    ("number", "cause"), [(socket.EAI_NONAME, "model"), (socket.EAI_AGAIN, "outage"), (None, "outage")]
)
def test_a_real_client_wraps_what_says_it(number: int | None, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> Any:
        raise ConnectionRefusedError if number is None else socket.gaierror(number, "no address")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError) as caught:
        client.get("http://search.invalid/")
    assert cause_of(caught.value, "model") == cause


async def test_a_program_that_does_not_read_its_input_is_no_outage() -> None:
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", "import os; os._exit(0)", stdin=-1)
    assert program.stdin is not None
    await program.wait()
    caught: list[Exception] = []
    for _ in range(3):
        try:
            program.stdin.write(b"x" * 2_000_000)
            await program.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            caught.append(error)
    assert caught
    assert {cause_of(each, "outage") for each in caught} == {"bug"}


@pytest.mark.parametrize("timeouts", ["model", "outage"])
@pytest.mark.parametrize(
    "error",
    [
        TimedOutError(),
        TimeoutError(),
        LateError("late"),
        httpx.ReadTimeout("late"),
        _named("requests.exceptions", "ReadTimeout", base=_class("requests.exceptions", "Timeout")),
        _named("requests.exceptions", "ConnectionError", _named("urllib3.exceptions", "TimeoutError")),
        _named("urllib3.exceptions", "ReadTimeoutError", base=_class("urllib3.exceptions", "TimeoutError")),
        _named("openai", "APITimeoutError", base=_class("openai", "APIConnectionError")),
        urllib.error.URLError(TimeoutError()),
    ],
)
def test_what_comes_too_late_is_whose_the_limits_say(error: Exception, timeouts: Timeouts) -> None:
    assert cause_of(error, timeouts) == timeouts


def test_classes_that_the_entry_names_are_outages() -> None:
    made = type("Made", (), {"outage_limits": OutageLimits(timeouts="outage")})()
    limits = set_limits(made, {"outage": {"mode": "mask", "errors": ["json.JSONDecodeError"]}}, CallLimits, "x")
    rules = outage_rules(made, limits, "tool 'x'")
    assert (rules.mode, rules.timeouts) == ("mask", "outage")
    import json

    assert cause_of(json.JSONDecodeError("", "", 0), "model", rules.errors) == "outage"
    for wrong in ("json.loads", "nowhere.Error", "json.JSONDecoder"):
        with pytest.raises(ConfigError, match=wrong.rpartition(".")[0]):
            set_limits(made, {"outage": {"errors": [wrong]}}, CallLimits, "x")
    for wide in ("builtins.ValueError", "builtins.Exception"):
        with pytest.raises(ConfigError, match=f"'{wide}' takes in the model's own mistakes"):
            set_limits(made, {"outage": {"errors": [wide]}}, CallLimits, "x")
    made.outage_limits = {"mode": "off"}
    with pytest.raises(ConfigError, match="give OutageLimits"):
        outage_rules(made, CallLimits(), "tool 'x'")


def test_an_agent_says_it_by_its_error_or_its_status() -> None:
    said = [OutageError("x"), SystemExit(75), 75, UnjudgedError("x"), SystemExit(69), 69]
    assert [agents_cause(each) for each in said] == ["outage"] * 3 + ["unjudged"] * 3
    nothing = [SystemExit(1), SystemExit("69"), SystemExit(None), 0, -9, ConnectionError("our own endpoint")]
    assert [agents_cause(each) for each in nothing] == [None] * 6


class Service:
    """A service that is up or down, and the calls that it got."""

    def __init__(self) -> None:
        self.is_up = True
        self.hangs = False
        self.got: Counter[str] = Counter()

    async def answer(self, conversation: str) -> str:
        self.got[conversation] += 1
        if self.hangs:
            async with asyncio.timeout(20):
                await asyncio.Event().wait()
        if not self.is_up:
            raise ConnectionRefusedError("down")
        return "fine"


def process(keeper: OutageStore | None = None, **settings: Any) -> Watch:
    """Return the watch of a process, over a service whose lateness is an outage."""
    skip_waits()
    connect = None if keeper is None else lambda: keeper
    watch = Outages(OutageSettings(**settings), connect).of(NAME, OutageLimits(timeouts="outage"), 100)
    assert watch is not None
    return watch


async def call(watch: Watch, conversation: str, answer: Callable[[str], Awaitable[str]], repeat: bool = False) -> str:
    """Call the service as a session does; return the conversation's fate."""
    watched = GuardedCall(watch, conversation, "repeatable" if repeat else "call")
    while True:
        try:
            async with watched:
                await watched.wait()
                return await answer(conversation)
        except OutageEndError:
            return "waited too long"
        except Exception as error:
            if not watched.again:
                return "ends" if watched.ends else f"told: {error}"


async def break_it(watch: Watch, service: Service) -> None:
    """Let eight calls of as many conversations meet an outage, so that the breaker opens."""
    service.is_up = False
    said = [await call(watch, f"first {each}", service.answer) for each in range(8)]
    assert said == ["told: down"] * 7 + ["ends"]
    assert watch.is_open


async def test_a_run_waits_for_the_end_of_an_outage_and_goes_on() -> None:
    service, watch = Service(), process()
    loop = asyncio.get_running_loop()
    await break_it(watch, service)

    waiting = [asyncio.create_task(call(watch, f"c{each}", service.answer, repeat=True)) for each in range(50)]
    await asyncio.sleep(60)
    assert sum(service.got.values()) <= 8 + 14  # probes after 1, 2, 4 and then every 5 s
    states = await watch.outages.ask(lambda keeper: keeper.outages())  # type: ignore[attr-defined]
    assert (states[NAME].is_open, states[NAME].trips, states[NAME].waiting) == (True, 1, 50)
    assert states[NAME].error == "ConnectionRefusedError: down"

    service.is_up, back = True, loop.time()
    assert await asyncio.gather(*waiting) == ["fine"] * 50
    assert loop.time() - back <= 5.1
    assert not watch.is_open


async def test_an_outage_that_shows_after_probes_were_told_good_lasts() -> None:
    service, watch = Service(), process()
    loop = asyncio.get_running_loop()
    await break_it(watch, service)

    async def session(name: str) -> None:
        watched = GuardedCall(watch, name)
        await watched.wait()
        loop.call_later(30, watched.answered)  # as the endpoint of agents does
        await asyncio.sleep(50)
        await watched.failed(OutageError("late"))

    sessions = [asyncio.create_task(session(f"s{each}")) for each in range(60)]
    await asyncio.sleep(1_000)
    state = (await (await watch.outages.ask(_itself)).outages())[NAME]
    assert (state.is_open, state.trips) == (True, 1)
    assert state.lasting_s >= 1_000
    for each in sessions:
        each.cancel()
    await asyncio.wait(sessions)


async def test_all_whose_outage_belongs_to_the_evidence_are_judged() -> None:
    service, watch = Service(), process()
    await call(watch, "before", service.answer)
    await asyncio.sleep(400)
    await break_it(watch, service)
    keeper = await watch.outages.ask(_itself)
    first = [f"first {each}" for each in range(8)]
    assert await keeper.touched(["before", *first, "other"]) == set(first)
    assert all(watch.outages.is_judged(each) for each in first)


async def _itself(keeper: Any) -> OutageStore:
    assert isinstance(keeper, OutageStore)
    return keeper


async def test_the_last_calls_of_a_step_are_touched_until_one_is_answered() -> None:
    service, watch = Service(), process()
    await call(watch, "well", service.answer)
    service.is_up = False
    assert await call(watch, "a", service.answer) == "told: down"
    keeper = await watch.outages.ask(_itself)
    assert await keeper.touched(["a"]) == set()  # a single late call is none
    await call(watch, "b", service.answer)
    assert await keeper.touched(["a", "b", "well"]) == {"a", "b"}
    service.is_up = True
    await call(watch, "c", service.answer)
    await asyncio.sleep(2 * REPORT_S)
    assert await keeper.touched(["a", "b", "c"]) == set()


async def test_two_processes_that_report_at_once_open_it_once_and_both_know() -> None:
    service, keeper = Service(), OutageStore()
    one, two = process(keeper), process(keeper)
    service.is_up = False
    said = await asyncio.gather(
        *(call(watch, f"{index} {each}", service.answer) for each in range(4) for index, watch in enumerate((one, two)))
    )
    assert set(said) == {"told: down", "ends"}
    await asyncio.sleep(0.01)
    assert (one.is_open, two.is_open) == (True, True)
    assert (await keeper.outages())[NAME].trips == 1
    assert await keeper.touched([f"{index} {each}" for each in range(4) for index in range(2)]) == {
        f"{index} {each}" for each in range(4) for index in range(2)
    }
    # A process that made no call knows, too, and so do conversations there: they wait before their first token.
    three = process(keeper)
    await three.admit()
    await asyncio.sleep(0.01)
    assert three.is_open


async def test_processes_take_turns_with_probes() -> None:
    service, keeper = Service(), OutageStore()
    one, two = process(keeper), process(keeper)
    await break_it(one, service)
    await two.admit()
    await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(call(watch, name, service.answer)) for watch, name in ((one, "x"), (two, "y"))]
    await asyncio.sleep(1.5)
    assert await waiting[0] == "ends"  # its probe failed, and the call may not be made twice
    service.is_up = True
    await asyncio.sleep(2)
    assert await waiting[1] == "fine"
    assert two.is_open  # one good probe is not enough
    assert [await call(two, each, service.answer) for each in "pqr"] == ["fine"] * 3
    assert not two.is_open
    await asyncio.sleep(0.01)
    assert not one.is_open


async def test_new_conversations_wait_and_one_comes_in_where_no_call_waits() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    began: list[int] = []

    async def conversation(number: int) -> str:
        await watch.admit()
        began.append(number)
        await asyncio.sleep(0.2)  # it samples its first turn
        return await call(watch, f"c{number}", service.answer, repeat=True)

    waiting = [asyncio.create_task(conversation(each)) for each in range(20)]
    await asyncio.sleep(0.9)
    assert began == []
    await asyncio.sleep(0.5)
    assert began == [0]
    await asyncio.sleep(50)
    assert began == list(range(6))  # one after each probe: that the calls before it fail may be their own doing
    assert 9 <= sum(service.got.values()) - 8 <= 14
    service.is_up = True
    assert await asyncio.gather(*waiting) == ["fine"] * 20


async def test_a_probe_that_hangs_lets_the_others_wait_and_no_longer() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    service.hangs = True
    hanging = asyncio.create_task(call(watch, "hangs", service.answer))
    other = asyncio.create_task(call(watch, "other", service.answer))
    await asyncio.sleep(15)
    assert service.got["hangs"] == 1
    assert service.got["other"] == 0
    assert await hanging == "ends"  # its own deadline is an outage
    service.hangs, service.is_up = False, True
    assert await other == "fine"


async def test_a_probe_whose_process_has_died_counts_as_failed_when_its_lease_is_over() -> None:
    service, keeper = Service(), OutageStore()
    await break_it(process(keeper), service)
    assert (await keeper.enter(NAME, "of a dead process", "call", 100)).why == "probe"
    next_one = asyncio.create_task(keeper.enter(NAME, "next", "call", 100))
    await asyncio.sleep(99)
    assert not next_one.done()
    assert (await next_one).why == "probe"


async def test_a_probe_that_is_late_by_what_the_model_wrote_says_nothing() -> None:
    skip_waits()
    service, watch = Service(), Outages().of(NAME, OutageLimits(timeouts="model"), 100)
    assert watch is not None
    await break_it(watch, service)
    service.is_up = True

    async def late(_: str) -> str:
        raise TimedOutError

    assert await asyncio.gather(*(call(watch, each, late) for each in "abcde")) == ["told: "] * 5
    assert watch.is_open
    assert await asyncio.gather(*(call(watch, each, service.answer) for each in "abc")) == ["fine"] * 3
    assert not watch.is_open


async def test_waiting_is_bounded_by_stop_s() -> None:
    service, watch = Service(), process(stop_s=50)
    await break_it(watch, service)
    began = asyncio.get_running_loop().time()
    waiting = [asyncio.create_task(call(watch, each, service.answer, repeat=True)) for each in "abc"]
    assert await asyncio.gather(*waiting) == ["waited too long"] * 3
    assert asyncio.get_running_loop().time() - began == pytest.approx(50)
    keeper = await watch.outages.ask(_itself)
    await asyncio.sleep(0)
    assert (await keeper.outages())[NAME].waiting == 0


async def test_a_cancelled_call_leaves_neither_a_place_nor_a_probe_behind() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    service.hangs = True
    waiting = {each: asyncio.create_task(call(watch, each, service.answer)) for each in "abc"}
    await asyncio.sleep(1.5)
    assert service.got["a"] == 1  # the probe
    service.hangs, service.is_up = False, True
    waiting["a"].cancel()
    waiting["b"].cancel()
    await asyncio.wait([waiting["a"], waiting["b"]])
    began = asyncio.get_running_loop().time()
    assert await waiting["c"] == "fine"  # at once, and not after the lease
    assert asyncio.get_running_loop().time() - began < 0.1
    assert service.got["b"] == 0
    keeper = await watch.outages.ask(_itself)
    assert (await keeper.outages())[NAME].waiting == 0


async def test_flapping_every_five_seconds_leaves_no_conversation_behind_untold() -> None:
    service, watch = Service(), process()
    shown: list[str] = []

    async def conversation(number: int) -> None:
        for _ in range(20):
            await asyncio.sleep(0.5)
            said = await call(watch, f"c{number}", service.answer, repeat=True)
            if said == "ends":
                return
            if said.startswith("told"):
                shown.append(f"c{number}")

    running = [asyncio.create_task(conversation(each)) for each in range(64)]
    while not all(each.done() for each in running):
        service.is_up = not service.is_up
        await asyncio.sleep(5)
    keeper = await watch.outages.ask(_itself)
    assert (await keeper.outages())[NAME].trips >= 1
    assert await keeper.touched(shown) == set(shown)


class Mortal:
    """Reaches a keeper that can die, as an actor can."""

    def __init__(self, make: Callable[[], OutageStore]) -> None:
        self._make = make
        self.keeper = make()
        self.is_reachable = True
        self._pending: set[asyncio.Future[Any]] = set()

    def connect(self) -> Any:
        if not self.is_reachable:
            raise StoreLostError("no keeper")
        return self

    def die(self) -> None:
        self.keeper = self._make()
        for pending in self._pending:
            pending.cancel()

    def __getattr__(self, method: str) -> Any:
        async def ask(*args: Any) -> Any:
            if not self.is_reachable:
                raise StoreLostError("no keeper")
            asked = asyncio.ensure_future(getattr(self.keeper, method)(*args))
            self._pending.add(asked)
            try:
                await asyncio.wait({asked})
                if asked.cancelled():
                    raise StoreLostError("it died")
                return asked.result()
            finally:
                self._pending.discard(asked)
                asked.cancel()

        return ask


async def test_a_new_keeper_is_told_what_the_old_one_knew() -> None:
    skip_waits()
    service, mortal = Service(), Mortal(OutageStore)
    watch = Outages(OutageSettings(), mortal.connect).of(NAME, OutageLimits(), 100)
    assert watch is not None
    await break_it(watch, service)
    waiting = [asyncio.create_task(call(watch, f"c{each}", service.answer, repeat=True)) for each in range(5)]
    await asyncio.sleep(10)
    mortal.is_reachable = False
    mortal.die()
    await asyncio.sleep(20)
    assert not any(each.done() for each in waiting)
    mortal.is_reachable = True
    await asyncio.sleep(10)
    state = (await mortal.keeper.outages())[NAME]
    assert (state.is_open, state.waiting) == (True, 5)
    assert state.open_s == state.lasting_s == pytest.approx(40)
    assert await mortal.keeper.touched(["first 0", "first 7", "c0"]) == {"first 0", "first 7"}
    service.is_up = True
    assert await asyncio.gather(*waiting) == ["fine"] * 5
    assert not watch.is_open


async def test_a_keeper_that_cannot_be_reached_ends_conversations_that_meet_an_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def connect() -> Any:
        raise StoreLostError("no actor")

    skip_waits()
    service = Service()
    watch = Outages(OutageSettings(), connect).of(NAME, OutageLimits(), 100)
    assert watch is not None
    assert await call(watch, "a", service.answer) == "fine"
    service.is_up = False
    assert await call(watch, "a", service.answer) == "ends"  # an outage cannot be ruled out
    assert "cannot be reached" in caplog.text


async def test_healthy_calls_are_reported_in_sums() -> None:
    class Counting(OutageStore):
        reports = 0

        async def report(self, sums: Any, process: str = "") -> Any:
            self.reports += 1
            return await super().report(sums, process)

    service, keeper = Service(), Counting()
    watch = process(keeper)
    for each in range(1_000):
        await call(watch, f"c{each}", service.answer)
    await asyncio.sleep(2 * REPORT_S)
    assert keeper.reports == 1
    assert (await keeper.outages())[NAME].calls == 1_000


async def test_in_mode_mask_each_conversation_ends_and_nothing_waits() -> None:
    service, watch = Service(), process(mode="mask")
    service.is_up = False
    assert [await call(watch, f"c{each}", service.answer) for each in range(20)] == ["ends"] * 20
    assert not watch.is_open
    await asyncio.sleep(2 * REPORT_S)
    keeper = await watch.outages.ask(_itself)
    state = (await keeper.outages())[NAME]
    assert (state.outages, state.is_open, state.trips) == (20, False, 0)


async def test_in_mode_off_nobody_asks() -> None:
    outages = Outages(OutageSettings(mode="off"))
    assert outages.of(NAME, OutageLimits(), 1) is None
    assert outages.of(NAME, OutageLimits(mode="pause"), 1) is not None
    assert Outages().of(NAME, OutageLimits(mode="off"), 1) is None


async def test_mistakes_of_the_model_and_bugs_open_nothing_and_a_bug_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = process()

    async def wrong(_: str) -> str:
        raise ValueError("no such thing")

    async def broken(_: str) -> str:
        return {}["results"]  # type: ignore[no-any-return]

    for each in range(50):
        assert await call(watch, f"c{each}", wrong) == "told: no such thing"
        assert await call(watch, f"c{each}", broken) == "told: 'results'"
    await asyncio.sleep(2 * REPORT_S)
    keeper = await watch.outages.ask(_itself)
    state = (await keeper.outages())[NAME]
    assert (state.calls, state.bugs, state.outages, state.trips) == (50, 50, 0, 0)  # a bug is not an answer either
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "KeyError" in told[0].getMessage()


async def test_what_says_nothing_of_the_service_hides_no_outage() -> None:
    watch, service = process(), Service()

    async def broken(_: str) -> str:
        raise KeyError("results")

    async def busy(_: str) -> str:
        raise BusyError("no slot")

    service.is_up = False
    for each in range(7):
        assert await call(watch, f"c{each}", service.answer) == "told: down"
        for other in (broken, busy):
            for again in range(3):
                assert (await call(watch, f"{each} {again}", other)).startswith("told")
    assert await call(watch, "last", service.answer) == "ends"  # the eighth of eight that count

    waiting = [asyncio.create_task(call(watch, each.__name__, each)) for each in (broken, busy)]
    assert [(await each)[:4] for each in waiting] == ["told", "told"]
    assert watch.is_open
    service.is_up = True
    assert [await call(watch, each, service.answer) for each in "ab"] == ["fine"] * 2
    await asyncio.sleep(0.01)
    assert watch.is_open  # neither of the two others was a good probe
    assert await call(watch, "c", service.answer) == "fine"
    await asyncio.sleep(0.01)
    assert not watch.is_open


async def test_our_own_limit_on_calls_is_no_outage() -> None:
    watch = process()

    async def busy(_: str) -> str:
        raise BusyError("no slot")

    assert {await call(watch, f"c{each}", busy) for each in range(50)} == {"told: no slot"}
    await asyncio.sleep(2 * REPORT_S)
    keeper = await watch.outages.ask(_itself)
    assert NAME not in await keeper.outages()


async def test_a_mistake_of_the_row_is_no_outage_where_each_failure_is_one() -> None:
    async def begin(error: Exception) -> GuardedCall:
        watched = GuardedCall(process(), "a", "create")
        with pytest.raises(type(error)):
            async with watched:
                raise error
        return watched

    assert (await begin(KeyError("host"))).met
    assert (await begin(TimedOutError())).met
    assert not (await begin(ValueError("no such file"))).met
    assert not (await begin(ConfigError("no such database"))).met


async def test_a_broken_contract_is_raised_and_says_nothing() -> None:
    watch = process()

    async def wrong(_: str) -> str:
        raise ToolContractError("a wrong type")

    watched = GuardedCall(watch, "a")
    with pytest.raises(ToolContractError):
        async with watched:
            await wrong("a")
    assert not watched.met
    assert not watch.is_due


async def test_calls_that_hung_since_before_the_outage_do_not_open_it_again() -> None:
    service, watch = Service(), process()
    release = asyncio.Event()

    async def hangs(_: str) -> str:
        await release.wait()
        raise ConnectionResetError("at last")

    old = [asyncio.create_task(call(watch, f"old {each}", hangs)) for each in range(20)]
    await asyncio.sleep(31)  # calls that hang for longer than the window delay nothing
    await break_it(watch, service)
    service.is_up = True
    assert await asyncio.gather(*(call(watch, f"c{each}", service.answer) for each in range(5))) == ["fine"] * 5
    release.set()
    assert await asyncio.gather(*old) == ["ends"] * 20  # they began before it, so they belong to it
    assert not watch.is_open


async def test_a_busy_loop_does_not_shorten_the_wait() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    waiting = asyncio.create_task(call(watch, "a", service.answer, repeat=True))
    await asyncio.sleep(0)
    hold_up(30)
    service.is_up = True
    assert await waiting == "fine"


async def state_of(watch: Watch, name: str = NAME) -> OutageState:
    keeper = await watch.outages.ask(_itself)
    return (await keeper.outages())[name]


async def test_an_open_breaker_that_nobody_asks_lasts_no_longer() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    assert (await state_of(watch)).lasting_s == 0
    await asyncio.sleep(50)
    assert (await state_of(watch)).lasting_s == pytest.approx(50)
    await asyncio.sleep(1_800)
    state = await state_of(watch)
    assert (state.open_s, state.lasting_s) == (pytest.approx(1_850), 0)
    waiting = asyncio.create_task(call(watch, "a", service.answer, repeat=True))
    await asyncio.sleep(70)
    assert (await state_of(watch)).lasting_s == pytest.approx(70)
    waiting.cancel()
    await asyncio.sleep(30)
    assert (await state_of(watch)).lasting_s == pytest.approx(100)
    await asyncio.sleep(31)
    assert (await state_of(watch)).lasting_s == 0


async def test_a_row_that_no_tool_can_begin_with_is_no_outage() -> None:
    class Sql(BaseTool):
        def get_schema(self) -> ToolSchema:
            function = {"name": "sql", "description": "x", "parameters": {"type": "object", "properties": {}}}
            return ToolSchema.read({"type": "function", "function": function}, "sql")

        async def create(self, instance_id: str, db: str = "", **kwargs: Any) -> None:
            if db == "missing":
                raise ConfigError("no such database")
            if db == "down":
                raise RuntimeError("no answer")

    skip_waits()
    outages = Outages()
    gates, sql = Gates(Gate, 60.0, outages=outages), Sql({})

    async def begins(number: int, db: str) -> None:
        async with ToolSession(f"c{number}", {"sql": sql}, {"sql": {"create_kwargs": {"db": db}}}, gates, 4):
            await asyncio.sleep(1)

    for number in range(20):
        await begins(number, "missing" if number < 10 else "well")
    states = await (await outages.ask(_itself)).outages()
    name = "tool sql create"
    assert (states[name].calls, states[name].outages, states[name].is_open) == (20, 0, False)
    await asyncio.gather(*(begins(number, "down") for number in range(8)), return_exceptions=True)
    assert (await (await outages.ask(_itself)).outages())[name].is_open


@pytest.mark.parametrize("probes", [False, True])
async def test_calls_of_a_process_that_died_are_no_probes(probes: bool) -> None:
    skip_waits()
    keeper = OutageStore()
    await keeper.report({NAME: Sums(outages=[Outage(f"c{each}", 0) for each in range(8)])})
    # An actor goes on with a dead worker's requests.
    dead = [asyncio.create_task(keeper.enter(NAME, f"dead{each}", "call", 240, "dead")) for each in range(8)]
    if probes:
        await asyncio.sleep(2)
        assert dead[0].done()
    watch, service = process(keeper), Service()
    began = asyncio.get_running_loop().time()
    await watch.admit()
    waiting = [asyncio.create_task(call(watch, each, service.answer)) for each in "abc"]
    await asyncio.sleep(0)
    assert await asyncio.gather(*waiting) == ["fine"] * 3
    assert asyncio.get_running_loop().time() - began <= 20
    assert not watch.is_open
    assert not (await keeper.outages())[NAME].waiting


async def test_a_process_that_was_only_busy_enters_again() -> None:
    service, keeper = Service(), OutageStore()
    watch = process(keeper)
    await break_it(watch, service)
    waiting = [asyncio.create_task(call(watch, f"c{each}", service.answer, repeat=True)) for each in range(5)]
    await asyncio.sleep(3)
    for _ in range(3):
        hold_up(20)  # longer than a process may be silent
        await asyncio.sleep(7)
    assert (await keeper.outages())[NAME].waiting == 5
    service.is_up = True
    assert await asyncio.gather(*waiting) == ["fine"] * 5


async def test_one_call_that_the_service_never_answers_keeps_nobody_waiting() -> None:
    service, watch = Service(), process()

    async def poison(_: str) -> str:
        raise OutageError("429")

    bad = [asyncio.create_task(call(watch, "ab"[each % 2], poison, repeat=True)) for each in range(8)]
    await asyncio.sleep(0.01)
    assert watch.is_open
    bad = [asyncio.create_task(call(watch, each, poison, repeat=True)) for each in "ab"]
    await asyncio.sleep(20)

    async def conversation(number: int) -> str:
        await watch.admit()
        await asyncio.sleep(3)
        return await call(watch, f"c{number}", service.answer, repeat=True)

    began = asyncio.get_running_loop().time()
    assert await asyncio.gather(*(conversation(each) for each in range(30))) == ["fine"] * 30
    assert asyncio.get_running_loop().time() - began < 60
    assert await asyncio.gather(*bad) in (["told: 429"] * 2, ["ends"] * 2)


async def test_calls_that_alone_are_never_answered_end_their_conversations() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    began = asyncio.get_running_loop().time()
    waiting = [asyncio.create_task(call(watch, each, service.answer, repeat=True)) for each in "ab"]
    assert await asyncio.gather(*waiting) == ["ends"] * 2
    assert 600 < asyncio.get_running_loop().time() - began < 660


async def test_where_few_conversations_call_it_more_and_more_come_in() -> None:
    service, watch = Service(), process()
    await break_it(watch, service)
    service.is_up = True
    began = asyncio.get_running_loop().time()

    async def conversation(number: int) -> None:
        await watch.admit()
        await asyncio.sleep(3)
        if number % 50 == 49:
            await call(watch, f"c{number}", service.answer)

    await asyncio.gather(*(conversation(each) for each in range(512)))
    assert not watch.is_open
    assert asyncio.get_running_loop().time() - began < 60


async def test_changes_are_told_the_oldest_first() -> None:
    skip_waits()
    keeper = OutageStore()
    await keeper.report({NAME: Sums(outages=[Outage(f"c{each}", 0) for each in range(8)])})
    await keeper.report({NAME: Sums(outages=[Outage("late", 0)])})
    told = await keeper.changes("", 0)
    assert told.judged == (*(f"c{each}" for each in range(8)), "late")


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
async def test_failures_that_come_before_the_answers_open_nothing(processes: int, share: float) -> None:
    keeper, chance = OutageStore(), random.Random(processes)
    watches = [process(keeper) for _ in range(processes)]

    async def answer(_: str) -> str:
        if chance.random() < share:
            await asyncio.sleep(0.01)
            raise ConnectionRefusedError("busy")
        await asyncio.sleep(chance.uniform(0.5, 2))
        return "fine"

    async def conversation(number: int) -> None:
        for _ in range(4):
            assert await call(watches[number % processes], f"c{number}", answer) in ("fine", "told: busy")
            await asyncio.sleep(chance.uniform(0, 3))

    await asyncio.gather(*(conversation(each) for each in range(128)))
    state = (await keeper.outages())[NAME]
    assert (state.calls, state.trips) == (512, 0)
    assert state.outages > 8


@pytest.mark.parametrize("after_s", [0.01, 60.0])
async def test_where_all_of_a_burst_fail_it_opens_at_once(after_s: float) -> None:
    keeper = OutageStore()
    watches = [process(keeper) for _ in range(8)]

    async def answer(_: str) -> str:
        await asyncio.sleep(after_s)
        raise ConnectionRefusedError("down")

    said = await asyncio.gather(*(call(watches[each % 8], f"c{each}", answer) for each in range(128)))
    assert asyncio.get_running_loop().time() <= after_s + 1
    assert "ends" in said
    assert (await keeper.outages())[NAME].trips == 1
    assert len(await keeper.touched([f"c{each}" for each in range(128)])) == 128


async def test_a_call_that_its_conversations_time_cut_off_is_judged_with_the_outage() -> None:
    service, watch = Service(), process()
    service.hangs = True
    watched = GuardedCall(watch, "cut")

    async def hangs() -> None:
        async with watched:
            await watched.wait()
            await service.answer("cut")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hangs(), 10)
    assert watched.met
    keeper = await watch.outages.ask(_itself)
    assert await keeper.touched(["cut"]) == set()
    service.hangs = False
    await break_it(watch, service)
    assert await keeper.touched(["cut"]) == {"cut"}


async def test_calls_that_are_cut_off_open_nothing() -> None:
    service, watch = Service(), process()
    service.hangs = True
    cut = [asyncio.create_task(call(watch, f"c{each}", service.answer)) for each in range(50)]
    await asyncio.sleep(10)
    for each in cut:
        each.cancel()
    await asyncio.wait(cut)
    assert not watch.is_open
    assert not watch.running


class Search(BaseTool):
    """A search whose service may be down, and answers that slowly."""

    down = True
    seconds = 0.0

    def get_schema(self) -> ToolSchema:
        function = {"name": "search", "description": "x", "parameters": {"type": "object", "properties": {}}}
        return ToolSchema.read({"type": "function", "function": function}, "search")

    async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> str:
        await asyncio.sleep(self.seconds)
        if self.down:
            raise ConnectionRefusedError("down")
        return "fine"


async def test_a_call_that_got_no_slot_is_no_answer() -> None:
    skip_waits()
    search = Search({})
    search.seconds = 5.0
    search.multiturn_limits = ToolLimits(concurrency=1, queue_timeout_s=1.0)
    gates = Gates(Gate, 60.0, outages=Outages())
    async with ToolSession("c", {"search": search}, {}, gates, 4) as session:
        results = await session.execute([ToolCall("search", "{}", "0"), ToolCall("search", "{}", "1")])
        assert [str(result.status) for result in results] == ["error", "overloaded"]
        assert session.shut_out == "tool search: each of its calls met an outage, or got no slot"
        search.down = False
        await session.execute([ToolCall("search", "{}", "2")])
        assert session.shut_out == ""


async def test_a_conversation_that_met_nothing_but_outages_is_lost() -> None:
    search = Search({})
    gates = Gates(Gate, 60.0, outages=Outages())
    lost = []
    for downs in ([True], [True, True], [True, True, False]):
        async with ToolSession(f"c{downs}", {"search": search}, {}, gates, 4) as session:
            for search.down in downs:
                await session.execute([ToolCall("search", "{}", "0")])
            assert session.lost == ""
            await session.calc_rewards()
            lost.append(session.lost)
    assert lost == ["", "tool search: each of its calls met an outage", ""]


def test_each_loop_has_one_poll() -> None:
    keeper = OutageStore()
    outages = Outages(OutageSettings(), lambda: keeper)
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def begin() -> int:
        outages.begin()
        return sum(task.get_name() == "outages" for task in asyncio.all_tasks())

    try:
        assert [loop.run_until_complete(begin()) for _ in range(3) for loop in loops] == [1] * 6
    finally:
        for loop in loops:
            for task in asyncio.all_tasks(loop):
                task.cancel()
                loop.run_until_complete(asyncio.wait([task]))
            loop.close()
