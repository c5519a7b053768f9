"""An OpenEnv server as the environment: a real server on loopback that is full, fails, hangs or lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from verl_multiturn.calls.limits import CallLimits, outage_rules
from verl_multiturn.calls.outages.causes import cause_of
from verl_multiturn.errors import ConfigError, InteractionContractError
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.errors import EnvironmentFailedError
from verl_multiturn.interactions.openenv_client import OpenEnvClient


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def observation(text: Any, reward: Any = None, done: Any = False) -> str:
    return json.dumps({"type": "observation", "data": {"observation": text, "reward": reward, "done": done}})


class Server:
    """A server whose environment counts the messages of its session. `odd` answers a step in its own way."""

    def __init__(self, odd: Any = None) -> None:
        self._odd = odd
        self.heard: list[Any] = []
        self.sessions, self.idle = 0, asyncio.Event()

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sessions += 1
        self.idle.clear()
        with contextlib.suppress(ConnectionError):  # the client may have gone
            await self._serve(socket)
        self.sessions -= 1
        if not self.sessions:
            self.idle.set()
        return socket

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        steps = 0
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            self.heard.append(asked)
            if asked["type"] == "close":
                break
            if asked["type"] == "reset":
                steps = 0
                await socket.send_str(observation({"board": f"seed {asked['data'].get('seed')}", "legal": [1, 2]}))
            elif self._odd is not None:
                await self._odd(socket)
            else:
                steps += 1
                await socket.send_str(observation({"board": f"step {steps}"}, steps / 2, steps == 3))
        await socket.close()


@contextlib.asynccontextmanager
async def playing(odd: Any = None, **config: Any) -> AsyncIterator[tuple[OpenEnvClient, Server]]:
    server = Server(odd)
    app = web.Application()
    app.router.add_get("/ws", server.session)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    client = OpenEnvClient({"base_url": f"http://{host}:{port}", "action_field": "message", "timeout_s": 5.0, **config})
    try:
        yield client, server
    finally:
        await client.aclose()
        if server.sessions:
            await asyncio.wait_for(server.idle.wait(), 60)  # no connection remains
        await runner.cleanup()


async def test_an_episode() -> None:
    async with playing() as (env, server):
        first = await env.start("a", seed=np.int64(7), level=None)
        assert first == Reply(text="seed 7", state="seed 7")
        assert await env.start("b", seed=8) == Reply(text="seed 8", state="seed 8")
        replies = [await env.reply("a", said(text)) for text in ("<think>?</think>one", "So <action>two</action>", "3")]
        assert replies == [
            Reply(text="step 1", reward=0.5, state="step 1"),
            Reply(text="step 2", reward=1.0, state="step 2"),
            Reply(text="step 3", reward=1.5, done=True, state="step 3"),
        ]
        assert (await env.reply("b", said("x"))).text == "step 1"  # an episode for each conversation
        odd = await env.reply("b", said(""))
        assert (odd.text[:27], odd.state, odd.metrics) == (
            "Your action cannot be read:",
            "step 1",
            {"unreadable_actions": 1.0},
        )
        assert (env.score("a"), env.score("b")) == (3.0, 0.5)
        await env.close("a")
        await env.close("a")
    asked = [each.get("data") for each in server.heard]
    said_to_it = [{"message": text} for text in ("one", "two", "3", "x")]
    assert asked == [{"seed": 7}, {"seed": 8}, *said_to_it, None, None]


def chosen(text: str) -> Any:
    if text == "no mapping":
        return 3
    return {"move": int(text)}


def board(observed: dict[str, Any]) -> Any:
    return None if observed["board"] == "step 2" else f"[{observed['board']}]"


async def test_the_functions_of_an_author() -> None:
    names = {"to_action": f"{__name__}:chosen", "to_text": f"{__name__}:board", "action_field": None}
    async with playing(**names, score="last") as (env, server):
        assert (await env.start("a")).text == "[seed None]"
        assert (await env.reply("a", said("4"))).text == "[step 1]"
        asked = (await env.reply("a", said("four"))).text
        assert asked == "Your action cannot be read: invalid literal for int() with base 10: 'four'."
        with pytest.raises(InteractionContractError, match="chosen' returned 3, expected a mapping"):
            await env.reply("a", said("no mapping"))
        with pytest.raises(InteractionContractError, match="board' returned None, expected a text"):
            await env.reply("a", said("5"))
        assert [each["data"] for each in server.heard] == [{}, {"move": 4}, {"move": 5}]


async def _says(text: str, socket: web.WebSocketResponse) -> None:
    await socket.send_str(text)


async def _hangs(socket: web.WebSocketResponse) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await asyncio.Event().wait()


async def _drops(socket: web.WebSocketResponse) -> None:
    assert socket._req is not None
    transport = socket._req.transport
    assert transport is not None
    transport.abort()


ERROR = json.dumps({"type": "error", "data": {"message": "no such move", "code": "EXECUTION_ERROR"}})
FULL = json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (ERROR, "answered 'step' with an error: .*no such move"),
        (FULL, "start it with more max_concurrent_envs than there are conversations at once"),
        ('{"type": "observ', "expected an observation"),
        ("[]", "expected an observation"),
        (observation("text"), "expected an observation"),
        (observation({}, "1"), "answered with reward '1', expected a finite number from"),
        (observation({}, float("nan")), "answered with reward nan, expected a finite number from"),
        (observation({}, 1e39), r"answered with reward 1e\+39, expected a finite number from"),
        (observation({}, 1.0, "yes"), "done 'yes'"),
        ("[" * 100_000, "expected an observation"),
        ("x" * 17_000_000, "broke off in 'step'"),
        (_drops, "broke off in 'step'"),
        (_hangs, r"did not answer 'step' within 0\.5 s"),
    ],
    ids=range(13),
)
async def test_a_server_that_fails(odd: Any, message: str) -> None:
    def answer(socket: web.WebSocketResponse) -> Any:
        return _says(odd, socket) if isinstance(odd, str) else odd(socket)

    async with playing(answer, timeout_s=0.5 if odd is _hangs else 60.0) as (env, _):
        await env.start("a")
        with pytest.raises(EnvironmentFailedError, match=message) as caught:
            await env.reply("a", said("one"))
        assert cause_of(caught.value, outage_rules(env, CallLimits(), "here").timeouts or "model") != "outage"
        assert (cause_of(caught.value, "outage") == "outage") == (odd is _hangs)
        await env.close("a")


async def test_odd_texts_go_through() -> None:
    async def odd(socket: web.WebSocketResponse) -> None:
        await socket.send_str(observation({"board": "a\ud800" + "x" * 10_000_000}))

    async with playing(odd) as (env, server):
        await env.start("a")
        reply = await env.reply("a", said("b\ud800"))
        assert (reply.text[:2], len(reply.text)) == ("a\ud800", 10_000_002)
        assert server.heard[-1]["data"] == {"message": "b\ud800"}


async def test_a_cancelled_request_can_be_closed() -> None:
    async with playing(_hangs) as (env, _):
        await env.start("a")
        asking = asyncio.ensure_future(env.reply("a", said("one")))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await env.close("a")


async def test_one_that_is_not_there() -> None:
    env = OpenEnvClient({"base_url": "http://127.0.0.1:9", "action_field": "message"})
    with pytest.raises(
        EnvironmentFailedError, match=r"ws://127\.0\.0\.1:9/ws|127\.0\.0\.1:9/ws cannot be reached"
    ) as caught:
        await env.start("a")
    assert cause_of(caught.value, "model") == "outage"
    await env.close("a")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"action_field": "message"}, "base_url: Field required"),
        ({"base_url": "http://envs:8000"}, "expected either 'action_field' or 'to_action', got None and None"),
        ({"base_url": "envs:8000", "action_field": "message"}, "expected an address such as"),
        ({"base_url": "http://envs:8000", "to_action": "tests.worlds:no_such"}, "'tests.worlds' has no 'no_such'"),
        ({"base_url": "http://envs:8000", "to_action": "tests.worlds:not_callable"}, "is 3, expected a function"),
    ],
)
def test_settings(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenEnvClient(config)


async def test_an_action_that_the_server_does_not_take_is_the_models_mistake() -> None:
    errors: list[Any] = [{"loc": ["add"], "msg": "Field required"}, {"loc": [], "msg": "odd"}, {"msg": "no place"}, 3]
    told = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
    for answer, words in ((told | {"errors": errors}, "add: Field required; odd; no place"), (told, "Invalid message")):

        async def refuse(socket: web.WebSocketResponse, answer: Any = answer) -> None:
            await socket.send_str(json.dumps({"type": "error", "data": answer}))

        async with playing(refuse) as (env, _):
            await env.start("a", seed=7)
            asked = await env.reply("a", said("x"))
            assert words in asked.text
            assert (asked.state, asked.reward, asked.metrics) == ("seed 7", None, {"unreadable_actions": 1.0})
