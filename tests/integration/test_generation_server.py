"""Our generation server: pauses and versions, over a stand-in for SGLang."""

import asyncio
import math
import multiprocessing
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore::UserWarning:sglang")]


class Lock:
    async def is_locked(self) -> bool:
        return False


class Manager:
    """SGLang's manager as far as pauses go: a generation waits while `is_pause`, and ends when it is aborted."""

    def __init__(self) -> None:
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = Lock()
        self.model_config = SimpleNamespace(hf_eos_token_id={2})
        self.tokenizer: Any = None
        self.began = asyncio.Event()
        self.aborted = asyncio.Event()
        self.sampling = 0

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        if self.sampling:
            self.aborted.set()

    async def continue_generation(self, _: Any) -> None:
        async with self.is_pause_cond:
            self.is_pause = False
            await asyncio.sleep(0)
            self.is_pause_cond.notify_all()

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [{"memory_usage": {"token_capacity": 100}}, {"memory_usage": {"token_capacity": 100}}]

    async def sample(self, ids: list[int]) -> list[int]:
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)
        self.sampling += 1
        self.began.set()
        await self.aborted.wait()
        self.sampling -= 1
        if not self.sampling:
            self.aborted.clear()
        return ids


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    from verl_multiturn.verl_bridge.servers.server import AsyncSGLangServer

    def begin(self: Any) -> None:
        self.node_rank, self.global_steps, self.tokenizer_manager = 0, 4, Manager()

    async def generate(self: Any, prompt_ids: list[int], params: dict[str, Any], request_id: str) -> Any:
        ids = await self.tokenizer_manager.sample(prompt_ids)
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="abort", extra_fields={})

    monkeypatch.setattr(SGLangHttpServer, "__init__", begin)
    monkeypatch.setattr(SGLangHttpServer, "generate", generate)
    return AsyncSGLangServer()


async def begun(server: Any, ids: list[int], **params: Any) -> asyncio.Future[Any]:
    """Return a generation that samples."""
    asking: asyncio.Future[Any] = asyncio.ensure_future(server.generate(ids, params, "r"))
    await server.tokenizer_manager.began.wait()
    return asking


@pytest.mark.parametrize(
    ("ids", "params", "reason"),
    [
        ([7, 8], {}, "abort"),
        ([7, 2], {}, "stop"),
        ([7, 8], {"stop_token_ids": [8]}, "stop"),
        ([7, 8], {"stop_token_ids": [8], "ignore_eos": True}, "abort"),
        ([8, 7], {"stop_token_ids": [8]}, "abort"),
        ([], {"stop_token_ids": [8]}, "abort"),
    ],
)
async def test_a_generation_stopped_at_the_end_of_its_turn_has_ended(
    server: Any, ids: list[int], params: dict[str, Any], reason: str
) -> None:
    asking = await begun(server, ids, **params)
    await server.abort_all_requests()
    output = await asking
    assert (output.stop_reason, output.extra_fields) == (reason, {"global_steps": 4, "paused": True})


async def test_the_tokenizer_knows_end_tokens_too(server: Any) -> None:
    server.tokenizer_manager.tokenizer = SimpleNamespace(eos_token_id=5, additional_stop_token_ids=None)
    asking = await begun(server, [5])
    await server.abort_all_requests()
    assert (await asking).stop_reason == "stop"


async def test_a_paused_server_samples_nothing(server: Any) -> None:
    await server.abort_all_requests()
    output = await server.generate([7], {}, "r")
    assert (output.token_ids, output.stop_reason) == ([], "abort")
    assert output.extra_fields == {"global_steps": 4, "paused": True}


