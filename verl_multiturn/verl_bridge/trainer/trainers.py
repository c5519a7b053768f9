"""verl's three V1 trainers, extended by our mixins.

- Each batch is verified before the trainer learns from it.
- The score of a correct answer may depend on how many tool calls it took (Optimal Tool Calls).
- Rows with void turns may be kept out of the loss.
- Invalid conversations do not count in their groups.
- Updates without a trained token are skipped.
- The rollout's metrics are in the trainer's loggers.

`plugin.py` imports this module, which registers the trainers. The start-up check chooses them in place of verl's.
"""

from __future__ import annotations

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_multiturn.verl_bridge.startup.configuration import OUR_TRAINER
from verl_multiturn.verl_bridge.trainer.closing import ClosingMixin
from verl_multiturn.verl_bridge.trainer.groups import GroupsMixin
from verl_multiturn.verl_bridge.trainer.otc import OtcMixin
from verl_multiturn.verl_bridge.trainer.report import MetricsMixin
from verl_multiturn.verl_bridge.trainer.updates import UpdatesMixin
from verl_multiturn.verl_bridge.trainer.verify import CertificateMixin
from verl_multiturn.verl_bridge.trainer.void_turns import VoidTurnsMixin


class _Ours(CertificateMixin, OtcMixin, VoidTurnsMixin, GroupsMixin, UpdatesMixin, MetricsMixin, ClosingMixin):
    """All our mixins, in the order in which they come before a trainer of verl.

    For each sampled batch, in this order: Optimal Tool Calls change scores; rows with void turns leave the loss;
    advantages are computed without invalid rows; the certificate verifies the result; updates without a trained token
    are skipped. The metrics are added at the end of a step. After training the workers' tools are closed.
    """


@register_trainer(f"{OUR_TRAINER}sync")
class MultiTurnSync(_Ours, PPOTrainerSync):
    """verl's trainer `sync` with our mixins."""

    mode = "sync"


@register_trainer(f"{OUR_TRAINER}colocate_async")
class MultiTurnColocateAsync(_Ours, PPOTrainerColocateAsync):
    """verl's trainer `colocate_async` with our mixins."""

    mode = "colocate_async"


@register_trainer(f"{OUR_TRAINER}separate_async")
class MultiTurnSeparateAsync(_Ours, PPOTrainerSeparateAsync):
    """verl's trainer `separate_async` with our mixins."""

    mode = "separate_async"
