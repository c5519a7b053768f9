"""The parameters that a training worker saves are copies, also where verl's are the live ones."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture
def module() -> Iterator[Any]:
    """Return a module with a parameter sharded by FSDP2 on the CPU, of weights 1 and 2, and a plain one of weight 3."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = torch.nn.Linear(2, 1, bias=False)
        sharded.weight.data = torch.tensor([[1.0, 2.0]])
        made = torch.nn.Module()
        made.inner = fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        made.plain = torch.nn.Parameter(torch.tensor([3.0]))
        yield made
    finally:
        dist.destroy_process_group()


def weights(module: Any) -> list[float]:
    return [*module.inner.weight.to_local().flatten().tolist(), *module.plain.tolist()]


def update(module: Any) -> None:
    """Add 10 to each weight, in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(10.0)


def worker_of(name: str, module: Any) -> Any:
    """Return verl's worker or ours without the model that it would load."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    from verl_multiturn.verl_bridge.trainer.real_copies import RealCopiesWorker

    worker = object.__new__({"verl": DetachActorWorker, "ours": RealCopiesWorker}[name])
    worker.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
    worker._strategy_handlers = None
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=module))
    return worker


FIRST, SECOND = [1.0, 2.0, 3.0], [11.0, 12.0, 13.0]


@pytest.mark.parametrize(("name", "restored"), [("ours", FIRST), ("verl", SECOND)])
def test_what_was_saved_comes_back(module: Any, name: str, restored: list[float]) -> None:
    worker = worker_of(name, module)
    worker.save_model_to_cpu(0)
    update(module)
    worker.save_model_to_cpu(1)
    worker.restore_model_from_cpu(0)
    assert weights(module) == restored
    worker.restore_model_from_cpu(1)
    assert weights(module) == SECOND


@pytest.mark.parametrize(("name", "proximal"), [("ours", FIRST), ("verl", SECOND)])
def test_the_second_update_has_the_proximal_policy_of_the_first(
    module: Any, name: str, proximal: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run verl's trainer of `parameter_sync_step=2` up to where it asks the worker for `old_log_probs`."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from verl_multiturn.verl_bridge.trainer.rows.engine_log_probs import EngineLogProbs
    from verl_multiturn.verl_bridge.trainer.trainers import MultiTurnSeparateAsync

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", lambda self, batch, metrics: weights(module))
    trainer: Any = object.__new__(MultiTurnSeparateAsync)
    trainer.config = OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": False}}})
    trainer.actor_rollout_wg = worker_of(name, module)
    trainer._spared, trainer._engines = None, EngineLogProbs(None, trainer.config)
    trainer._rows, trainer.global_steps = SimpleNamespace(of=lambda batch: SimpleNamespace(stats=[])), 1
    trainer.local_trigger_step = 0
    assert trainer._compute_old_log_prob(None, {}) == FIRST
    update(module)
    trainer.local_trigger_step = 1
    assert trainer._compute_old_log_prob(None, {}) == proximal
    assert weights(module) == SECOND  # the update goes on from where it was


def test_what_is_a_copy_already_is_not_copied_again() -> None:
    from verl_multiturn.verl_bridge.trainer.real_copies import copy_apart

    module = torch.nn.Linear(2, 2)
    copied, spec = module.weight.detach().clone(), object()

    def copy(modules: Any) -> Any:
        (only,) = modules
        return {"copied": (copied, spec), "view": [only.weight.detach()[1:]], "empty": torch.empty(0)}, spec

    saved, kept = copy_apart(copy, [module])
    assert saved["copied"][0] is copied
    assert saved["copied"][1] is spec
    assert kept is spec
    assert saved["view"][0].tolist() == module.weight[1:].tolist()
    assert saved["view"][0].untyped_storage().data_ptr() != module.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("hybrid", ["True", "False"])
def test_our_trainer_chooses_this_worker(hybrid: str) -> None:
    from verl.trainer.ppo.utils import Role

    from tests.trainer_config import compose_config
    from verl_multiturn.verl_bridge.trainer.real_copies import RealCopiesWorker
    from verl_multiturn.verl_bridge.trainer.trainers import MultiTurnSeparateAsync

    trainer: Any = object.__new__(MultiTurnSeparateAsync)
    trainer.config = compose_config(
        [
            f"actor_rollout_ref.hybrid_engine={hybrid}",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "trainer.n_gpus_per_node=1",
        ]
    )
    trainer.use_critic, trainer.use_reference_policy, trainer.use_teacher_policy = True, True, False
    trainer._enable_hybrid_replicas = hybrid == "True"
    trainer._init_resource_pool_mgr()
    ours = {
        role for role, worker in trainer.role_worker_mapping.items() if worker.__ray_actor_class__ is RealCopiesWorker
    }
    roles = {Role.ActorRolloutRef} if hybrid == "True" else {Role.Actor, Role.RefPolicy}
    assert ours == roles
    assert set(trainer.role_worker_mapping) == roles | {Role.Critic}
