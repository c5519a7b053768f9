"""verl's three V1 trainers, with what we add: each batch is verified before they learn from it, a correct answer may be
paid by the tool calls it took, rows with void turns may be kept out of the loss, invalid conversations do not count in
their groups, updates without a trained token are skipped, and the rollout's metrics are in their loggers.

`plugin.py` imports this module, which registers them; the start-up check chooses them in the place of verl's.
"""

from __future__ import annotations

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_multiturn.verl_bridge.certificate import CertificateMixin
from verl_multiturn.verl_bridge.closing import ClosingMixin
from verl_multiturn.verl_bridge.groups import GroupsMixin
from verl_multiturn.verl_bridge.metrics import MetricsMixin
from verl_multiturn.verl_bridge.otc import OtcMixin
from verl_multiturn.verl_bridge.preflight import OUR_TRAINER
from verl_multiturn.verl_bridge.updates import UpdatesMixin
from verl_multiturn.verl_bridge.void_turns import VoidTurnsMixin


class _Ours(CertificateMixin, OtcMixin, VoidTurnsMixin, GroupsMixin, UpdatesMixin, MetricsMixin, ClosingMixin):
    """What goes before each of verl's trainers. Of a batch that was sampled, in this order: Optimal Tool Calls change
    scores, rows with void turns leave the loss, advantages are computed without invalid rows, the certificate looks at
    all of it, updates without a trained token are skipped; the metrics come at the end of a step. When training has
    ended, the workers' tools are closed."""


@register_trainer(f"{OUR_TRAINER}sync")
class MultiTurnSync(_Ours, PPOTrainerSync):
    mode = "sync"


@register_trainer(f"{OUR_TRAINER}colocate_async")
class MultiTurnColocateAsync(_Ours, PPOTrainerColocateAsync):
    mode = "colocate_async"


@register_trainer(f"{OUR_TRAINER}separate_async")
class MultiTurnSeparateAsync(_Ours, PPOTrainerSeparateAsync):
    mode = "separate_async"