async def test_a_generation_tells_how_much_of_its_prompt_was_cached(server: Any) -> None:
    from verl_multiturn.verl_bridge.servers.cache_hits import CacheHits

    class Engine(Manager):
        """SGLang's manager, as far as it reports cached tokens; verl reads the first output alone."""

        async def generate_request(self, asked: Any, request: Any) -> Any:
            yield {"output_ids": [7], "meta_info": {} if asked.rid == "old" else {"cached_tokens": 5}}

        async def sample(self, ids: list[int]) -> list[int]:
            raise AssertionError

    async def generate(prompt_ids: list[int], params: dict[str, Any], request_id: str) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        outputs = server.tokenizer_manager.generate_request(SimpleNamespace(rid=request_id), None)
        output = await outputs.__anext__()
        ids = [] if request_id == "stopped" else output["output_ids"]
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="stop", extra_fields={})

    manager = Engine()
    server.tokenizer_manager = server._hits = CacheHits(manager)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(server).__mro__[1], "generate", lambda self, *asked, **named: generate(*asked, **named))
        assert (await server.generate([1, 2], {}, "r")).extra_fields["num_cached_tokens"] == 5
        for name in ("old", "stopped"):  # an engine that does not report it; a generation without a token
            assert "num_cached_tokens" not in (await server.generate([1, 2], {}, name)).extra_fields
    assert server._hits.take("r") is None  # nothing is remembered
    server.tokenizer_manager.is_pause = True  # all else is the manager's own
    assert manager.is_pause
    assert server.tokenizer_manager.is_pause


async def test_a_version_that_changes_without_a_pause_is_not_known(server: Any) -> None:
    asking = await begun(server, [7])
    server.global_steps = 5
    await server.abort_all_requests()
    assert (await asking).extra_fields["global_steps"] is None


async def test_a_pause_waits_for_a_resumption_that_has_begun(server: Any) -> None:
    """The door must not be open while SGLang is paused: the pause would wait for generations that cannot begin."""
    await server.abort_all_requests()
    async with server.tokenizer_manager.is_pause_cond:  # SGLang holds it while weights are updated
        resuming = asyncio.ensure_future(server.resume_generation())
        await asyncio.sleep(0)
        pausing = asyncio.ensure_future(server.abort_all_requests())
        await asyncio.sleep(0)
    await resuming
    asking = asyncio.ensure_future(server.generate([7], {}, "r"))
    async with asyncio.timeout(60):
        await pausing
        output = await asking
    assert (output.stop_reason, output.extra_fields["paused"]) == ("abort", True)
    assert not server._admission.is_open
    assert server.tokenizer_manager.is_pause


async def test_a_server_ends_soon_after_one_of_sglangs_processes(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's own watch sends SIGQUIT, which every process of a script's background job ignores.

    Ray kills an actor's children some 0.03 s before the actor itself. This is the end of a run, and nothing has died.
    """
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    from verl_multiturn.verl_bridge.servers import server as module

    children = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1e6,)) for _ in range(2)]
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def launch(self: Any, master_address: str | None) -> None:
        for child in children:
            child.start()

    def end(status: int) -> None:
        if not exited.done():
            exited.set_result(status)

    monkeypatch.setattr(SGLangHttpServer, "launch_server", launch)
    server.config = SimpleNamespace(prompt_length=50, response_length=50, max_model_len=None)
    monkeypatch.setattr(module.os, "_exit", end)
    await server.launch_server(master_address=None)
    assert not exited.done()
    assert (await server.cache_need("client", [(1.0, 150)], 0.9)).use == 0.75  # of 200 tokens
    full = [(1.0, 150), (2.0, 150)]
    assert (await server.cache_need("client", full, 0.9)) == (1.5, 1.0, pytest.approx(30))
    server._admission.close(leaves=True)
    everything = math.inf, math.inf
    assert (await server.cache_need("client", full, 0.9)) == (1.5, *everything)  # none waits for a server that leaves
    try:
        children[0].kill()
        children[0].join()
        await asyncio.sleep(0.3)  # ten times Ray's own time
        assert (exited.done(), caplog.messages) == (False, [])
        async with asyncio.timeout(60):
            assert await exited == 1
        assert caplog.messages == [
            f"SGLang's process {children[0].name} ({children[0].pid}) has died, and this server with it"
        ]
    finally:
        asyncio.get_running_loop().remove_reader(children[1].sentinel)
        children[1].kill()
        children[1].join()


def test_more_conversations_than_rays_own_limit_may_wait_in_a_pause() -> None:
    """The call that ends the pause would otherwise queue behind those that wait for it."""
    from verl_multiturn.verl_bridge.servers.replica import AsyncSGLangReplica

    replica: Any = object.__new__(AsyncSGLangReplica)
    for sequences in (256, 2048, 200_000):
        replica.config = SimpleNamespace(max_num_seqs=sequences)
        assert replica.max_concurrency > max(sequences, 50_000)
