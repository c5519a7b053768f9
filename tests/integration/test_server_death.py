"""A generation server in a real Ray dies or hangs: clients go on elsewhere."""

import asyncio
import signal
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.integration.dying_servers import DEADLY, ENDLESS, balancer_of, kill, listed, start, until

pytestmark = [pytest.mark.stack, pytest.mark.deaths, pytest.mark.filterwarnings("ignore::UserWarning")]


def client_of(balancer: Any) -> Any:
    from verl_multiturn.verl_bridge.servers.client import RolloutClient

    rollout = {"name": "sglang_async", "response_length": 64}
    return RolloutClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), balancer)


def sample(client: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(client.generate("r", prompt_ids=[10], sampling_params={"max_new_tokens": 20}))


async def test_a_generation_goes_on_at_another_server(cluster: None) -> None:
    first, other = start((2, "abort", 3, False), ENDLESS), start((3, "stop", 4, False))
    balancer = balancer_of(first=first)
    asking = sample(client_of(balancer))
    await first.reached.remote(2)
    balancer.add_servers.remote({"other": other})
    kill(first)
    output = await asking
    assert (output.token_ids, output.stop_reason) == ([11, 12, 13, 14, 15], "stop")
    assert output.extra_fields["segments"] == [(3, 2), (4, 3)]
    assert await other.reached.remote(1) == [[10, 11, 12]]  # the tokens of the dying attempt are lost
    assert listed(balancer) == ["other"]


async def test_a_generation_waits_for_a_server_that_is_started_again(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.servers import client as module

    monkeypatch.setattr(module, "_SELDOM_S", 0.1)
    balancer = balancer_of(first=start((2, "abort", 3, False), DEADLY))
    asking = sample(client_of(balancer))
    await asyncio.to_thread(until, lambda: not listed(balancer))
    await asyncio.sleep(0.3)
    assert not asking.done()
    balancer.add_servers.remote({"first/1": start((1, "stop", 5, False))})
    assert (await asking).extra_fields["segments"] == [(3, 2), (5, 1)]


async def test_a_generation_without_a_server_fails_in_the_end(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.servers import client as module

    monkeypatch.setattr(module, "_SELDOM_S", 0.1)
    monkeypatch.setattr(module, "_NO_SERVER_S", 0.3)
    with pytest.raises(RuntimeError, match="No available servers"):
        await sample(client_of(balancer_of()))


async def test_a_generation_kills_at_most_three_servers(cluster: None) -> None:
    from ray.exceptions import RayActorError

    balancer = balancer_of(**{f"s{i}": start(DEADLY) for i in range(4)})
    with pytest.raises(RayActorError):
        await sample(client_of(balancer))
    assert len(listed(balancer)) == 1


async def test_a_server_that_dies_in_a_pause_is_left(cluster: None) -> None:
    first, other = start((2, "abort", 3, True)), start((1, "stop", 4, False))
    balancer = balancer_of(first=first)
    asking = sample(client_of(balancer))
    await first.awaited.remote()
    balancer.add_servers.remote({"other": other})
    kill(first)
    assert (await asking).extra_fields["segments"] == [(3, 2), (4, 1)]


async def test_a_server_that_hangs_does_not_hold_up_a_cancellation(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.servers import client as module

    monkeypatch.setattr(module, "_STOP_S", 0.3)
    server = start((2, "abort", 3, False), ENDLESS)
    asking = sample(client_of(balancer_of(first=server)))
    await server.reached.remote(2)
    kill(server, signal.SIGSTOP)
    asking.cancel()
    output = await asking
    assert (output.token_ids, output.stop_reason) == ([11, 12], "abort")
    import ray

    ray.kill(server)
