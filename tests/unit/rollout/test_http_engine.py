"""Engines over HTTP, called by a client of a scripted server on this machine."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.support.served import Answers, answering, served
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.rollout.engines import http_engine
from verl_multiturn.rollout.engines.http_engine import CompletionsEngine, GenerateEngine
from verl_multiturn.rollout.engines.protocol import Ask, Generation

ASK = Ask("17-0-a", [1, 2, 3], {"temperature": 0.5, "stop_token_ids": [9]}, max_new_tokens=4)


def generation(ids: list[int], **changes: Any) -> dict[str, Any]:
    about = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.25, token, None] for token in ids],
        "weight_version": "00ff",
        "cached_tokens": 2,
        **changes,
    }
    return {"text": "", "output_ids": ids, "meta_info": about}


async def asked(answer: Answers, ask: Ask = ASK, **paths: Answers) -> Generation:
    async with served(generate=answer, **paths) as url:
        engine = GenerateEngine(url, "00ff")
        try:
            return await engine.generate(ask)
        finally:
            await engine.aclose()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "_PAUSES_S", (0.0, 0.0, 0.0))


async def test_a_generation() -> None:
    seen: list[Any] = []
    found = await asked(answering(generation([5, 9]), seen=seen))
    assert found == Generation([5, 9], [-0.25, -0.25], [0, 0], "stop", cached=2)
    (body,) = seen
    del body["rid"]
    assert body == {
        "input_ids": [1, 2, 3],
        "sampling_params": {"temperature": 0.5, "stop_token_ids": [9], "max_new_tokens": 4},
        "return_logprob": True,
    }


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (generation([5], weight_version="default"), "the weights 'default' sampled it, and the model's are '00ff'"),
        (
            generation([5], output_token_logprobs=[[-0.25, 6, None]]),
            "1 ids came with the log-probabilities of 1 other",
        ),
        (generation([5], output_token_logprobs=None), "answered what is no generation"),
        ({"error": "no"}, "answered what is no generation"),
        (500, "answered 500: 'too busy'"),
        (429, "answered 429: 'too busy'"),
        (b"<html>", "answered no JSON object: '<html>'"),
        (b"[]", "answered no JSON object: '\\[\\]'"),
        ({"output_ids": [5], "meta_info": []}, "answered what is no generation: AttributeError"),
        (generation([5.5]), "answered what is no generation: TypeError: 5.5 is no token id"),  # type: ignore[list-item]
    ],
)
async def test_what_is_no_generation_of_these_weights_is_the_engines_failure(answer: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await asked(answering(answer))


async def test_a_server_that_is_busy_is_asked_again() -> None:
    assert (await asked(answering(429, 503, generation([5, 9])))).ids == [5, 9]


async def test_a_generation_that_was_cut_off_says_so() -> None:
    assert (await asked(answering(generation([5], finish_reason={"type": "abort"})))).finish == "abort"


async def test_a_server_that_hangs_is_given_up() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async with served(generate=never, health_generate=answering(503)) as url:
        engine = GenerateEngine(url, "00ff", silent_s=0.01)
        try:
            with pytest.raises(EngineError, match="has not answered for"):
                await engine.generate(ASK)
            with pytest.raises(EngineError, match="has not answered for"):
                await engine.generate(ASK)  # at once
        finally:
            await engine.aclose()


async def test_a_server_that_is_gone_is_given_up_at_once() -> None:
    async with served(generate=answering(generation([5, 9])), health_generate=answering({})) as url:
        engine = GenerateEngine(url, "00ff")
        assert (await engine.generate(ASK)).ids == [5, 9]
    try:
        with pytest.raises(EngineError, match=f"{url}/generate: "):
            await engine.generate(ASK)
        assert engine.lost.startswith(f"{url} does not answer: ")
    finally:
        await engine.aclose()


async def test_a_server_that_breaks_off_one_answer_is_asked_on() -> None:
    async def breaks_off(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with served(generate=breaks_off, health_generate=answering({})) as url:
        engine = GenerateEngine(url, "00ff")
        try:
            with pytest.raises(EngineError, match="/generate: "):
                await engine.generate(ASK)
            assert engine.lost == ""
        finally:
            await engine.aclose()


async def test_a_slow_server_that_lives_is_waited_for() -> None:
    asked_for_life = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await asked_for_life.wait()
        return web.json_response(generation([5, 9]))

    async def alive(request: web.Request) -> web.StreamResponse:
        asked_for_life.set()
        return web.Response()

    async with served(generate=slow, health_generate=alive) as url:
        engine = GenerateEngine(url, "00ff", silent_s=0.01)
        try:
            assert (await engine.generate(ASK)).ids == [5, 9]
        finally:
            await engine.aclose()


async def test_a_cancelled_generation_is_stopped_at_the_server() -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()
    seen: list[str] = []
    keys: list[str | None] = []

    async def never(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["rid"])
        begun.set()
        await asyncio.sleep(60)
        raise AssertionError

    async def abort(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["rid"])
        keys.append(request.headers.get("Authorization"))
        stopped.set()
        return web.Response()

    async with served(generate=never, abort_request=abort) as url:
        engine = GenerateEngine(url, "00ff", key="sesame")
        try:
            task = asyncio.ensure_future(engine.generate(ASK))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stopped.wait()
            assert seen[0] == seen[1]
            assert keys == ["Bearer sesame"]
        finally:
            await engine.aclose()


async def test_a_server_with_other_weights_is_refused_before_it_is_asked() -> None:
    async with served(get_model_info=answering({"weight_version": "default"})) as url:
        engine = GenerateEngine(url, "00ff")
        try:
            with pytest.raises(ConfigError, match="start SGLang with --weight-version 00ff"):
                await engine.check()
        finally:
            await engine.aclose()
    engine = GenerateEngine("http://127.0.0.1:9", "00ff")
    with pytest.raises(ConfigError, match="SGLang does not answer"):
        await engine.check()
    await engine.aclose()


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


async def test_a_completion_is_encoded_anew() -> None:
    seen: list[Any] = []
    answer = {"choices": [{"text": "ab", "finish_reason": "stop"}], "usage": {"prompt_tokens_details": None}}
    models = {"data": [{"id": "tiny"}]}
    async with served(completions=answering(answer, seen=seen), models=answering(models)) as url:
        engine = CompletionsEngine(url, encode, 9, key="secret")
        try:
            await engine.check()
            found = await engine.generate(ASK)
        finally:
            await engine.aclose()
    # The endpoint cuts off the token that ended the turn. Log-probabilities and weights are not known.
    assert found == Generation([97, 98, 9], [0.0, 0.0, 0.0], [-1, -1, -1], "stop", cached=None)
    assert seen == [
        {
            "model": "tiny",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "temperature": 0.5,
            "stop_token_ids": [9],
            "skip_special_tokens": False,
        }
    ]


@pytest.mark.parametrize("cached", [-1, 1 << 40, True, "2"])
async def test_a_number_of_cached_tokens_that_can_be_none_is_not_known(cached: Any) -> None:
    assert (await asked(answering(generation([5], cached_tokens=cached)))).cached is None


async def test_an_answer_of_an_encoding_that_is_none_is_read_as_json_is() -> None:
    async def odd(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"{}", headers={"Content-Type": "application/json; charset=hex"})

    with pytest.raises(EngineError, match="answered what is no generation"):
        await asked(odd)


async def test_an_answer_without_end_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "_MOST_BYTES", 1 << 20)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while request.transport is not None:
            await response.write(b" " * (1 << 16))
        return response

    with pytest.raises(EngineError, match="answered with more than 1 MiB"):
        await asked(endless)


async def test_a_key_that_the_endpoint_repeats_is_in_no_error() -> None:
    async def repeats(request: web.Request) -> web.StreamResponse:
        return web.Response(status=401, text=f"no such key: {request.headers['Authorization']}")

    async with served(completions=repeats) as url:
        engine = CompletionsEngine(url, encode, 9, key="s/ecret")
        try:
            with pytest.raises(EngineError, match=r"answered 401: 'no such key: Bearer \[key\]'"):
                await engine.generate(ASK)
        finally:
            await engine.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"text": "a"}]},
        {"choices": [None]},
        {"choices": [{"text": None, "finish_reason": "stop"}]},
        {"choices": [{"text": "\ud800", "finish_reason": "stop"}]},
        {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens_details": "x"}},
    ],
)
async def test_what_is_no_completion_is_the_engines_failure(answer: Any) -> None:
    async with served(completions=answering(answer)) as url:
        engine = CompletionsEngine(url, encode, 9)
        try:
            with pytest.raises(EngineError, match="answered what is no completion"):
                await engine.generate(ASK)
        finally:
            await engine.aclose()
