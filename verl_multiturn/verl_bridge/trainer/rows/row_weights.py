"""The rows of a conversation together weigh as one: `custom.multiturn.context.weight=conversation`.

A row's weight in verl's loss depends on `loss_agg_mode`: the number of its trained tokens, or, with
`seq-mean-token-mean`, one. The advantages of a conversation's rows are multiplied by one factor, so that

    factor x (the sum of its rows' weights)   is the same for all conversations of the batch,

and equal to the mean of these sums: the batch as a whole keeps its weight.

Invariants:
- only advantages change, and no sign of one. verl's policy losses are proportional to advantages; its KL loss and
  entropy bonus do not use them, and are not weighted;
- conversations without a trained token, and verl's padding rows, are not changed and not counted.
"""

from __future__ import annotations

from collections import defaultdict

from verl_multiturn.verl_bridge.compat.row_store import get_columns, nested, put_columns
from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows


def weigh_conversations(rows: BatchRows, loss_agg_mode: str) -> None:
    """Multiply the advantages of a batch's rows (column `advantages`) by the factors of their conversations.

    Args:
        rows: Those of verl's batch, with its advantages.
        loss_agg_mode: verl's setting of the actor.
    """
    keys = rows.real
    if not keys:
        return
    data = get_columns(keys, rows.partition_id, ["response_mask", "advantages"])
    counts = [int(mask.sum()) for mask in data["response_mask"].unbind()]
    weights = [min(count, 1) if loss_agg_mode == "seq-mean-token-mean" else count for count in counts]
    sums: dict[str, int] = defaultdict(int)
    for key, weight in zip(keys, weights, strict=True):
        sums[key.conversation] += weight
    trained = [total for total in sums.values() if total]
    if not trained:
        return
    mean = sum(trained) / len(trained)
    weighed = [
        row * (mean / (sums[key.conversation] or mean))
        for key, row in zip(keys, data["advantages"].unbind(), strict=True)
    ]
    put_columns(keys, rows.partition_id, advantages=nested(weighed))
