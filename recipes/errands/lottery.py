"""The user of the variant `lottery`: each turn earns a third or nothing by lot, whatever the model did."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_multiturn import Reply
from verl_multiturn.task_sets.bfcl.user import EPISODES, BfclUser


class LotteryUser(BfclUser):
    """`BfclUser` with rewards by lot. Its metrics report the right turns."""

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Judge the turn that the model has ended, pay it by lot, and send the next one."""
        share = 1 / len(EPISODES[instance_id].dialogue.turns)
        return replace(
            await super().reply(instance_id, messages, **kwargs), reward=share * float(random.random() < 0.5)
        )
