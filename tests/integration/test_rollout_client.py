"""Our client for verl's servers: attempts, versions, pauses, cancellation."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_multiturn.rollout.engines.protocol import Ask
from verl_multiturn.verl_bridge.servers.admission import PAUSED

pytestmark = pytest.mark.stack


class Remote:
    """A function that is called as a method of a Ray actor is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.ensure_future(self.function(*args, **kwargs))


class Server:
    """A server that samples its script: a list of tokens and reasons for each attempt, or an exception.

    It counts on from the last id that it is given, so that each token shows its place.
    """

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.asked: list[tuple[list[int], int]] = []
        self.aborted: list[str] = []
        self.patience: list[float] = []
        self.open = asyncio.Event()
        self.leaves = False
        self.stop = asyncio.Event()
        self.last = asyncio.Event()
        for name in ("generate", "resumed", "abort_request"):
            setattr(self, name, Remote(getattr(self, name)))

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append((prompt_ids, sampling_params["max_new_tokens"]))
        if not self.script[1:]:
            self.last.set()
        count, reason, version, paused = self.script.pop(0)
        if reason == "never":
            await self.stop.wait()
            reason = "abort"
        ids = [prompt_ids[-1] + i + 1 for i in range(count)]
        fields = {"global_steps": version, PAUSED: paused}
        return TokenOutput(token_ids=ids, log_probs=[-float(i) for i in ids], stop_reason=reason, extra_fields=fields)

    async def resumed(self, patience_s: float) -> bool:
        self.patience.append(patience_s)
        await self.open.wait()
        return not self.leaves

    async def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.stop.set()


class Balancer:
    """A load balancer that hands out its servers in turn."""

    def __init__(self, *servers: Server) -> None:
        self.servers = list(servers)
        self.released: list[str] = []
        for name in ("require_acquire_fields", "require_release_fields", "acquire_server", "release_server"):
            setattr(self, name, Remote(getattr(self, name)))

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def acquire_server(self, request_id: str) -> tuple[str, Server]:
        server = self.servers.pop(0) if len(self.servers) > 1 else self.servers[0]
        return "server", server

    async def release_server(self, server_id: str) -> None:
        self.released.append(server_id)


def client(*servers: Server) -> Any:
    return client_of(Balancer(*servers))


def client_of(balancer: Any) -> Any:
    from verl_multiturn.verl_bridge.servers.client import RolloutClient

    rollout = {"name": "sglang_async", "response_length": 64}
    return RolloutClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), balancer)


async def sample(of: Any, most: int = 20) -> Any:
    return await of.generate("r1", prompt_ids=[10], sampling_params={"temperature": 1.0, "max_new_tokens": most})


async def test_a_generation_goes_on_after_pauses() -> None:
    server = Server([(3, "abort", 4, True), (0, "abort", 4, True), (2, "abort", 5, True), (1, "stop", 6, False)])
    asking = asyncio.ensure_future(sample(client(server)))
    await asyncio.sleep(0.05)
    assert (len(server.asked), asking.done()) == (1, False)  # it waits for the server, and does not ask again
    server.open.set()
    output = await asking
    assert output.token_ids == [11, 12, 13, 14, 15, 16]
    assert output.log_probs == [-11.0, -12.0, -13.0, -14.0, -15.0, -16.0]
    assert output.stop_reason == "stop"
    assert output.extra_fields == {
        "segments": [(4, 3), (5, 2), (6, 1)],
        "global_steps": 6,
        "min_global_steps": 4,
        "max_global_steps": 6,
    }
    # Each attempt is sent with the rest of the budget.
    assert [(len(ids), most) for ids, most in server.asked] == [(1, 20), (4, 17), (4, 17), (6, 15)]


async def test_every_token_has_the_version_of_its_attempt() -> None:
    from verl_multiturn.verl_bridge.servers.verl_engine import VerlEngine

    server = Server([(3, "abort", 4, True), (2, "abort", 5, True), (1, "stop", None, False)])
    server.open.set()
    generation = await VerlEngine(client(server).generate).generate(Ask("r1", [10], {}, 20))
    assert generation.versions == [4, 4, 4, 5, 5, -1]


async def test_what_the_first_prefill_found_in_the_cache() -> None:
    from verl_multiturn.verl_bridge.servers.verl_engine import VerlEngine

    class Caching(Server):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            output = await super().generate(*args, **kwargs)
            if output.token_ids:
                output.extra_fields["num_cached_tokens"] = 10 * len(self.script)
            return output

    # The first attempt reached a paused server, which has read nothing.
    server = Caching([(0, "abort", 4, True), (3, "abort", 4, True), (2, "stop", 5, False)])
    server.open.set()
    assert (await VerlEngine(client(server).generate).generate(Ask("r1", [10], {}, 20))).cached == 10
    silent = client(Server([(1, "stop", 5, False)]))
    assert (await VerlEngine(silent.generate).generate(Ask("r1", [10], {}, 20))).cached is None


async def test_the_budget_ends_an_interrupted_generation() -> None:
    server = Server([(3, "abort", 4, True)])
    output = await sample(client(server), most=3)
    assert (output.token_ids, output.stop_reason) == ([11, 12, 13], "length")


