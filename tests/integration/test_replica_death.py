"""A replica whose server dies takes part in nothing; the trainer starts a standalone one again, or ends the run."""

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.integration.dying_servers import Server, Worker, balancer_of, kill, listed, start, until

pytestmark = [pytest.mark.stack, pytest.mark.deaths, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def replica(cluster: None, request: pytest.FixtureRequest) -> Any:
    """Return a replica of our class, with stand-ins as its worker and its server."""
    import ray

    from verl_multiturn.verl_bridge.servers.replica import AsyncSGLangReplica

    one: Any = object.__new__(AsyncSGLangReplica)
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 1, "pipeline_model_parallel_size": 1}
    one.config = SimpleNamespace(**sizes, max_num_seqs=16)
    one.workers = [ray.remote(num_cpus=0)(Worker).remote()]
    one.world_size = one.nnodes = one.gpus_per_node = one.gpus_per_replica_node = 1
    one.replica_rank = abs(hash(request.node.name))
    one.is_reward_model = one.is_teacher_model = False
    one.name_suffix = ""
    one.rollout_mode = one.model_config = None
    one.servers, one.serves, one._asked, one.heard = [], True, None, 0.0
    one.server_class = ray.remote(num_cpus=0)(Server)
    asyncio.run(one.launch_servers())
    return one


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

    from verl_multiturn.verl_bridge.servers import replica as module

    assert replica.look(60)
    kill(replica.servers[0], signal.SIGSTOP)
    assert replica.look()
    monkeypatch.setattr(module, "_HUNG_S", 0.0)
    assert not replica.look()
    with pytest.raises(RayActorError):
        ray.get(replica.servers[0].pid.remote())


