"""A generation server in a real Ray dies or hangs: clients go on elsewhere, and the trainer starts it again."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

pytestmark = [pytest.mark.stack, pytest.mark.deaths, pytest.mark.filterwarnings("ignore::UserWarning")]

DEADLY, ENDLESS = "deadly", "endless"


class Server:
    """A server that samples its script: tokens, stop reason, version and pause of each attempt, in order.

    It counts on from the last id that it is given. In a `DEADLY` attempt it dies; an `ENDLESS` one never ends.
    """

    def __init__(self, script: Any = (), **_: Any) -> None:
        self.script = list(script)
        self.asked: list[list[int]] = []
        self.changed = asyncio.Event()
        self.calls: list[str] = []

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        self.asked.append(prompt_ids)
        self.changed.set()
        attempt = self.script.pop(0)
        if attempt == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == ENDLESS:
            await asyncio.sleep(1e6)
        count, reason, version, paused = attempt
        return SimpleNamespace(
            token_ids=[prompt_ids[-1] + i + 1 for i in range(count)],
            log_probs=[-1.0] * count,
            routed_experts=None,
            num_preempted=None,
            stop_reason=reason,
            extra_fields={"global_steps": version, "paused": paused},
        )

    async def resumed(self, patience_s: float) -> bool:
        await asyncio.sleep(1e6)
        return True

    async def abort_request(self, request_id: str) -> None:
        return

    async def reached(self, attempts: int) -> list[list[int]]:
        """Wait for so many attempts, and return their prompts."""
        while len(self.asked) < attempts:
            self.changed.clear()
            await self.changed.wait()
        return self.asked

    async def pid(self) -> int:
        return os.getpid()

    # What a replica asks of its server.

    async def launch_server(self, **_: Any) -> None:
        return

    async def get_server_address(self) -> tuple[str, int]:
        return "10.0.0.1", os.getpid()

    async def abort_all_requests(self, reject_request: bool) -> None:
        self.calls.append("abort")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def called(self) -> list[str]:
        return self.calls


class Worker:
    """The worker beside a server, which keeps an adapter of it."""

    def __init__(self) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        self.server_adapter = SimpleNamespace(_engine="of the dead server")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def start(*script: Any) -> Any:
    import ray

    return ray.remote(num_cpus=0)(Server).remote(script)


def balancer_of(**servers: Any) -> Any:
    import ray
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    return ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote(servers)


def listed(balancer: Any) -> list[str]:
    import ray

    return list(ray.get(balancer.get_all_servers.remote()))


def kill(server: Any, how: int = signal.SIGKILL) -> None:
    import ray

    os.kill(ray.get(server.pid.remote()), how)


def client_of(balancer: Any) -> Any:
    from verl_multiturn.verl_bridge.client import RolloutClient

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
    assert await other.reached.remote(1) == [[10, 11, 12]]  # what the dying attempt had sampled is lost
    assert listed(balancer) == ["other"]


async def test_a_generation_waits_for_a_server_that_is_started_again(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge import client as module

    monkeypatch.setattr(module, "_SELDOM_S", 0.1)
    balancer = balancer_of(first=start((2, "abort", 3, False), DEADLY))
    asking = sample(client_of(balancer))
    await asyncio.to_thread(until, lambda: not listed(balancer))
    await asyncio.sleep(0.3)
    assert not asking.done()
    balancer.add_servers.remote({"first/1": start((1, "stop", 5, False))})
    assert (await asking).extra_fields["segments"] == [(3, 2), (5, 1)]


async def test_a_generation_without_a_server_fails_in_the_end(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge import client as module

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
    await first.reached.remote(1)
    await asyncio.sleep(0.2)
    balancer.add_servers.remote({"other": other})
    kill(first)
    assert (await asking).extra_fields["segments"] == [(3, 2), (4, 1)]


async def test_a_server_that_hangs_does_not_hold_up_a_cancellation(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge import client as module

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


@pytest.fixture
def replica(cluster: None, request: pytest.FixtureRequest) -> Any:
    """Return a replica of our class, with stand-ins as its worker and its server."""
    import ray

    from verl_multiturn.verl_bridge.replica import AsyncSGLangReplica

    one: Any = object.__new__(AsyncSGLangReplica)
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 1, "pipeline_model_parallel_size": 1}
    one.config = SimpleNamespace(**sizes, max_num_seqs=16)
    one.workers = [ray.remote(num_cpus=0)(Worker).remote()]
    one.world_size = one.nnodes = one.gpus_per_node = one.gpus_per_replica_node = 1
    one.replica_rank = abs(hash(request.node.name))
    one.is_reward_model = one.is_teacher_model = False
    one.name_suffix = ""
    one.rollout_mode = one.model_config = None
    one.servers, one.serves, one._asked = [], True, None
    one.server_class = ray.remote(num_cpus=0)(Server)
    asyncio.run(one.launch_servers())
    return one


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_dead_replica_takes_part_in_nothing(replica: Any) -> None:
    assert replica.look(60)
    kill(replica.servers[0])
    until(lambda: not replica.look(1))
    asyncio.run(replica.abort_all_requests())
    asyncio.run(replica.resume_generation())
    assert not replica.serves


def test_a_replica_that_dies_in_a_call_is_noted(replica: Any) -> None:
    kill(replica.servers[0])
    asyncio.run(replica.abort_all_requests())
    assert not replica.serves


def test_a_replica_that_hangs_is_ended(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import RayActorError

    from verl_multiturn.verl_bridge import replica as module

    assert replica.look(60)
    kill(replica.servers[0], signal.SIGSTOP)
    assert replica.look()
    monkeypatch.setattr(module, "_HUNG_S", 0.0)
    assert not replica.look()
    with pytest.raises(RayActorError):
        ray.get(replica.servers[0].pid.remote())


def test_a_call_to_a_replica_that_hangs_ends(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge import replica as module

    kill(replica.servers[0], signal.SIGSTOP)
    monkeypatch.setattr(module, "_CONTROL_S", 0.2)
    asyncio.run(replica.abort_all_requests())
    assert not replica.serves


@pytest.fixture
def servers(replica: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the standalone servers of a trainer, here one, and their load balancer."""
    from verl_multiturn.verl_bridge.trainer import servers as module

    monkeypatch.setattr(module, "_REST_S", 0.5)
    balancer = balancer_of(**{replica.server_address: replica.server_handle})
    return module.StandaloneServers([replica], balancer), balancer