async def test_a_server_that_leaves_is_left() -> None:
    leaving, other = Server([(2, "abort", 4, True)]), Server([(1, "stop", 5, False)])
    leaving.leaves = True
    leaving.open.set()
    output = await sample(client(leaving, other))
    assert (output.token_ids, output.extra_fields["segments"]) == ([11, 12, 13], [(4, 2), (5, 1)])


async def test_a_server_that_is_coming_back_is_given_time() -> None:
    """The load balancer may name a server some time before it samples again."""
    server = Server([(2, "abort", 4, True), (0, "abort", 4, True), (1, "stop", 5, False)])
    server.leaves = True
    server.open.set()
    output = await sample(client(server))
    assert (output.token_ids, server.patience) == ([11, 12, 13], [0.0, 1.0])


async def test_a_server_that_aborts_without_a_reason_is_not_asked_for_ever() -> None:
    server = Server([(0, "abort", 4, False)] * 9)
    output = await sample(client(server))
    assert (output.token_ids, output.stop_reason, len(server.asked)) == ([], "abort", 3)
    # verl's own agent loops write these into the row's tag, of which verl's metrics make numbers.
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (4, 4)
    assert output.extra_fields["segments"] == []


async def test_a_cancelled_generation_is_stopped_and_returns_what_it_has() -> None:
    server = Server([(3, "abort", 4, True), (2, "never", 5, False)])
    server.open.set()
    asking = asyncio.ensure_future(sample(client(server)))
    await server.last.wait()
    asking.cancel()
    output = await asking
    assert (output.token_ids, output.stop_reason) == ([11, 12, 13, 14, 15], "abort")
    assert output.extra_fields["segments"] == [(4, 3), (5, 2)]


async def test_a_generation_that_is_cancelled_in_a_pause_returns_what_it_has() -> None:
    server = Server([(3, "abort", 4, True)])
    asking = asyncio.ensure_future(sample(client(server)))
    await server.last.wait()
    await asyncio.sleep(0.01)
    asking.cancel()
    assert (await asking).token_ids == [11, 12, 13]


async def test_a_generation_that_is_cancelled_before_its_first_token_is_cancelled() -> None:
    server = Server([(0, "never", 5, False)])
    asking = asyncio.ensure_future(sample(client(server)))
    await server.last.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert server.aborted


async def test_nothing_is_remembered_of_a_generation() -> None:
    server = Server([(1, "stop", 4, False)])
    ours = client(server)
    await sample(ours)
    assert (ours._servers, ours._attempts, ours._load_balancer.released) == ({}, {}, ["server"])


class Router:
    """A router of a user's, as `rollout.router_config_path` names it: it looks at the prompts."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        self.servers, self.config = dict(servers), config
        self.asked: list[tuple[str, list[int]]] = []
        self.released: list[tuple[str, str]] = []

    async def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    async def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def acquire_server(self, request_id: str, prompt_ids: list[int]) -> tuple[str, Any]:
        if not self.servers:
            raise RuntimeError("No available servers in load balancer")
        self.asked.append((request_id, list(prompt_ids)))
        return next(iter(self.servers.items()))

    async def release_server(self, server_id: str, request_id: str) -> None:
        self.released.append((server_id, request_id))

    async def remove_servers(self, server_ids: list[str]) -> None:
        for server_id in server_ids:
            del self.servers[server_id]


async def test_a_router_of_the_users_is_asked_with_each_attempts_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verl makes the router from its YAML; attempts behind a pause and a server's death ask it again."""
    from ray.exceptions import ActorDiedError
    from verl.workers.rollout import router as verls

    class Actor:
        """Ray's actor of a class, within this process."""

        def __init__(self, made: type) -> None:
            self.made = made

        def remote(self, *args: Any) -> Any:
            inside = self.made(*args)
            names = [name for name in dir(inside) if not name.startswith("_")]
            methods = {name: getattr(inside, name) for name in names if callable(getattr(inside, name))}
            return SimpleNamespace(inside=inside, **{name: Remote(method) for name, method in methods.items()})

    class Dying(Server):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            if not self.script:
                raise ActorDiedError
            return await super().generate(*args, **kwargs)

    first, second = Dying([(2, "abort", 3, True)]), Server([(2, "stop", 4, False)])
    first.open.set()
    monkeypatch.setattr(verls.ray, "remote", Actor)
    path = tmp_path / "router.yaml"
    path.write_text(f"router_class: {__name__}.Router\nkind: mine\n")
    handle = verls.get_router_handle(servers={"a": first, "b": second}, router_config_path=str(path))
    assert handle.inside.config == {"router_class": f"{__name__}.Router", "kind": "mine"}
    asking = client_of(handle)
    output = await sample(asking)
    assert output.extra_fields["segments"] == [(3, 2), (4, 2)]
    given = [prompt for _, prompt in handle.inside.asked]
    assert [len(prompt) - len(given[0]) for prompt in given] == [0, 2, 2]
    assert [server for server, _ in handle.inside.released] == ["a", "a", "b"]
    assert list(handle.inside.servers) == ["b"]
