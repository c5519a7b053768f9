"""Roles: a request's model names one, a row is of one role, and the text of roles that are not trained is context."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import httpx
import openai
import pytest

from tests.agent_sessions import ADD, Agent, answer, call_text, echo, make_run, texts, turns, user
from tests.proxy_clients import serving
from tests.support.session_play import certified
from verl_multiturn.certificate.conversations import misattributed, unjoined
from verl_multiturn.certificate.receipts import GenerationPlace, Receipts
from verl_multiturn.config import ProxySettings, read_model
from verl_multiturn.errors import AgentContractError, ConfigError
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult, read_result
from verl_multiturn.proxy.endpoint import Endpoint, session_end
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, RefusedError
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer
from verl_multiturn.rows.keys import RowKey

BOTH = Roles(("white", "black"), ("white", "black"))
WHITE = Roles(("white", "black"), ("white",))
HELLO = [user("x")]
SUM = call_text("add", {"a": 1})


def keyed(receipts: Sequence[Receipts]) -> dict[RowKey, Receipts]:
    return {RowKey("u", "0", str(own.row)): own for own in receipts}


def roles_of_rows(outcome: Outcome) -> list[set[str | None]]:
    return [{turn.role for turn in outcome.turns if turn.place == row} for row in range(len(outcome.rows))]


async def test_each_role_has_rows_of_its_own_where_both_ask_the_same() -> None:
    agent = Agent(make_run(turns("a", "b", "c", "d"), roles=BOTH))
    first, second = await asyncio.gather(agent.ask(HELLO, model="white"), agent.ask(HELLO, model="black"))
    assert {first.content, second.content} == {"a", "b"}
    for got, role in ((first, "white"), (second, "black")):
        again = await agent.ask([*HELLO, echo(got), user("y")], model=role)
        assert agent.session.forest.completions[again.id].parent is agent.session.forest.completions[got.id]
    outcome, receipts = await agent.close()
    assert [(turn.role, turn.parent, turn.place) for turn in outcome.turns] == [
        ("white", None, 0),
        ("black", None, 1),
        ("white", 0, 0),
        ("black", 1, 1),
    ]
    assert [[generation.role for generation in own.generations] for own in receipts] == [["white"] * 2, ["black"] * 2]
    assert len({turn.lane for turn in outcome.turns}) == 2


async def test_a_role_that_goes_on_from_anothers_history_begins_a_root_in_which_that_is_context() -> None:
    agent = Agent(make_run(turns(SUM, "b", "c", "d"), roles=BOTH))
    first = await agent.ask(HELLO, [ADD], model="white")
    history = [*HELLO, echo(first), *answer(first, "2")]
    second = await agent.ask(history, [ADD], model="black")
    await agent.ask(history, [ADD], model="white")  # the same messages again: its own history, to white
    await agent.ask([*history, echo(second), user("z")], [ADD], model="black")
    outcome, _ = await agent.close()
    assert [(turn.role, turn.parent, turn.place) for turn in outcome.turns] == [
        ("white", None, 0),
        ("black", None, 1),
        ("white", 0, 0),
        ("black", 1, 1),
    ]
    white, black = texts(outcome)
    assert [name for name, _ in white] == ["PROMPT", "SAMPLED", "TEMPLATE", "OBSERVATION", "SAMPLED"]
    assert SUM in black[0][1]
    assert [text for name, text in black if name == "SAMPLED"] == ["b<|im_end|>", "d<|im_end|>"]


async def test_a_client_that_has_gone_leaves_its_sample_to_its_own_role() -> None:
    agent = Agent(make_run(turns("a", "b"), roles=BOTH))
    lost = await agent.ask(HELLO, model="white", lost=True)
    assert (await agent.ask(HELLO, model="black")).id != lost.id
    assert (await agent.ask(HELLO, model="white")).id == lost.id
    outcome, _ = await agent.close()
    assert [(turn.role, turn.place) for turn in outcome.turns] == [("white", 0), ("black", 1)]


async def test_several_completions_of_one_request_have_its_role() -> None:
    agent = Agent(make_run(turns("a", "b", "c"), roles=WHITE))
    await agent.ask(HELLO, model="black", n=2)
    await agent.ask(HELLO, model="white")
    outcome, _ = await agent.close()
    assert [(turn.role, turn.place) for turn in outcome.turns] == [
        ("black", "not_trained_role"),
        ("black", "not_trained_role"),
        ("white", 0),
    ]
    assert [name for name, _ in texts(outcome)[0]] == ["PROMPT", "SAMPLED"]


class Interleaving:
    """An agent that asks in two roles at random: from any history, again, twice at once, and loses answers."""

    def __init__(self, roles: Roles, seed: int) -> None:
        self.chance = random.Random(seed)

        def say(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
            return tiny_tokenizer().encode(self.chance.choice(["a", "b", SUM]) + "<|im_end|>")

        self.agent = Agent(make_run(say, roles=roles))
        self.histories = [HELLO]
        self.asked: Counter[str] = Counter()
        self.speaker: dict[str, str] = {}
        """The role that was named for each completion, by its id."""

    async def step(self) -> None:
        chance, role = self.chance, self.chance.choice(["white", "black"])
        history = chance.choice(self.histories)
        request = ChatRequest(history, [ADD], model=role, n=chance.choice([1, 1, 2]), stream=chance.random() < 0.5)
        delivery = self.agent.session.begin(request)
        self.asked[role] += 1
        if chance.random() < 0.1:
            await asyncio.sleep(0)
            delivery.undelivered()
            return
        await delivery.ready()
        for got in delivery.completions:
            assert self.speaker.setdefault(got.id, role) == role
            ids = chance.random() < 0.5
            shown = echo(got) if ids else {**echo(got), **_without_ids(got)}
            after = answer(got, *["2"] * len(got.calls)) if ids else [user("go on")]
            self.histories.append([*history, shown, *(after or [user("go on")])])
        (delivery.undelivered if chance.random() < 0.1 else delivery.delivered)()


def _without_ids(got: Completion) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in got.calls]
    return {"tool_calls": calls} if calls else {}


@pytest.mark.parametrize("seed", range(12))
async def test_in_random_interleavings_no_row_has_two_roles_and_each_token_its_speaker(seed: int) -> None:
    roles = BOTH if seed % 2 else WHITE
    play = Interleaving(roles, seed)
    for _ in range(8):
        await asyncio.gather(*(play.step() for _ in range(3)))
    nodes = dict(play.agent.session.forest.completions)
    outcome, receipts = await play.agent.close()  # the certificate finds nothing
    assert min(play.asked.values()) > 3
    for own in roles_of_rows(outcome):
        assert len(own) == 1
        assert own <= set(roles.trained)
    numbers = {node.number: id_ for id_, node in nodes.items()}
    for turn, place in zip(outcome.turns, receipts[0].ledger, strict=True):
        if (id_ := numbers[turn.number]) in play.speaker:
            assert turn.role == play.speaker[id_]
        assert (place.where, place.role) == (turn.place, turn.role)
        parent = None if turn.parent is None else outcome.turns[turn.parent]
        assert parent is None or parent.role == turn.role
        if turn.role not in roles.trained:
            assert turn.place in ("not_trained_role", "undelivered")


async def test_a_completion_is_trained_if_its_role_and_select_both_let_it() -> None:
    def choose(completions: Sequence[Completion]) -> list[str]:
        assert [each.role for each in completions] == ["white", "white", "black", "black"]
        return [each.id for each in completions if each.content in "ac"]

    agent = Agent(make_run(turns("a", "b", "c", "d"), roles=WHITE, select=choose))
    for role in ("white", "white", "black", "black"):
        await agent.ask([user(f"asked as {role}")], model=role)
    outcome, _ = await agent.close()
    assert outcome.places == [0, "not_selected", "not_trained_role", "not_trained_role"]


async def test_a_session_in_which_no_trained_role_spoke_trains_nothing() -> None:
    agent = Agent(make_run(turns("a"), roles=WHITE))
    await agent.ask(HELLO, model="black")
    outcome, _ = await agent.close()
    assert (outcome.valid, len(outcome.rows), outcome.places) == (False, 1, ["not_trained_role"])


@pytest.mark.parametrize("model", ["m", "", "White", "white "])
async def test_a_model_that_is_no_role_is_refused_before_anything_is_sampled(model: str) -> None:
    agent = Agent(make_run(turns(), roles=BOTH))
    with pytest.raises(RefusedError) as refused:
        await agent.ask(HELLO, model=model)
    assert (refused.value.status, refused.value.code) == (400, "unknown_role")
    assert refused.value.message == (f"model {model!r} names no role of this run; set it to one of ['white', 'black']")
    with pytest.raises(RefusedError):
        await agent.session.count_tokens(ChatRequest(HELLO, model=model))
    requests = agent.session.journal.requests()
    assert [(each.role, each.refused, each.messages) for each in requests] == [(model, "unknown_role", HELLO)] * 2
    assert agent.session.forest.ledger == []


async def test_without_roles_a_model_names_none() -> None:
    agent = Agent(make_run(turns("a", "b")))
    first = await agent.ask(HELLO, model="white")
    await agent.ask([*HELLO, echo(first), user("y")], model="black")
    assert [each.role for each in agent.session.journal.requests()] == [None, None]
    outcome, receipts = await agent.close()
    assert [(turn.role, turn.parent) for turn in outcome.turns] == [(None, None), (None, 0)]
    assert receipts[0].ledger == [GenerationPlace(each.digest, 0) for each in receipts[0].generations]


BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "responses": {"input": "x"},
    "messages": {"messages": HELLO, "max_tokens": 20},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_all_protocols_name_roles_and_refuse_others_in_their_own_form(path: str, stream: bool) -> None:
    session = AgentSession("s", make_run(turns("a", "b"), roles=BOTH), {})
    async with serving(session) as (_, access), httpx.AsyncClient(timeout=30.0) as client:

        async def post(**body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {access.api_key}"}
            content = {**BODIES[path], "stream": stream, **body}
            return await client.post(f"{access.base_url}/{path}", json=content, headers=headers)

        answers = [await post(model=role) for role in ("white", "black")]
        assert [each.status_code for each in answers] == [200, 200]
        assert [role in each.text for each, role in zip(answers, ("white", "black"), strict=True)] == [True, True]
        for body in ({"model": "gpt"}, {}):
            refused = await post(**body)
            assert refused.status_code == 400
            error = refused.json()
            assert error["error"]["message"].endswith("names no role of this run; set it to one of ['white', 'black']")
            if path == "messages":
                assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
            else:
                assert error["error"]["code"] == "unknown_role"
    session.returned()
    await session.closed()
    assert [entry.role for entry in session.forest.ledger] == ["white", "black"]


async def test_models_are_the_roles() -> None:
    session = AgentSession("s", make_run(turns(), roles=BOTH), {})
    async with (
        serving(session) as (_, access),
        openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client,
    ):
        assert [each.id async for each in await client.models.list()] == ["white", "black"]
        assert (await client.models.retrieve("black")).id == "black"
        with pytest.raises(openai.BadRequestError, match="'gpt' names no role"):
            await client.models.retrieve("gpt")


async def test_the_official_client_plays_both_sides() -> None:
    session = AgentSession("s", make_run(turns("a", "b", "c"), roles=BOTH), {})
    async with (
        serving(session) as (_, access),
        openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client,
    ):
        first = await client.chat.completions.create(model="white", messages=[{"role": "user", "content": "x"}])
        assert (first.model, first.choices[0].message.content) == ("white", "a")
        second = await client.responses.create(model="black", input="x")
        assert (second.model, second.output_text) == ("black", "b")
        # An item of white's is named by its id, and is context to black.
        third = await client.responses.create(model="white", input=[*second.output, {"role": "user", "content": "y"}])
        assert third.output_text == "c"
    session.returned()
    await session.closed()
    assert [(entry.role, entry.parent) for entry in session.forest.ledger] == [
        ("white", None),
        ("black", None),
        ("white", None),
    ]


@pytest.mark.parametrize("where", ["thread", "process"])
async def test_an_agent_plays_both_sides_by_all_protocols(where: Literal["thread", "process"]) -> None:
    runner = build_runner(ProxySettings(agent="tests.endpoint_agents:game", runner=where))
    endpoint = Endpoint(make_run(turns("a", "b", "c"), roles=BOTH), runner, ProxyServer(), 60.0)
    try:
        outcome, generations = await endpoint.run("r", {"raw_prompt": HELLO}, {})
    finally:
        await endpoint.aclose()
    assert (str(outcome.stop_reason), outcome.error) == ("finished", "")
    assert [(turn.role, turn.place) for turn in outcome.turns] == [("white", 0), ("black", 1), ("white", 2)]
    assert outcome.session is not None
    assert outcome.session.rewards == {"white": 1.0, "black": -1.0}
    assert [(each.protocol, each.role) for each in outcome.session.requests] == [
        ("chat", "white"),
        ("responses", "black"),
        ("messages", "white"),
    ]
    assert certified(outcome, Receipts.of_rows("r", generations, outcome.places), BOTH.trained) == []


def test_rewards_by_role() -> None:
    assert read_result({"roles": {"white": 1, "black": -1}, "completions": {"c": 2}}) == AgentResult(
        None, {"c": 2.0}, roles={"white": 1.0, "black": -1.0}
    )
    assert read_result({"roles": {"white": 1}}, is_areals=True).roles == {"white": 1.0}


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ({"roles": {"white": 1}, "reward": 1}, "would be that of each role, beside 'roles'; leave one of the two out"),
        ({"roles": {}}, "whose 'roles' is empty"),
        ({"roles": [1]}, "expected a mapping from roles to numbers as 'roles'"),
        ({"roles": {1: 1}}, "expected names of roles, not 1"),
        ({"roles": {"white": "much"}}, "{'roles': {name: number}}"),
        ({"roles": {"white": float("nan")}}, "whose reward is no"),
    ],
)
def test_a_result_that_rewards_no_roles(result: Any, what: str) -> None:
    with pytest.raises(AgentContractError) as raised:
        read_result(result)
    assert what in str(raised.value)


async def ended(result: AgentResult, roles: Roles | None, *spoke: str) -> Outcome:
    run = make_run(turns(*"abcd"), roles=roles)
    agent = Agent(run)
    for role in spoke:
        await agent.ask([user(f"asked as {role}")], model=role)
    agent.session.returned()
    await agent.session.closed()
    return await session_end(agent.session, AgentEnd("returned", result), run)


async def test_the_report_of_a_session_has_its_roles_and_rewards() -> None:
    outcome = await ended(AgentResult(roles={"white": 1.0, "black": -1.0}), BOTH, "white", "black")
    assert outcome.session is not None
    assert (outcome.session.reward, outcome.session.rewards) == (None, {"white": 1.0, "black": -1.0})
    assert (outcome.session.roles, outcome.session.trained) == (BOTH.names, BOTH.trained)


@pytest.mark.parametrize(
    ("given", "roles", "spoke", "what"),
    [
        (["red"], BOTH, ["white"], "a reward for the role 'red', and roles are ['white', 'black']; use the names that"),
        (["white"], None, ["white"], "a reward for the role 'white', and proxy.roles is not set"),
        (
            ["white"],
            BOTH,
            ["white", "black"],
            "rewards for the roles ['white'], and none for 'black', which is trained",
        ),
    ],
)
async def test_a_reward_for_an_unknown_role_or_none_for_one_that_spoke(
    given: list[str], roles: Roles | None, spoke: list[str], what: str
) -> None:
    with pytest.raises(AgentContractError) as raised:
        await ended(AgentResult(roles=dict.fromkeys(given, 1.0)), roles, *spoke)
    assert what in str(raised.value)


async def test_a_role_that_is_silent_or_not_trained_needs_no_reward() -> None:
    assert (await ended(AgentResult(roles={"white": 1.0}), BOTH, "white")).session is not None
    assert (await ended(AgentResult(roles={"white": 1.0}), WHITE, "white", "black")).session is not None


async def two_rows() -> list[Receipts]:
    agent = Agent(make_run(turns(*"abcdef"), roles=Roles(("white", "black", "red"), ("white", "black"))))
    for role in ("white", "black", "red"):
        await agent.ask([user(f"asked as {role}")], model=role)
    _, receipts = await agent.close()
    return receipts


TRAINED = ("white", "black")


async def test_a_changed_role_in_a_receipt_is_found() -> None:
    honest = await two_rows()
    assert unjoined(keyed(honest), TRAINED) == []
    (first,) = honest[0].generations
    changed = replace(honest[0], generations=[replace(first, role="black")])
    (violation,) = unjoined(keyed([changed, honest[1]]), TRAINED)
    assert "row 0 lacks 1 of the 1 generations that are listed with it, and has 1 others" in str(violation)
    copy = Receipts.from_bytes(honest[0].to_bytes())
    assert (copy.ledger, copy.held, copy.to_bytes()) == (honest[0].ledger, honest[0].held, honest[0].to_bytes())


def relisted(rows: list[Receipts], number: int, **changes: Any) -> list[Receipts]:
    """List a generation otherwise in all rows, and give it that role where it lies."""
    places = rows[0].ledger
    old = places[number]
    places[number] = old._replace(**changes)
    found = []
    for own in rows:
        made = [
            replace(each, role=places[number].role) if each.digest == old.digest else each for each in own.generations
        ]
        found.append(replace(own, generations=made, places=places))
    digests = {each.digest for own in found for each in own.generations}
    if "role" in changes and isinstance(old.where, int):
        (digest,) = digests - {place.digest for place in places}
        places[number] = places[number]._replace(digest=digest)
    return found


@pytest.mark.parametrize(
    ("number", "changes", "what"),
    [
        (0, {"role": "red"}, "row 0 is of the role 'red', which is not trained"),
        (0, {"role": None}, "a generation has no role, and others have"),
        (2, {"role": "white"}, "one of the role 'white', which is trained, is listed with not_trained_role"),
        (2, {"where": "not_selected"}, "one of the role 'red', which is not trained, is listed with not_selected"),
        (2, {"where": "dropped_row"}, "one of the role 'red', which is not trained, is listed with dropped_row"),
    ],
)
async def test_roles_that_do_not_fit(number: int, changes: dict[str, Any], what: str) -> None:
    faulty = relisted(await two_rows(), number, **changes)
    assert any(what in str(violation) for violation in unjoined(keyed(faulty), TRAINED))


async def test_roles_of_a_run_without_roles() -> None:
    honest = keyed(await two_rows())
    (violation,) = unjoined(honest)
    assert "its generations have the roles 'black', 'red', 'white', and there are no roles" in str(violation)
    none = [Receipts.of_rows("r", [replace(own, role=None) for own in honest[key].generations], ["not_trained_role"])[0]
            for key in [*honest][:1]]  # fmt: skip
    (violation,) = unjoined(keyed([replace(none[0], generations=[])]), TRAINED)
    assert "one is listed with not_trained_role, and none has a role" in str(violation)


async def test_a_row_of_two_roles() -> None:
    agent = Agent(make_run(turns("a", "b")))
    first = await agent.ask(HELLO)
    await agent.ask([*HELLO, echo(first), user("y")])
    outcome, (own,) = await agent.close()
    made = [replace(each, role=role) for each, role in zip(own.generations, TRAINED, strict=True)]
    (faulty,) = Receipts.of_rows("r", made, [0, 0])
    assert (
        "row 0 has generations of the roles 'black', 'white', expected one role"
        in certified(outcome, [faulty], TRAINED)[0]
    )


async def test_turns_that_the_estimator_takes_for_anothers() -> None:
    rows = keyed(await two_rows())
    roles: dict[RowKey, set[str | None]] = {key: {"white"} for key in rows}
    (violation,) = misattributed(rows, roles)
    assert "(row u_0_1): it is taken for one of the roles 'white', by the receipts it is of 'black'" in str(violation)
    assert misattributed(rows, dict(zip(rows, ({"white"}, {"black"}), strict=True))) == []
    (violation,) = misattributed(rows, dict(zip(rows, ({"white"}, set()), strict=True)))  # no turns
    assert "(row u_0_1): it is taken for one of the roles None, by the receipts it is of 'black'" in str(violation)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"roles": []}, "proxy.roles: expected the name of at least one role; name one, or leave the setting out"),
        ({"roles": ["a", "b", "a"]}, "the role 'a' is there twice"),
        ({"roles": ["a b"]}, "'a b' cannot name a role"),
        ({"roles": ["a/b"]}, "'a/b' cannot name a role"),
        ({"roles": [""]}, "'' cannot name a role"),
        ({"roles": ["a" * 65]}, "at most 64"),
        ({"roles": "white"}, "proxy.roles: "),
        ({"roles": ["a"], "train": []}, "proxy.train: expected the name of at least one role"),
        ({"roles": ["a"], "train": ["b"]}, "'b' is not a role; name some of proxy.roles=['a']"),
        ({"train": ["a"]}, "proxy.train=['a'] needs proxy.roles, which is not set"),
        ({"train": ["user"]}, "train the text of PolicyUser by actor_rollout_ref"),
        ({"roles": ["a"], "train": ["a", "user"]}, "train the text of PolicyUser by actor_rollout_ref"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_model(ProxySettings, settings, "proxy")
    assert what in str(raised.value)


def test_settings_of_roles() -> None:
    def roles(**settings: Any) -> Roles | None:
        return Roles.of(read_model(ProxySettings, settings, "proxy"))

    assert roles() is None
    assert roles(roles=["a", "b"]) == Roles(("a", "b"), ("a", "b"))
    assert roles(roles=["b", "user"], train=["user"]) == Roles(("b", "user"), ("user",))
