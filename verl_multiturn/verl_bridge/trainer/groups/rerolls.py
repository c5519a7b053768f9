"""Late groups are begun anew: `custom.multiturn.staleness_strategy=reroll`.

At the beginning of a step the newest weights have just been published. A group that is still running and whose
deadline has passed (`rollout/groups/staleness.py`) is cancelled, and its prompt is submitted under a new uid:

    cancel the group  →  clear its rows  →  the same prompt, a new uid, this step  →  the agent loops begin it

Invariants:
- no row of a cancelled attempt is taken for one of the new attempt: their uids differ, and neither holds a `_`;
- the new attempt's tag has the count of new attempts before any agent loop knows of it. TransferQueue
  merges a tag by reading it first, so that later writes could overtake the agent loop's `finished`.

Two other ways were tried (`benchmarks.staleness --variants`). Cancelling right after a step's last sample takes as
long, begins up to three times as many groups anew, and favours quick draws more. Beginning finished groups anew, too,
masks less than half as many tokens, and makes steps a tenth longer where the engines are separate.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from verl.utils.tensordict_utils import assign_non_tensor_data, assign_non_tensor_stack

from verl_multiturn.rollout.groups.staleness import StalenessBound, to_reroll
from verl_multiturn.verl_bridge.compat.row_store import TRAIN, clear_groups, get_prompts, list_prompts, put_tags
from verl_multiturn.verl_bridge.names import REROLLED_FROM
from verl_multiturn.verl_bridge.trainer.report import ASYNC_PREFIX

logger = logging.getLogger(__name__)


class Rerolls:
    """The groups of a trainer that are begun anew. Their metric is `rerolled`, their number in a step.

    Args:
        bound: The bound of the ages.
    """

    def __init__(self, bound: StalenessBound) -> None:
        self._bound = bound
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self.rerolled: dict[str, str] = {}
        """uids of the step's groups that were begun anew, each with the new one."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metric."""
        return {f"{ASYNC_PREFIX}rerolled": len(self.rerolled)}

    def run(self, trainer: Any) -> None:
        """Begin the late groups anew.

        Args:
            trainer: Our trainer, at the beginning of a step.
        """
        tags = list_prompts(TRAIN)
        late = to_reroll(tags, trainer.global_steps, self._bound)
        if not late:
            return
        prompts = get_prompts(late, TRAIN)
        trainer.agent_loop_manager.cancel(late)
        clear_groups(late, TRAIN)
        uids = [str(uuid.uuid4()) for _ in late]
        step = trainer.global_steps
        assign_non_tensor_stack(prompts, "uid", uids)
        # One value for all of them, which verl keeps out of TransferQueue: there all prompts have the same columns.
        assign_non_tensor_data(prompts, REROLLED_FROM, dict(zip(uids, late, strict=True)))
        assign_non_tensor_data(prompts, "global_steps", step)
        again = [
            {"is_prompt": True, "status": "pending", "global_steps": step, "rerolls": tags[uid].get("rerolls", 0) + 1}
            for uid in late
        ]
        put_tags(uids, TRAIN, again)
        trainer._submit_batch_to_rollout(prompts)
        self.rerolled |= zip(late, uids, strict=True)
        logger.info("step %d: %d late groups are begun anew: %s", step, len(late), ", ".join(late))
