"""Opponents: who is drawn, what its server is asked, its outages, and the record."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.agent_sessions import Agent, make_run, said, turns, user
from tests.support.served import served
from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.calls.timeline import Timeline, kept
from verl_multiturn.clients.chat_endpoint import AskAgainError
from verl_multiturn.config import OutageSettings, ProxySettings
from verl_multiturn.errors import OutageError
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.opponents.draw import OpponentName, Opponents, is_address
from verl_multiturn.proxy.opponents.remote_model import RemoteModel, read_completion
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.life import Life, running
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome

ROLES = Roles(("white", "black"), ("white", "black"))
HELLO = [user("x")]


class Models:
    """Servers beside the run, of which none is started."""

    def __init__(self, address: str = "", there: Sequence[OpponentName] = ()) -> None:
        self.served, self.there = address, there
        self.asked: list[OpponentName] = []
        self.unknown = ""
        """Why nobody can say which are there; "": it is known."""

    async def has(self, name: OpponentName, step: int) -> bool:
        if self.unknown:
            raise OutageError(self.unknown)
        return name in self.there and (not isinstance(name, int) or name == 0 or name < step)

    async def address(self, name: OpponentName) -> str:
        self.asked.append(name)
        if not self.served:
            raise OutageError("no server")
        return self.served


@asynccontextmanager
async def server(*answers: Any) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve chat completions: texts, or statuses of errors."""
    left, bodies = list(answers), list[dict[str, Any]]()

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        now = left.pop(0)
        if isinstance(now, int):
            return web.json_response({"error": {"message": "no"}}, status=now)
        message = now if isinstance(now, dict) else {"role": "assistant", "content": now}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})

    async with served(v1__chat__completions=answer) as address:
        yield f"{address}/v1", bodies


def opponents(
    models: Models,
    listed: Sequence[OpponentName] = (4,),
    seed: int = 0,
    watch: Any = None,
    roles: Sequence[str] = ("black",),
    trained: Sequence[str] = ("white", "black"),
    timeout_s: float = 10.0,
) -> Opponents:
    """Return the opponents of some roles."""

    def make(name: OpponentName) -> RemoteModel:
        async def address() -> str:
            return await models.address(name)

        options: dict[str, Any] = {"timeout_s": timeout_s, "connections": 4, "watch": watch}
        return RemoteModel(f"step {name}", address, sampled=("temperature",), setting="proxy.opponents", **options)

    return Opponents(dict.fromkeys(roles, listed), seed, models, make, trained, watch)


def life(step: int = 9, number: int = 0, index: int = 3) -> Life:
    return Life("r", "u", number=number, step=step, row={"index": index})


async def drawn(made: Opponents, *lives: Life) -> list[str | None]:
    found = [await made.draw("black", each) for each in lives]
    return [None if each is None else each.name for each in found]


async def test_the_draw_follows_from_seed_step_row_and_number() -> None:
    lives = [life(number=number) for number in range(40)]
    listed: list[OpponentName] = ["policy", 0, 4]
    one = await drawn(opponents(Models(there=[0, 4]), listed), *lives)
    assert one == await drawn(opponents(Models(there=[0, 4]), listed), *lives)
    assert {*one} == {None, "step 0", "step 4"}
    for other in (
        await drawn(opponents(Models(there=[0, 4]), listed, seed=1), *lives),
        await drawn(opponents(Models(there=[0, 4]), listed), *(life(10, number) for number in range(40))),
        await drawn(opponents(Models(there=[0, 4]), listed), *(life(9, number, 4) for number in range(40))),
    ):
        assert other != one


async def test_a_step_that_is_not_there_yet_does_not_play_and_is_reported_once(caplog: Any) -> None:
    made = opponents(Models(there=[4]), [4, 8])
    assert {*await drawn(made, *(life(9, number) for number in range(20)))} == {"step 4"}
    assert await drawn(made, life(2), life(3)) == [None, None]
    assert [each.getMessage() for each in caplog.records] == [
        "the opponent step 8 is not there in step 9, and does not play yet",
        "the opponent step 4 is not there in step 2, and does not play yet",
    ]


