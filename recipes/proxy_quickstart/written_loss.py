"""verl's own policy loss under the name `written`: it also writes down the advantages that the actor trains with.

A line of `rows.jsonl` is a row of the batch, as pairs: tokens of a completion, their advantage. The actor's
`profiler.save_path` names the folder, since verl's configuration of the actor has no other place for a path.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss


@register_policy_loss("written")  # type: ignore[arg-type]
def written_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Write the advantages of the rows that are trained, `(B, R)`, and return the result of verl's loss."""
    folder = Path(config.profiler.save_path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        for mask, values in zip(response_mask.tolist(), advantages.tolist(), strict=True):
            if written := spans(mask, values):
                file.write(json.dumps(written) + "\n")
    loss: tuple[torch.Tensor, dict[str, Any]] = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    return loss


def spans(mask: list[float], values: list[float]) -> list[tuple[int, float]]:
    """Return the number of tokens and the advantage of each run of trained tokens of a row.

    Args:
        mask: 1 for each trained token.
        values: Their advantages.

    Raises:
        ValueError: The tokens of a run have several advantages.
    """
    found = []
    for trained, run in groupby(zip(mask, values, strict=True), key=lambda pair: bool(pair[0])):
        if not trained:
            continue
        own = [value for _, value in run]
        if len(set(own)) != 1:
            raise ValueError(f"the tokens of a completion have the advantages {sorted(set(own))}, expected one")
        found.append((len(own), own[0]))
    return found
