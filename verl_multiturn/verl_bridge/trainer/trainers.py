"""verl's three V1 trainers, each with `MultiTurnHooks`.

`plugin.py` imports this module, which registers the trainers, and our estimators of advantages. The start-up check
chooses the trainers in place of verl's.
"""

from __future__ import annotations

import logging
from functools import partial

import ray
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_multiturn.verl_bridge.names import OUR_TRAINER
from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks
from verl_multiturn.verl_bridge.trainer.real_copies import RealCopiesWorker
from verl_multiturn.verl_bridge.trainer.rows.advantages import register_estimators
from verl_multiturn.verl_bridge.trainer.servers import ANSWER_S, StandaloneServers

register_estimators()
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
        manager = self.standalone_server_manager
        whole = self.config.actor_rollout_ref.rollout.checkpoint_engine.backend != "delta_sharded"
        self._servers = StandaloneServers(manager.get_replicas(), manager.global_load_balancer, restarts=whole)

    def look_after_servers(self) -> None:
        """Start servers again that have died; those that have started get the weights, if the others have them, too.

        Raises:
            ServerDied: A server has died that cannot be started again, and the run cannot go on without it.
        """
        self._require_colocated()  # verl lists these, while they generate
        self._servers.look()
        # In the middle of a step the trainer has weights that have no version. A version is only the oldest that they
        # may be, and better than none where no server remains.
        if self._servers.ready() and (self._whole is not None or not self._servers.any_serves()):
            version = self.global_steps - 1 if self._whole is None else self._whole
            self._servers.send_weights(partial(self.standalone_checkpoint_manager.update_weights, version))

    def on_step_end(self) -> None:
        """Send new weights, as verl does, also to servers that have been started again meanwhile."""
        self._servers.look(ANSWER_S)
        self._servers.send_weights(super().on_step_end)

    def _init_resource_pool_mgr(self) -> None:
        """Choose the workers as verl does, with ours in the place of its `DetachActorWorker`."""
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            if getattr(worker, "__ray_actor_class__", None) is DetachActorWorker:
                self.role_worker_mapping[role] = ray.remote(RealCopiesWorker)
