"""Our client and the servers' caches: who leads, who waits, and where siblings go."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.test_rollout_client import Balancer, Remote, Server, client_of, sample
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.cache.need import CacheNeed, CacheReport, require_room
from verl_multiturn.rollout.life import Life, live, running

pytestmark = pytest.mark.stack


class Caching(Server):
    """A server with a cache of 100 tokens, which reads a prompt when the test lets it."""

    def __init__(self, script: list[Any]) -> None:
        super().__init__(script)
        self.need = CacheNeed(100)
        self.read = asyncio.Event()
        self.leads: list[bool] = []
        for name in ("prefilled", "cache_need"):
            setattr(self, name, Remote(getattr(self, name)))

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        self.leads.append(sampling_params.pop("leads", False))
        if self.leads[-1]:
            await self.read.wait()
        return await super().generate(request_id, prompt_ids, sampling_params)

    async def prefilled(self, request_id: str, wait_s: float) -> bool:
        await self.read.wait()
        return True

    async def cache_need(self, client: str, conversations: Sequence[tuple[float, int]], full: float) -> CacheReport:
        return self.need.tell(client, conversations, full)


class Grouping(Balancer):
    """A load balancer that sends siblings to one server."""

    async def require_acquire_fields(self) -> list[str]:
        return ["group"]

    async def acquire_server(self, request_id: str, group: str = "") -> tuple[str, Server]:
        return "server", self.servers[0]


async def converse(of: Any, number: int, prompt: Sequence[int] = (10,)) -> Any:
    with live(Life("r", "g")):
        return await sampled(of, number, prompt)


async def sampled(of: Any, number: int, prompt: Sequence[int]) -> Any:
    params = {"temperature": 1.0, "max_new_tokens": 20}
    return await of.generate(f"r{number}", prompt_ids=list(prompt), sampling_params=params)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_sibling_leads_and_the_others_follow() -> None:
    server = Caching([(1, "stop", 4, False)] * 3)
    ours = client_of(Grouping(server))
    asking = [asyncio.ensure_future(converse(ours, number)) for number in range(3)]
    await settle()
    assert server.leads == [True]
    server.read.set()
    outputs = await asyncio.gather(*asking)
    assert server.leads == [True, False, False]
    assert [output.extra_fields["led_s"] > 0 for output in outputs] == [False, True, True]
    assert [output.extra_fields["held_s"] for output in outputs] == [0, 0, 0]  # the cache suffices
    assert (ours._caches._turns, ours._waiting) == ({}, set())


async def test_with_a_router_of_the_users_nobody_leads() -> None:
    server = Caching([(1, "stop", 4, False)] * 2)
    await asyncio.gather(*(converse(client_of(Balancer(server)), number) for number in range(2)))
    assert server.leads == [False, False]


async def test_after_a_pause_and_new_weights_a_sibling_leads_again() -> None:
    server = Caching([])
    caches = client_of(Grouping(server))._caches

    async def leads(request: str, prompt: list[int], **fields: Any) -> bool:
        params: dict[str, Any] = {}
        await caches.before(request, "server", server, prompt, params, True)
        caches.ended(
            request, SimpleNamespace(token_ids=[1], extra_fields={"global_steps": 4, "paused": False, **fields})
        )
        return "leads" in params

    with live(Life("r", "g")):
        assert await leads("a", [10])
        assert not await leads("a", [10, 11])  # its next turn
        assert not await leads("b", [10], paused=True)
        assert await leads("b", [10, 11])
        assert not await leads("c", [10, 11])
        assert not await leads("c", [10, 11, 12], global_steps=5)  # a turn under new weights, which reports them
        assert await leads("d", [10, 11])
    assert caches._servers["server"].leads._of_block == {}


async def test_a_turn_that_waits_for_room_can_be_cancelled() -> None:
    server = Caching([(1, "never", 4, False)])
    balancer = Grouping(server)
    ours = client_of(balancer)
    server.read.set()
    old = asyncio.ensure_future(converse(ours, 1, range(100)))
    await asyncio.sleep(1.2)  # the server got the request
    young = asyncio.ensure_future(converse(ours, 2, range(200, 300)))
    await asyncio.sleep(0.1)
    assert ours._waiting == {"r2"}
    young.cancel()
    await asyncio.wait({young})
    assert young.cancelled()
    assert (ours._waiting, list(ours._servers), balancer.released) == (set(), ["r1"], ["server"])
    old.cancel()
    await asyncio.wait({old})
    assert (ours._servers, len(balancer.released)) == ({}, 2)
    assert [len(ids) for ids, _ in server.asked] == [100]


async def test_the_clock_stands_still_while_a_turn_waits() -> None:
    server = Caching([(1, "stop", 4, False)] * 3)
    ours = client_of(Grouping(server))
    with live(Life("r", "old")):
        server.read.set()
        params = {"temperature": 1.0, "max_new_tokens": 20}
        await ours.generate("old", prompt_ids=list(range(100)), sampling_params=params)
        ours._caches._servers["server"].holding._youngest = 0.0

        async def young() -> Any:
            with live(Life("r2", "g")):
                async with asyncio.timeout(0.1) as deadline, running(deadline):
                    return await sampled(ours, 2, range(200, 300))

        waiting = asyncio.ensure_future(young())
        await asyncio.sleep(0.3)
        assert not waiting.done()
    assert (await waiting).stop_reason == "stop"


async def test_a_server_that_dies_while_turns_wait() -> None:
    from ray.exceptions import ActorDiedError

    class Dead(Caching):
        async def cache_need(self, *_: Any) -> Any:
            raise ActorDiedError

        async def generate(self, *_: Any, **__: Any) -> Any:
            raise ActorDiedError

    class Two(Grouping):
        async def remove_servers(self, names: list[str]) -> None:
            self.servers.pop(0)

    server = Caching([(1, "stop", 4, False)])
    server.read.set()
    balancer = Two(Dead([]), server)
    balancer.remove_servers = Remote(balancer.remove_servers)  # type: ignore[method-assign,assignment]
    assert (await converse(client_of(balancer), 1)).stop_reason == "stop"


async def test_a_server_that_cannot_be_reached_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import ActorUnavailableError

    from verl_multiturn.rollout.cache import holding

    monkeypatch.setattr(holding, "_EVERY_S", 0.0)
    asked, again = [], asyncio.Event()

    class Flaky(Caching):
        async def cache_need(self, client: str, conversations: Sequence[tuple[float, int]], full: float) -> CacheReport:
            asked.append(client)
            if len(asked) == 1:
                raise ActorUnavailableError("no connection", None)
            again.set()
            return await super().cache_need(client, conversations, full)

    server = Flaky([])
    caches = client_of(Grouping(server))._caches
    with live(Life("r", "g")):
        await caches.before("a", "server", server, [10], {}, False)
        await asyncio.wait_for(again.wait(), 60)


async def test_a_new_server_at_the_address_of_a_dead_one_is_asked_anew() -> None:
    caches = client_of(Grouping(Caching([])))._caches
    dead, new = Caching([]), Caching([])
    with live(Life("r", "g")):
        await caches.before("a", "server", dead, [10], {}, True)
        before = caches._servers["server"]
        await caches.before("a", "server", new, [10], {}, True)
        assert caches._servers["server"] is not before
        assert caches._servers["server"].handle is new
        caches.told("a")
    assert (before.holding._stays, caches._servers["server"].holding._stays) == ({}, {})


async def test_a_conversation_that_asks_for_no_more_tokens_is_forgotten_while_its_reward_is_waited_for() -> None:
    server = Caching([(1, "stop", 4, False)] * 2)
    ours = client_of(Grouping(server))
    server.read.set()
    with live(Life("r", "g")) as conversation:
        await ours.generate("r", prompt_ids=[10], sampling_params={"max_new_tokens": 20})
        its = ours._caches._servers["server"]
        assert len(its.holding._stays) == 1
        conversation.leave()
        await ours.generate("r", prompt_ids=[10], sampling_params={"max_new_tokens": 20})
        assert (its.holding._stays, its.leads._of_block, its.leads._used) == ({}, {}, {})


async def test_the_first_output_of_a_watched_request_says_that_its_prompt_is_read() -> None:
    from verl_multiturn.verl_bridge.servers.cache_hits import CacheHits

    go_on = asyncio.Event()
    ended = {"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"}, "cached_tokens": 3}}
    refused = {"meta_info": {"finish_reason": {"type": "abort", "status_code": 400, "message": "too long"}}}
    given: list[Any] = []

    class Manager:
        def __init__(self, last: dict[str, Any]) -> None:
            self.last = last

        async def generate_request(self, asked: Any, _: Any) -> AsyncIterator[dict[str, Any]]:
            given.append((asked.stream, asked.sampling_params))
            if asked.stream:
                yield {"output_ids": [1], "meta_info": {"finish_reason": None}}
            await go_on.wait()
            yield self.last

    def request() -> Any:
        return SimpleNamespace(rid="a", stream=False, sampling_params={"top_p": 1.0})

    hits = CacheHits(Manager(ended))
    asking = asyncio.ensure_future(hits.prefilled("a", 600.0))  # before the generation has come
    await settle()
    hits.watch("a")
    output = asyncio.ensure_future(anext(hits.generate_request(request())))
    assert await asking
    assert not output.done()
    go_on.set()
    assert await output == ended
    assert (hits.take("a"), hits.__dict__["_reads"], hits.__dict__["_watched"]) == (3, {}, set())
    assert await anext(hits.generate_request(request())) == ended
    assert given == [(True, {"top_p": 1.0, "stream_interval": 1 << 30}), (False, {"top_p": 1.0})]
    assert not await hits.prefilled("gone", 0.01)
    manager = Manager(ended)
    manager.server_args = SimpleNamespace(incremental_streaming_output=True)  # type: ignore[attr-defined]
    hits = CacheHits(manager)
    hits.watch("a")
    assert await anext(hits.generate_request(request())) == ended
    assert given[-1] == (False, {"top_p": 1.0})  # the last output would have the new tokens alone
    hits = CacheHits(Manager(refused))
    hits.watch("a")
    with pytest.raises(ValueError, match="too long"):
        await anext(hits.generate_request(request()))


def test_siblings_go_to_one_server_while_it_has_room() -> None:
    from verl_multiturn.verl_bridge.servers.router import GroupRouter

    router = GroupRouter({"a": "A", "b": "B"})
    assert router.require_acquire_fields() == ["group"]
    first = router.acquire_server("r0", "g")[0]
    assert {router.acquire_server(f"r{n}", "g")[0] for n in range(1, 16)} == {first}
    other = router.acquire_server("r16", "g")[0]
    assert {first, other} == {"a", "b"}
    assert router.acquire_server("r3", "g")[0] == first  # where it went before
    assert router.acquire_server("x", "h")[0] == other  # another group begins where the fewest are
    router.remove_servers([first])
    assert router.acquire_server("r3", "g") == (other, other.upper())
    assert router.clear_sticky_cache()["cleared_entries"]
    with pytest.raises(RuntimeError, match="No available servers"):
        GroupRouter({}).acquire_server("r", "g")


def test_a_cache_smaller_than_a_conversation_is_refused_by_name() -> None:
    rollout = SimpleNamespace(prompt_length=64, response_length=64, max_model_len=None)
    require_room(128, rollout)
    with pytest.raises(ConfigError, match=r"holds 127 tokens, and a conversation may have 128 .*max_total_tokens"):
        require_room(127, rollout)
    require_room(100, SimpleNamespace(prompt_length=64, response_length=64, max_model_len=100))
    assert math.isinf(CacheNeed(1).tell("a", [], 0.9).youngest)


async def test_a_turn_of_nobody_is_let_through() -> None:
    server = Server([(1, "stop", 4, False)])
    output = await sample(client_of(Grouping(server)))
    assert "held_s" not in output.extra_fields