async def test_an_opponent_answers_in_its_role_and_is_in_no_row() -> None:
    async with server("b1", "b2") as (address, bodies):
        models = Models(address, [4])
        run = make_run(turns("w1", "w2"), roles=ROLES, opponents=opponents(models))
        agent = Agent(run)
        agent.session.opponents._life = life()
        assert (await agent.ask(HELLO, model="white")).content == "w1"
        assert (await agent.ask([user("w1")], model="black", max_tokens=5, stop=["!"])).content == "b1"
        assert (await agent.ask([user("w1"), said("b1"), user("w2")], model="black")).content == "b2"
        assert (await agent.ask([*HELLO, said("w1"), user("b1")], model="white")).content == "w2"
        outcome, _ = await agent.close()
        await run.opponents.aclose()  # type: ignore[union-attr]
    assert [turn.role for turn in outcome.turns] == ["white", "white"]
    assert (len(outcome.rows), outcome.places) == (1, [0, 0])
    assert agent.session.opponents.names == {"black": "step 4"}
    assert models.asked == [4]
    assert bodies[0] == {
        "temperature": 1.0,
        "model": "black",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "w1"}],
        "stop": ["!"],
    }
    assert [each["content"] for each in bodies[1]["messages"]] == ["w1", "b1", "w2"]
    requests = agent.session.journal.requests()
    assert [(each.role, each.opponent, each.delivered) for each in requests] == [
        ("white", None, True), ("black", "step 4", True), ("black", "step 4", True), ("white", None, True),
    ]  # fmt: skip
    assert [*requests[1].messages] == [user("w1")]
    assert [*requests[1].said] == [said("b1")]


async def test_the_wait_for_an_opponent_has_its_name() -> None:
    timeline = Timeline()
    async with server("b1") as (address, _):
        run = make_run(turns(), roles=ROLES, opponents=opponents(Models(address, [0]), [0]))
        with kept(timeline):
            await Agent(run).ask(HELLO, model="black")
        await run.opponents.aclose()  # type: ignore[union-attr]
    assert [(span.kind, span.name) for span in timeline.spans] == [("wait", "opponent step 0"), ("request", "")]


async def test_the_trained_model_plays_where_no_opponent_is_there() -> None:
    agent = Agent(make_run(turns("w", "b"), roles=ROLES, opponents=opponents(Models())))
    assert [(await agent.ask(HELLO, model=role)).content for role in ("white", "black")] == ["w", "b"]
    outcome, _ = await agent.close()
    assert (len(outcome.rows), agent.session.opponents.names) == (2, {})


async def test_calls_and_several_completions_of_an_opponent() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    async with server(call, "b") as (address, bodies):
        run = make_run(turns(), roles=ROLES, opponents=opponents(Models(address, [0]), [0]))
        agent = Agent(run)
        tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
        delivery = await agent.session.complete(_request(n=2, tools=[tool]))
        delivery.delivered()
        await agent.session.closed()
        await run.opponents.aclose()  # type: ignore[union-attr]
    kinds = sorted((len(each.calls), each.finish) for each in delivery.completions)
    assert kinds == [(0, "stop"), (1, "tool_calls")]
    called = next(each.calls[0] for each in delivery.completions if each.calls)
    assert (called.name, called.arguments, len(called.id)) == ("add", '{"a": 1}', 9)
    assert bodies[0]["tools"] == [tool]
    assert len({each.id for each in delivery.completions}) == 2


def _request(**more: Any) -> ChatRequest:
    return ChatRequest(HELLO, model="black", **more)


async def test_completions_of_opponents_count_in_the_limit() -> None:
    async with server("b") as (address, _):
        run = make_run(turns("w"), roles=ROLES, opponents=opponents(Models(address, [0]), [0]), max_completions=1)
        agent = Agent(run)
        await agent.ask(HELLO, model="black")
        with pytest.raises(RefusedError, match="has had 1 of 1 completions, and 1 more are asked for"):
            await agent.ask([user("y")], model="black")
        await run.opponents.aclose()  # type: ignore[union-attr]


async def test_a_request_that_the_server_refuses_is_refused() -> None:
    async with server(400, "b") as (address, _):
        run = make_run(turns(), roles=ROLES, opponents=opponents(Models(address, [0]), [0]))
        agent = Agent(run)
        with pytest.raises(RefusedError, match=r"the opponent step 0 refuses the request.*status 400") as refused:
            await agent.ask(HELLO, model="black")
        assert (refused.value.status, refused.value.code, agent.session.failed) == (400, "opponent_refused", "")
        assert (await agent.ask([user("y")], model="black")).content == "b"
        await run.opponents.aclose()  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["mask", "off"])
