"""The recorded requests of AReaL's own client work at the gateway, and what its table says is not shared is so."""

from pathlib import Path

import aiohttp

from tests.support.areal_requests import ArealSession
from tests.unit.gateway.test_gateway import ADMIN, Client, serving
from verl_multiturn.records.read.sessions import SessionIndex


def areal(http: aiohttp.ClientSession, client: Client) -> ArealSession:
    return ArealSession(http, client.gateway.address + "/", ADMIN)


async def test_a_session_of_its_client_is_collected(tmp_path: Path) -> None:
    async with serving(tmp_path, "two", "three") as client, aiohttp.ClientSession() as http:
        session = areal(http, client)
        started = await session.start("gsm8k-7")
        assert (started.status, bool(session.session_id), bool(session.api_key)) == (201, True, True)
        first = await client.chat(session.api_key)
        last = await client.chat(session.api_key)
        assert (await session.reward(first, 0.25)).status == 200
        assert (await session.reward_last(0.5)).status == 200
        assert (await session.end()).status == 200
    index = SessionIndex(tmp_path)
    index.refresh()
    (kept,) = index.sessions.values()
    assert (kept.task, kept.why, kept.reward) == ("gsm8k-7", "ended", 0.75)
    assert [f"chatcmpl-{each}" for each in kept.completions] == [first, last]
    assert [(each.generation, each.reward, each.id) for each in kept.rewards] == [(0, 0.25, None), (1, 0.5, None)]


async def test_a_second_reward_of_a_completion_replaces_the_first(tmp_path: Path) -> None:
    async with serving(tmp_path, "two") as client, aiohttp.ClientSession() as http:
        session = areal(http, client)
        await session.start("t")
        completion = await client.chat(session.api_key)
        for reward in (0.25, 0.5):
            assert (await session.reward(completion, reward)).body["counted"] is True
        assert (await session.end()).body["reward"] == 0.5


async def test_what_is_not_shared(tmp_path: Path) -> None:
    """Each row of the table in docs/reference/gateway.md that a request can show."""
    async with serving(tmp_path, "two", most=2) as client, aiohttp.ClientSession() as http:
        one, two, three = (areal(http, client) for _ in range(3))
        await one.start("t")
        await two.start("t")
        assert one.api_key != two.api_key
        assert not one.session_id.startswith("t-")
        assert (await three.start("t")).status == 429
        assert (await one.reward_last(0.5)).status == 409
        assert (await ArealSession(http, client.gateway.address, "wrong").start("t")).status == 401
        await client.chat(one.api_key)
        assert (await one.reward_last(1.5)).status == 422
        assert (await one.reward("chatcmpl-none", 0.5)).status == 404
        ended = await one.end()
        assert set(ended.body) == {"session_id", "completions", "reward"}
        assert (await one.reward_last(0.5)).body == {"session_id": one.session_id, "counted": True}
        again = await one.end()
        assert (again.status, again.body["reward"]) == (200, 0.5)
        assert (await client.post("/grant_capacity", ADMIN))[0] == 404
        assert (await client.post("/export_trajectories", ADMIN, {"session_id": one.session_id}))[0] == 404


async def test_a_key_is_not_used_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        body = {"task_id": "t", "api_key": (await client.start())["api_key"]}
        status, answer = await client.post("/rl/start_session", ADMIN, body)
        assert (status, "api_key" in answer["error"]["message"]) == (400, True)