def test_a_dead_server_is_started_again_and_gets_weights_before_it_joins(
    replica: Any, servers: tuple[Any, Any]
) -> None:
    import ray

    standalone, balancer = servers
    first = replica.server_address
    kill(replica.servers[0])
    until(lambda: standalone.look(1) or not replica.serves)
    assert (listed(balancer), standalone.any_serves()) == ([], False)
    until(lambda: standalone.look() or bool(standalone.ready()))
    assert (listed(balancer), replica.serves) == ([], False)

    def send() -> str:
        assert (listed(balancer), replica.serves) == ([], True)
        asyncio.run(replica.abort_all_requests())
        asyncio.run(replica.resume_generation())
        return "metrics"

    assert standalone.send_weights(send) == "metrics"
    assert replica.server_address != first
    assert listed(balancer) == [f"{replica.server_address}/1"]
    assert ray.get(replica.server_handle.called.remote()) == ["abort", "resume"]
    engine = ray.get(replica.workers[0].__ray_call__.remote(lambda it: it.server_adapter._engine))
    assert engine is None  # the adapter looks for the new server
    assert standalone.look(60) is None
    assert replica.serves


def test_a_server_that_only_a_client_lost_is_listed_again(replica: Any, servers: tuple[Any, Any]) -> None:
    import ray

    standalone, balancer = servers
    ray.get(balancer.remove_servers.remote([replica.server_address]))
    standalone.look(60)
    assert listed(balancer) == [replica.server_address]


def test_a_run_ends_when_no_server_can_be_started_again(replica: Any, servers: tuple[Any, Any]) -> None:
    import ray

    from verl_multiturn.verl_bridge.trainer.servers import ServerDied

    standalone, _ = servers
    ray.kill(replica.workers[0])  # as with its node
    kill(replica.servers[0])
    with pytest.raises(ServerDied, match="none could be started again in 3 attempts"):
        until(lambda: standalone.look(1) is not None)


def test_a_colocated_server_is_not_started_again(replica: Any) -> None:
    from verl_multiturn.verl_bridge.trainer.servers import ServerDied, require_alive

    require_alive([replica, object()], 60)
    kill(replica.servers[0])
    with pytest.raises(ServerDied, match=r"generation server \d+ \(10\.0\.0\.1:\d+\) has died"):
        until(lambda: require_alive([replica], 1) is not None)


