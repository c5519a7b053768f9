"""Conversations whose tools fail by the model's text, and by a service's answers."""

from __future__ import annotations

import asyncio
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.faults.answering import Answering, answering
from tests.idle_loop import skip_waits
from verl_multiturn import BaseTool, ConfigError, OutageError
from verl_multiturn.calls.limits import CallLimits, OutageLimits, outage_rules, set_limits
from verl_multiturn.calls.outages.authorship import WrittenTexts
from verl_multiturn.calls.outages.causes import cause_of, next_try_s
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.checking.addresses import address_parameters
from verl_multiturn.checking.tool_contract import Grade, check_tool
from verl_multiturn.rewards.router import compute_score
from verl_multiturn.rewards.score import Score
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.session import ToolSession

URL = {"type": "string", "description": "An address."}


def _schema(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


class Visit(BaseTool):
    """Opens the model's addresses: at once, or those of an earlier call."""

    def get_schema(self) -> dict[str, Any]:
        return _schema("visit", url=URL, again={"type": "boolean", "description": "Open the last one."})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
        self.last = parameters.get("url") or self.last
        if self.last == "own":
            raise OutageError("the browser is away")

        def read(url: str = self.last) -> str:
            try:
                with urllib.request.urlopen(url) as answer:
                    return str(json.load(answer))
            except urllib.error.HTTPError as error:
                error.close()
                raise

        return await asyncio.to_thread(read)


class Ask(BaseTool):
    """Asks a service of a configured address, which answers well, or so that its client raises an error."""

    error: BaseException | None = None

    def get_schema(self) -> dict[str, Any]:
        return _schema("ask", query={"type": "string", "description": "What to find."})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
        if self.error is not None:
            raise self.error
        return "fine"


@pytest.fixture(scope="module")
def server() -> Iterator[Answering]:
    with answering() as running:
        yield running


def _error_of(url: str) -> BaseException:
    with pytest.raises((httpx.HTTPError, ValueError)) as caught:
        httpx.get(url, trust_env=False).json()
    return caught.value


async def _state(outages: Outages, name: str) -> Any:
    keeper = await outages.ask(_itself)
    return (await keeper.outages()).get(name)


async def _itself(keeper: Any) -> Any:
    return keeper


@pytest.mark.parametrize("limits", [{}, {"addresses": "model"}])
@pytest.mark.parametrize("way", ["refused", "html", "502", "nothing", "no_tls", "elsewhere", "empty"])
async def test_addresses_of_the_model_open_no_breaker_and_call_nothing_off(
    server: Answering, way: str, limits: dict[str, str]
) -> None:
    visit, outages = Visit({}), Outages()
    visit.multiturn_limits = ToolLimits(outage=OutageLimits.model_validate(limits))  # type: ignore[attr-defined]
    gates = Gates(Gate, 60.0, outages=outages)
    for number in range(6):
        async with ToolSession(f"c{number}", {"visit": visit}, {}, gates, 4) as session:
            first = json.dumps({"url": server.url(way)})
            for turn, arguments in enumerate((first, '{"again": true}', first)):
                (result,) = await session.execute([ToolCall("visit", arguments, str(turn))])
                assert str(result.status) == "error"
            await session.calc_rewards()
            assert (session.lost, session.outages) == ("", {})
    state = await _state(outages, "tool visit")
    assert state is None or (state.outages, state.is_open, state.trips) == (0, False, 0)


async def test_an_own_service_of_such_a_tool_is_an_outage_all_the_same() -> None:
    visit, outages = Visit({}), Outages()
    visit.multiturn_limits = ToolLimits(outage=OutageLimits(addresses="model"))  # type: ignore[attr-defined]
    gates = Gates(Gate, 60.0, outages=outages)
    for number in range(8):
        async with ToolSession(f"c{number}", {"visit": visit}, {}, gates, 4) as session:
            await session.execute([ToolCall("visit", '{"url": "own"}', "0")])
    assert (await _state(outages, "tool visit")).is_open


@pytest.mark.parametrize("way", ["html", "empty", "half", "no_utf8", "no_gzip", "short", "half_chunk", "no_http"])
async def test_a_service_that_answers_garbage_is_an_outage_and_nothing_is_trained_behind_it(
    server: Answering, way: str
) -> None:
    garbage = _error_of(server.url(way))
    skip_waits()  # from here on nothing real may be waited for
    ask, outages = Ask({}), Outages()
    gates = Gates(Gate, 60.0, outages=outages)
    behind: list[str] = []

    async def converse(number: int) -> None:
        name = f"c{number}"
        async with ToolSession(name, {"ask": ask}, {}, gates, 4) as session:
            (result,) = await session.execute([ToolCall("ask", '{"query": "tea"}', "0")])
            if str(result.status) != "ok" and not session.lost:
                behind.append(name)

    for number in range(20):
        await converse(number)
    ask.error = garbage
    for number in range(20, 28):
        await converse(number)
    assert (await _state(outages, "tool ask")).is_open
    waiting = [asyncio.create_task(converse(number)) for number in range(28, 40)]
    await asyncio.sleep(30)
    ask.error = None
    await asyncio.gather(*waiting)
    state = await _state(outages, "tool ask")
    assert (state.is_open, state.trips) == (False, 1)
    keeper = await outages.ask(_itself)
    assert set(behind) <= await keeper.touched([f"c{number}" for number in range(40)])


def test_lateness_of_an_address_that_the_model_chose_is_no_outage() -> None:
    made = type("Made", (), {"outage_limits": OutageLimits(timeouts="outage")})()
    with pytest.raises(ConfigError, match=r"addresses is 'model' and timeouts is 'outage'.*set timeouts to 'model'"):
        set_limits(made, {"outage": {"addresses": "model", "timeouts": "outage"}}, CallLimits, "tools[0].limits")
    limits = set_limits(made, {"outage": {"addresses": "model"}}, CallLimits, "tools[0].limits")
    with pytest.raises(ConfigError, match=r"tool 'x': limits\.outage: .*set timeouts to 'model'"):
        outage_rules(made, limits, "tool 'x'")
    with pytest.raises(ConfigError, match="addresses"):
        set_limits(made, {"outage": {"addresses": "tool"}}, CallLimits, "tools[0].limits")


def test_parameters_that_may_be_addresses() -> None:
    def text(**more: Any) -> dict[str, Any]:
        return {"type": "string", **more}

    inner = {"type": "object", "properties": {"siteUrl": text(), "n": {"type": "integer"}}}
    properties = {
        "url": text(), "page_uri": text(), "imageURL": text(), "target": text(format="uri"), "hosts": {"type": "array",
        "items": text()}, "link": {"anyOf": [text(), {"type": "null"}]}, "options": inner, "rows": {"type": "array",
        "items": {"type": "object", "properties": {"endpoint": text()}}},
        "query": text(), "blink": text(), "hostility": text(), "links_count": {"type": "integer"},
    }  # fmt: skip
    found = address_parameters({"type": "object", "properties": properties})
    assert found == ["url", "page_uri", "imageURL", "target", "hosts", "link", "siteUrl", "endpoint"]


@pytest.mark.parametrize("addresses", [None, "model", "service"])
def test_check_tool_names_a_parameter_that_may_be_an_address(addresses: Any) -> None:
    visit = Visit({})
    visit.last = "own"
    visit.multiturn_limits = ToolLimits(outage=OutageLimits(addresses=addresses))  # type: ignore[attr-defined]
    found = [each for each in check_tool(visit, arguments={"url": "own"}) if each.check == "addresses"]
    assert bool(found) == (addresses is None)
    for each in found:
        assert each.verdict is Grade.WARNING
        assert "'url' may be an address" in each.found
        assert "{addresses: model}" in each.remedy
        assert "addresses: service" in each.remedy


def test_check_tool_asks_nothing_of_other_tools() -> None:
    assert not [each for each in check_tool(Ask({}), arguments={"query": "x"}) if each.check == "addresses"]


def judged_by_a_service(solution: Any, ground_truth: Any) -> Score:
    """Score as a reward function whose service answers garbage, or which reads the answer itself."""
    json.loads("<html>502 Bad Gateway</html>" if ground_truth == "service" else solution.texts[0])
    return Score(value=1.0)


@pytest.mark.parametrize(("truth", "outage"), [("service", 1.0), ("own", 0.0)])
async def test_garbage_of_a_judge_is_no_verdict_and_that_of_the_model_is_its_own(truth: str, outage: float) -> None:
    route = {"mine": f"{__name__}.judged_by_a_service"}
    score = await compute_score("mine", "so [1, 2", truth, {"assistant_texts": ["so [1, 2"]}, routes=route)
    assert (score["failed"], score["outage"]) == (1.0, outage)


def _of_nobody(error: BaseException, *written: Any) -> str:
    return cause_of(error, "model", (), WrittenTexts(written))


def test_an_error_that_names_no_address_is_the_models_if_an_argument_is_one() -> None:
    """So are those of plain sockets and of other processes, which hold no address."""
    refused = ConnectionRefusedError(111, "Connection refused")
    assert _of_nobody(refused, {"url": "http://127.0.0.1:9/"}) == "model"
    assert _of_nobody(refused, {"q": "what is http://127.0.0.1:9/"}) == "outage"
    assert _of_nobody(refused, {"q": "weather"}) == "outage"


def test_what_cannot_be_examined_says_nothing() -> None:
    """A property that raises has no author."""

    class Odd(ConnectionError):
        @property
        def reason(self) -> object:
            raise RuntimeError("no reason")

        response = status = headers = reason

    assert _of_nobody(Odd("refused"), {"q": "weather"}) == "outage"
    assert next_try_s(Odd("refused")) is None


@pytest.mark.parametrize(
    "room", ["sandbox.sandbox.Sandbox", "workspaces.workspace.WorkspacePool", "verdicts.judge.Judge"]
)
def test_what_a_program_of_the_models_printed_is_the_models(room: str) -> None:
    """Whatever object a tool has that out of: a model could begin an outage by an unreadable output otherwise."""
    module, _, name = f"verl_multiturn.{room}".rpartition(".")
    kind = getattr(importlib.import_module(module), name)

    def read(printed: str) -> Any:
        runs_it = object.__new__(kind)
        return json.loads(printed), runs_it

    with pytest.raises(json.JSONDecodeError) as caught:
        read("Traceback of the model's program")
    assert cause_of(caught.value, "model", (), WrittenTexts(["{}"]), None) == "model"