async def test_a_server_that_is_not_there_makes_the_session_invalid(mode: str) -> None:
    watch = Outages(OutageSettings(mode=mode)).of("opponent step 0", OutageLimits(), 60.0)  # type: ignore[arg-type]
    run = make_run(turns("w", "w"), roles=ROLES, opponents=opponents(Models("", [0]), [0], watch=watch))
    agent = Agent(run)
    await agent.ask(HELLO, model="white")
    with pytest.raises(RefusedError, match="the opponent step 0: OutageError: no server"):
        await agent.ask(HELLO, model="black")
    with pytest.raises(RefusedError, match="the engine failed in this session"):
        await agent.ask([user("y")], model="white")
    assert agent.session.opponents.outage == ("opponent step 0" if mode == "mask" else "")
    assert agent.session.failed == "the opponent step 0: OutageError: no server"
    outcome, _ = await agent.close(StopReason.OUTAGE if mode == "mask" else StopReason.ENGINE_ERROR)
    assert not outcome.valid


async def test_a_server_that_is_started_again_is_found_under_its_new_address() -> None:
    models = Models("http://127.0.0.1:9/v1", [0])
    made = opponents(models, [0])
    run = make_run(turns(), roles=ROLES, opponents=made)
    with pytest.raises(RefusedError, match="gave no usable reply"):
        await Agent(run, "a").ask(HELLO, model="black")
    async with server("b") as (address, _):
        models.served = address
        assert (await Agent(run, "b").ask(HELLO, model="black")).content == "b"
        await made.aclose()
    assert models.asked == [0, 0]


@pytest.mark.parametrize(
    "body",
    ["", "{}", '{"choices": []}', '{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}',
     '{"choices": [{"message": {"content": "x"}, "finish_reason": "odd"}]}',
     '{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": Infinity}}'],
)  # fmt: skip
def test_an_answer_that_is_no_chat_completion_is_asked_for_again(body: str) -> None:
    with pytest.raises(AskAgainError):
        read_completion(body)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"opponents": {"black": [0]}}, "proxy.opponents needs proxy.roles, which is not set"),
        ({"roles": ["white"], "opponents": {"black": [0]}}, "'black' is no role; name some of proxy.roles"),
        ({"opponents": {"black": [-1]}}, "black: -1 is no step; name one from 0"),
        ({"opponents": {"black": ["policy"]}}, "'policy' alone is the trained model"),
        ({"opponents": {"black": [0, 0]}}, "the opponent 0 is there twice"),
        ({"opponents": {"black": []}}, "at least 1 item"),
        ({"opponents": {"black": [""]}}, "'' is no opponent"),
        ({"opponents": {"black": [True]}}, "valid integer"),
        ({"opponent_devices": "0"}, "proxy.opponent_devices is set, and proxy.opponents is not"),
    ],
)  # fmt: skip
def test_wrong_forms_are_refused(settings: dict[str, Any], problem: str) -> None:
    given = {"agent": "a:b", "roles": ["white", "black"], **settings}
    if problem.startswith("proxy.opponents needs"):
        given.pop("roles")
    with pytest.raises(ValueError, match=problem):
        ProxySettings(**given)


def test_opponents_are_read_as_they_are_written() -> None:
    listed = ["policy", 0, 8, "models/old", "http://127.0.0.1:8000/v1#big"]
    made = ProxySettings(agent="a:b", roles=["white", "black"], opponents={"black": listed})
    assert json.loads(made.model_dump_json())["opponents"] == {"black": listed}


def test_an_address_is_one_whatever_the_case_of_its_scheme() -> None:
    found = [is_address(name) for name in ("http://h/v1", "HTTPS://h/v1#big", "models/http", "http:/h", "policy", 8)]
    assert found == [True, True, False, False, False, False]


async def test_both_of_two_requests_at_once_get_the_same_opponent() -> None:
    async with server("a", "b") as (address, _):
        models = Models(address, [0])
        run = make_run(turns(), roles=ROLES, opponents=opponents(models, ["policy", 0]))
        one = await drawn(run.opponents, *(life(number=number) for number in range(20)))  # type: ignore[arg-type]
        agent = Agent(run)
        agent.session.opponents._life = life(number=next(n for n, name in enumerate(one) if name))
        await asyncio.gather(agent.ask(HELLO, model="black"), agent.ask([user("y")], model="black"))
        await run.opponents.aclose()  # type: ignore[union-attr]
    assert models.asked == [0]


async def test_where_all_trained_roles_have_opponents_the_trained_model_plays_one() -> None:
    made = opponents(Models(there=[0]), [0], roles=["white", "black"])
    found = [[await made.draw(role, life(number=number)) for role in ("white", "black")] for number in range(40)]
    assert {tuple(each is None for each in pair) for pair in found} == {(True, False), (False, True)}


async def test_the_trained_model_is_validated_in_its_roles() -> None:
    validation = life()
    validation.validation = True
    assert await drawn(opponents(Models(there=[0]), [0]), validation) == [None]
    assert await drawn(opponents(Models(there=[0]), [0], trained=["white"]), validation) == ["step 0"]