async def test_an_adapter_outlives_its_server(cluster: None) -> None:
    from verl_multiturn.verl_bridge.lost_server import EngineOfServer

    class Adapter:
        async def flush_cache(self) -> dict[str, Any]:
            raise OSError("connection refused")

    server = start()
    with pytest.raises(OSError, match="connection refused"):
        await EngineOfServer(Adapter(), server).flush_cache()
    kill(server)
    engine = EngineOfServer(Adapter(), server)
    assert await engine.flush_cache() == {}
    assert await engine.anything_else("bucket") == {}


class Trainer:
    """A trainer that saves checkpoints, as far as `save_last` goes."""

    def __init__(self, folder: Path) -> None:
        self.config = OmegaConf.create({"trainer": {"default_local_dir": str(folder)}})
        self.global_steps = 8
        self.agent_loop_manager = self
        self.done: list[Any] = []

    def cancel(self, uids: list[str]) -> None:
        self.done.append(("cancelled", uids))

    def clear_groups(self, uids: list[str], partition: str) -> None:
        self.done.append(("cleared", uids, partition))

    def _save_checkpoint(self) -> None:
        if "disk" in self.config.trainer.default_local_dir:
            raise OSError("no space left on device")
        self.done.append(("saved", self.global_steps))


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    from verl_multiturn.verl_bridge.trainer import ending

    trainer = Trainer(tmp_path)
    monkeypatch.setattr(ending, "list_prompts", {"val": {"u": {}}}.get)
    monkeypatch.setattr(ending, "clear_groups", trainer.clear_groups)
    return trainer


def test_the_weights_of_the_last_whole_step_are_saved(trainer: Trainer, tmp_path: Path) -> None:
    from verl_multiturn.verl_bridge.trainer.ending import save_last

    again = "start the same command again with trainer.resume_mode=auto, which goes on from"
    said = f"the weights of step 7 are saved in '{tmp_path}/global_step_7'; {again} them"
    assert save_last(trainer, 7) == said
    assert trainer.done == [("cancelled", ["u"]), ("cleared", ["u"], "val"), ("saved", 7)]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert save_last(trainer, 7) == said
    assert len(trainer.done) == 3


def test_nothing_is_saved_within_a_step_or_before_the_first(trainer: Trainer) -> None:
    from verl_multiturn.verl_bridge.trainer.ending import save_last

    assert save_last(trainer, None).startswith("nothing was saved, because a step was half trained; start the same")
    assert save_last(trainer, 0) == "no step was trained yet, so nothing was saved"
    assert trainer.done == []


def test_a_checkpoint_that_cannot_be_saved_is_told(trainer: Trainer) -> None:
    from verl_multiturn.verl_bridge.trainer.ending import save_last

    trainer.config.trainer.default_local_dir = "/disk"
    assert save_last(trainer, 7).startswith("its weights could not be saved (OSError: no space left on device); start")


def test_a_run_that_loses_a_colocated_server_ends_with_its_last_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks
    from verl_multiturn.verl_bridge.trainer.servers import ServerDied

    done: list[str] = []

    class Verls:
        def fit(self, agent_loop_manager: Any) -> None:
            self.global_steps = 3
            self.on_init_end()
            self.global_steps = 4
            self.look_after_servers()
            self.on_step_end()
            self.global_steps = 5
            self.look_after_servers()
            self.look_after_servers()

        def on_init_end(self) -> None:
            done.append("first weights")

        def on_step_end(self) -> None:
            done.append("weights")

    class Ours(hooks.MultiTurnHooks, Verls):
        def __init__(self) -> None:
            looks = iter([True, True, True, False])
            replica = SimpleNamespace(look=lambda wait_s: next(looks), replica_rank=0, server_address="10.0.0.1:80")
            self.replay_buffer = None
            self.llm_server_manager = SimpleNamespace(get_replicas=lambda: [replica])
            self.checkpoint_manager = SimpleNamespace(
                abort_replicas=lambda: done.append("abort"), sleep_replicas=lambda: done.append("sleep")
            )

    monkeypatch.setattr(hooks, "close_workers", lambda workers: None)
    monkeypatch.setattr(hooks, "save_last", lambda trainer, step: f"step {step} is saved")
    with pytest.raises(ServerDied) as raised:
        Ours().fit(SimpleNamespace(agent_loop_workers=[]))
    assert str(raised.value) == (
        "generation server 0 (10.0.0.1:80) has died, and shares its devices with the trainer, so that it cannot be "
        "started again beside it; step 4 is saved"
    )
    assert done == ["first weights", "weights", "abort", "sleep"]
