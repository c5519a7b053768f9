"""verl's three V1 trainers, each with `MultiTurnHooks`.

`plugin.py` imports this module, which registers the trainers. The start-up check chooses them in place of verl's.
"""

from __future__ import annotations

import logging

import ray
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_multiturn.verl_bridge.startup.our_trainer import OUR_TRAINER
from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks
from verl_multiturn.verl_bridge.trainer.real_copies import RealCopiesWorker

_verls_logger = logging.getLogger(trainer_separate_async.__name__)


@register_trainer(f"{OUR_TRAINER}sync")
class MultiTurnSync(MultiTurnHooks, PPOTrainerSync):
    """verl's trainer `sync` with our hooks."""

    mode = "sync"


@register_trainer(f"{OUR_TRAINER}colocate_async")
class MultiTurnColocateAsync(MultiTurnHooks, PPOTrainerColocateAsync):
    """verl's trainer `colocate_async` with our hooks."""

    mode = "colocate_async"


@register_trainer(f"{OUR_TRAINER}separate_async")
class MultiTurnSeparateAsync(MultiTurnHooks, PPOTrainerSeparateAsync):
    """verl's trainer `separate_async` with our hooks."""

    mode = "separate_async"

    def _setup(self) -> None:
        """Set up verl's trainer, without the line with which verl 0.9.1 ends it when `hybrid_engine=False`.

        verl gives its logger an argument there that only `print` takes, which is a TypeError at the level INFO.
        """
        level = _verls_logger.level
        _verls_logger.setLevel(logging.WARNING)
        try:
            super()._setup()
        finally:
            _verls_logger.setLevel(level)

    def _init_resource_pool_mgr(self) -> None:
        """Choose the workers as verl does, with ours in the place of its `DetachActorWorker`."""
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            if getattr(worker, "__ray_actor_class__", None) is DetachActorWorker:
                self.role_worker_mapping[role] = ray.remote(RealCopiesWorker)