async def whole_session(made: Opponents, agent: str, *completions: str) -> tuple[Outcome, list[Any]]:
    """Run a session of an agent of `tests/endpoint_agents.py`; return its end and its generations."""
    run = make_run(turns(*completions), roles=ROLES, opponents=made)
    runner = build_runner(ProxySettings(agent=f"tests.endpoint_agents:{agent}"))
    endpoint = Endpoint(run, runner, ProxyServer(), 30.0, -1.0)
    try:
        return await endpoint.run("r", {"raw_prompt": HELLO}, {"temperature": 1.0})
    finally:
        await endpoint.aclose()


@pytest.mark.parametrize("mode", ["mask", "off"])
async def test_a_whole_session_whose_opponent_is_lost_is_invalid_and_names_the_outage(mode: str) -> None:
    watch = Outages(OutageSettings(mode=mode)).of("opponent step 0", OutageLimits(), 60.0)  # type: ignore[arg-type]
    outcome, _ = await whole_session(opponents(Models("", [0]), [0], watch=watch), "both_roles", "w")
    reason = StopReason.OUTAGE if mode == "mask" else StopReason.ENGINE_ERROR
    assert (outcome.stop_reason, outcome.valid) == (reason, False)
    assert outcome.outages == (["opponent step 0"] if mode == "mask" else [])


@pytest.mark.parametrize("mode", ["mask", "off"])
async def test_a_session_whose_opponents_nobody_knows_is_invalid_and_names_the_outage(mode: str) -> None:
    settings = OutageSettings(mode=mode)  # type: ignore[arg-type]
    watch = Outages(settings).of("opponent checkpoints", OutageLimits(), 60.0)
    models = Models(there=[4])
    models.unknown = "no actor"
    run = make_run(turns("w"), roles=ROLES, opponents=opponents(models, watch=watch))
    runner = build_runner(ProxySettings(agent="tests.endpoint_agents:both_roles"))
    endpoint = Endpoint(run, runner, ProxyServer(), 30.0, -1.0)
    try:
        outcome, _ = await endpoint.run("r", {"raw_prompt": HELLO}, {"temperature": 1.0})
    finally:
        await endpoint.aclose()
    reason = StopReason.OUTAGE if mode == "mask" else StopReason.ENGINE_ERROR
    assert (outcome.stop_reason, outcome.valid) == (reason, False)
    assert outcome.outages == (["opponent checkpoints"] if mode == "mask" else [])
    assert outcome.error == "the opponents' servers: OutageError: no actor"


async def test_an_opponent_that_never_answers_is_an_outage_and_not_the_agents_lateness() -> None:
    never = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await never.wait()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    watch = Outages(OutageSettings(mode="mask")).of("opponent step 0", OutageLimits(timeouts="outage"), 60.0)
    made = opponents(Models(address, [0]), [0], watch=watch, timeout_s=4.0)
    run = make_run(turns("w"), roles=ROLES, opponents=made)
    try:
        async with asyncio.timeout(3.0) as deadline, running(deadline):  # as an endpoint's session has it
            agent = Agent(run)
            with pytest.raises(RefusedError, match="the opponent step 0: OutageError: no answer within 4 s"):
                await agent.ask(HELLO, model="black")
            assert agent.session.opponents.outage == "opponent step 0"
    finally:
        await made.aclose()
        never.set()
        listening.close()
        await listening.wait_closed()


async def test_a_session_in_which_only_opponents_spoke_says_so() -> None:
    async with server("b") as (address, _):
        outcome, _ = await whole_session(opponents(Models(address, [0]), [0]), "black_alone")
    assert (outcome.stop_reason, outcome.valid) == (StopReason.NO_COMPLETION, False)
    said = "the trained model was not asked, and only opponents spoke: step 0; if many sessions end so, let a trained"
    assert outcome.error == f"{said} role begin"
    assert outcome.session is not None
    assert outcome.session.opponents == {"black": "step 0"}


async def test_rewards_for_completions_of_an_opponent_are_taken_and_its_record_is_right() -> None:
    async with server("b") as (address, _):
        outcome, generations = await whole_session(opponents(Models(address, [0]), [0]), "both_roles", "w")
    assert [(turn.role, turn.reward) for turn in outcome.turns] == [("white", 0.5)]
    record = json.loads(line_of(record_of(Life("r", "u", row={}, outcome=outcome, generations=generations))))
    assert verify_record(record).violations == []
    assert record["session"]["opponents"] == {"black": "step 0"}
    asked = record["session"]["requests"][1]
    assert (asked["role"], asked["opponent"], asked["said"], asked["generations"]) == (
        "black",
        "step 0",
        [said("b")],
        [],
    )