def test_a_call_to_a_replica_that_hangs_ends(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.servers import replica as module

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
    until(lambda: standalone.look(60) or listed(balancer) == [replica.server_address])


def test_a_server_is_not_listed_again_before_it_answers(replica: Any, servers: tuple[Any, Any]) -> None:
    """A client knows sooner than the trainer that a server has died; others must not be sent to it again."""
    import ray

    standalone, balancer = servers
    standalone.look(60)
    kill(replica.servers[0], signal.SIGSTOP)
    ray.get(balancer.remove_servers.remote([replica.server_address]))
    for _ in range(5):
        standalone.look(0.2)
        assert listed(balancer) == []
    ray.kill(replica.servers[0])


def test_a_colocated_server_that_only_a_client_lost_is_listed_again(
    replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks

    balancer = balancer_of(**{replica.server_address: replica.server_handle})
    trainer: Any = object.__new__(MultiTurnHooks)
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: [replica], global_load_balancer=balancer)
    trainer.look_after_servers()
    ray.get(balancer.remove_servers.remote([replica.server_address]))
    until(lambda: trainer.look_after_servers() or listed(balancer) == [replica.server_address])


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
    from verl_multiturn.verl_bridge.servers.server_loss import EngineOfServer

    class Adapter:
        async def flush_cache(self) -> dict[str, Any]:
            raise OSError("connection refused")

    server = start()
    await server.pid.remote()  # it has started
    with pytest.raises(OSError, match="connection refused"):
        await EngineOfServer(Adapter(), server).flush_cache()
    kill(server)
    engine = EngineOfServer(Adapter(), server)
    assert await engine.flush_cache() == {}
    assert await engine.anything_else("bucket") == {}


async def test_an_adapter_without_its_server_names_no_models() -> None:
    """It gets a request for the previous adapter, on one of the workers that gather weights together."""
    from verl_multiturn.verl_bridge.servers.server_loss import EngineOfServer

    engine = EngineOfServer(None, None)
    assert await engine.available_models() == {"data": []}
    assert await engine.unload_lora_adapter("name") == {}


def test_a_server_that_gets_changes_of_weights_alone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import servers as module

    alive, removed = [False, True], list[str]()
    listing = SimpleNamespace(remove=removed.append, put_back=lambda serving: None)
    monkeypatch.setattr(module, "BalancerEntries", lambda balancer: listing)

    class Replica:
        def __init__(self, rank: int) -> None:
            self.replica_rank, self.server_address, self.serves = rank, f"s{rank}", True

        def look(self, wait_s: float) -> bool:
            return alive[self.replica_rank]

    standalone = module.StandaloneServers([Replica(0), Replica(1)], None, restarts=False)
    standalone.look()
    assert (removed, standalone.ready(), standalone.any_serves()) == (["s0"], [], True)
    alive[1] = False
    with pytest.raises(module.ServerDied, match="none can be started again where only changes of weights are sent"):
        standalone.look()


class Trainer:
    """A trainer that saves checkpoints, as far as `save_last` goes."""

    saves_in_background = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = OmegaConf.create({"trainer": {"default_local_dir": str(folder)}})
        self.global_steps = 8
        self.saved_step: int | None = None
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
        if not self.saves_in_background:
            (self.folder / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    from verl_multiturn.verl_bridge.trainer import checkpoint_writes

    trainer = Trainer(tmp_path)
    monkeypatch.setattr(checkpoint_writes, "list_prompts", {"val": {"u": {}}}.get)
    monkeypatch.setattr(checkpoint_writes, "clear_groups", trainer.clear_groups)
    return trainer


def test_the_weights_of_the_last_whole_step_are_saved(trainer: Trainer, tmp_path: Path) -> None:
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import save_last

    again = "start the same command again with trainer.resume_mode=auto, which goes on from"
    said = f"the weights of step 7 are saved in '{tmp_path}/global_step_7'; {again} them"
    assert save_last(trainer, 7).said == said
    assert trainer.done == [("cancelled", ["u"]), ("cleared", ["u"], "val"), ("saved", 7)]
    trainer.saved_step = 7
    assert save_last(trainer, 7).said == said
    assert len(trainer.done) == 3


def test_weights_that_are_saved_in_the_background_are_not_told_as_saved(trainer: Trainer, tmp_path: Path) -> None:
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import save_last

    trainer.saves_in_background = True
    assert save_last(trainer, 7).said == (
        f"the weights of step 7 are being saved in '{tmp_path}/global_step_7'; start the same command again with "
        "trainer.resume_mode=auto, which goes on from them if latest_checkpointed_iteration.txt names 7 by then, and "
        "else from the checkpoint before"
    )


def test_the_checkpoint_of_an_earlier_run_is_not_taken_for_this_ones(trainer: Trainer, tmp_path: Path) -> None:
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import save_last

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")  # before trainer.resume_mode=disable
    save_last(trainer, 7)
    assert trainer.done[-1] == ("saved", 7)


def test_nothing_is_saved_within_a_step_or_before_the_first(trainer: Trainer) -> None:
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import save_last

    assert save_last(trainer, None).said.startswith(
        "nothing was saved, because a step was half trained; start the same"
    )
    assert save_last(trainer, 0).said == "no step was trained yet, so nothing was saved"
    assert trainer.done == []


def test_a_checkpoint_that_cannot_be_saved_is_told(trainer: Trainer) -> None:
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import save_last

    trainer.config.trainer.default_local_dir = "/disk"
    assert save_last(trainer, 7).said.startswith(
        "its weights could not be saved (OSError: no space left on device); start"
    )


def test_a_run_that_loses_a_colocated_server_ends_with_its_last_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import LastCheckpoint
    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler
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
            sizes = {"data": {"train_batch_size": 8}, "actor_rollout_ref": {"rollout": {"n": 4}}}
            self.config, self.parameter_sync_step = OmegaConf.create(sizes), 2
            self._verifier = SimpleNamespace(start=lambda rows: done.append(f"{rows} rows"))
            replica = SimpleNamespace(look=lambda wait_s: next(looks), replica_rank=0, server_address="10.0.0.1:80")
            self._sampler, self._outages = CustomSampler(None), SimpleNamespace(causes=None)
            self.llm_server_manager = SimpleNamespace(get_replicas=lambda: [replica])
            self._listing = SimpleNamespace(put_back=lambda serving: done.append(f"list {[*serving]}"))
            self.checkpoint_manager = SimpleNamespace(
                abort_replicas=lambda: done.append("abort"), sleep_replicas=lambda: done.append("sleep")
            )

    monkeypatch.setattr(hooks, "close_workers", lambda workers: None)
    monkeypatch.setattr(hooks, "save_last", lambda trainer, step: LastCheckpoint(f"step {step} is saved"))
    with pytest.raises(ServerDied) as raised:
        Ours().fit(SimpleNamespace(agent_loop_workers=[]))
    assert str(raised.value) == (
        "generation server 0 (10.0.0.1:80) has died, and shares its devices with the trainer, so that it cannot be "
        "started again beside it; step 4 is saved"
    )
    listed = "list ['10.0.0.1:80']"
    assert done == ["first weights", "16 rows", listed, "weights", listed, "abort", "sleep"]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize(("asked_in", "saved", "step"), [(1, ("saved", 1), 1), (0, None, 0), (3, ("saved", 3), 3)])
def test_a_run_that_is_asked_to_stop_saves_where_the_next_step_would_begin(
    mode: str,
    asked_in: int,
    saved: tuple[str, int] | None,
    step: int,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `asked_in=0` the request is there before the first step."""
    from verl_multiturn.runs.stop_request import StopRequest
    from verl_multiturn.verl_bridge.trainer import hooks, trainers
    from verl_multiturn.verl_bridge.trainer.groups.custom_sampler import CustomSampler

    done, request = trainer.done, StopRequest(tmp_path)
    ours = {
        "sync": trainers.MultiTurnSync,
        "colocate_async": trainers.MultiTurnColocateAsync,
        "separate_async": trainers.MultiTurnSeparateAsync,
    }[mode]

    def fit(self: Any, agent_loop_manager: Any) -> None:
        self._whole = self.global_steps = 0
        if asked_in == 0:
            request.make()
        for self.global_steps in range(1, 6):
            self.on_step_begin()
            done.append(f"step {self.global_steps}")
            if self.global_steps == asked_in:
                request.make()
            self._whole = self.global_steps

    for verls in ours.__mro__[2:]:
        if "fit" in vars(verls):
            monkeypatch.setattr(verls, "fit", fit)
    made = ours.__new__(ours)
    made.__dict__.update(vars(trainer))
    made._sampler = CustomSampler(None)
    made._outages = SimpleNamespace(look=lambda: None, causes=None)
    made.hybrid_rollout_config, made.current_mode = SimpleNamespace(enable_switch=False), None  # of separate_async
    made.checkpoint_manager = SimpleNamespace(
        abort_replicas=lambda: done.append("abort"), sleep_replicas=lambda: done.append("sleep")
    )

    def save() -> None:
        trainer.global_steps = made.global_steps
        trainer._save_checkpoint()

    made._save_checkpoint = save
    made._shutdown_dump_executor = lambda: done.append("written")
    monkeypatch.setattr(hooks, "close_workers", lambda workers: done.append("closed"))
    manager = SimpleNamespace(agent_loop_workers=[], cancel=trainer.cancel)
    made.agent_loop_manager = manager
    assert made.fit(manager) is None
    steps = [f"step {number}" for number in range(1, asked_in + 1)]
    saving = [("cancelled", ["u"]), ("cleared", ["u"], "val"), saved] if saved else []
    assert done == [*steps, "abort", "sleep", *saving, "written", "closed"]
    answer = request.take()
    assert answer is not None
    assert answer.step == step
    if not step:
        assert answer.said == "no step was trained yet, so nothing was saved"


def test_a_run_whose_checkpoint_cannot_be_saved_fails(trainer: Trainer, tmp_path: Path) -> None:
    from verl_multiturn.runs.stop_request import StopRequest
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import StopDue, stop_with_checkpoint

    request = StopRequest(tmp_path)
    request.make()
    trainer.config.trainer.default_local_dir = "/disk"
    with pytest.raises(StopDue, match="the run was asked to end; its weights could not be saved"):
        stop_with_checkpoint(trainer, request, 7)
    assert not request.is_made()
