"""Number of steps that a recipe trains for, and the number that it needs.

A recipe that ends before its curve rises teaches nothing.

verl's V1 trainer ends after `trainer.total_training_steps`, or after `trainer.total_epochs`, whichever comes first. An
epoch has as many steps as there are whole batches of training rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

# Smallest number of training rows that `prepare_data.py` writes, by recipe, and by variant where it has other data.
ROWS = {
    "gsm8k_multiturn": 7_473,
    "torl": 28_680,  # of 28,740, those with a prompt of 400 tokens at most
    "torl+zerotir": 56_000,  # ORZ-57k
    "torl+simpletir": 40_000,  # DeepScaleR: 40.3k
    "retool": 17_398,  # DAPO-Math-17k, each problem once
    "search_r1": 169_615,  # 79,168 of NQ and 90,447 of HotpotQA
    "coding": 7_600,  # of DeepCoder's 24,287, as many as AReaL kept
    "text2sql": 653,
    "tool_n1": 57_000,  # of xLAM's 60,000; ToolACE comes on top
    "mixed": 6_600,  # 2,000 of each kind, 653 of SQL
    "image_zoom": 2_101,  # geometry3k
    "image_zoom+deepeyes": 44_000,  # of 47k
    "otc": 28_680,
    "otc+search": 169_615,
    "smollm2": 2_000,
    "artist": 100,  # the even numbers of BFCL's category `base`
    "researcher": 90_447,  # of HotpotQA
    "swe": 192,  # 64 of each of three packages
    "swe+deepswe": 768,
    "swe+rebench": 768,
    "hub": 32,  # 18 of 20 and 14 of 16 tasks
    "hub+words": 544,  # 256 of each of two games on top
    "hub+openenv": 39,  # 7 of 8
    "tictactoe": 2_048,  # openings
    "terminal": 1_024,  # made tasks
    "terminal+harbor": 14_601,  # TMax-15K-Harbor
    "alfworld": 3_553,  # ALFWorld's own number of training games
    "tau2": 30,
    "tau2+retail": 74,
}
# Number of steps after which the figures were reported that a README shows under "Expected".
CURVES = {
    "gsm8k_multiturn": 435,
    "torl": 100,
    "retool": 400,
    "retool+ppo": 250,
    "search_r1": 1_005,
    "text2sql": 60,
    "image_zoom+deepeyes": 80,
    "smollm2": 12,
    "alfworld": 150,
    "tictactoe": 30,
}
# Smallest number of steps for a recipe without a reported one.
FEWEST = 50


@dataclass(frozen=True)
class Steps:
    """Numbers of training steps of a recipe with its variants."""

    trained: int
    warm_up: int
    """Steps of the longest warm-up, either of the value model alone or of a learning rate."""
    needed: int

    def complaint(self, readme: str) -> str:
        """Return why these steps do not do, or why the recipe's README does not fit them; empty when all is well.

        Args:
            readme: Text of the README.
        """
        if self.trained <= self.warm_up:
            return f"{self.trained} steps, and its warm-up takes {self.warm_up}; train for more epochs"
        if self.trained < self.needed:
            return f"{self.trained} steps, and its README's curve takes {self.needed}; train for more epochs"
        if f"{self.trained:,}" not in readme:
            return f"its README does not say that it trains for {self.trained:,} steps; mend its table"
        return ""


def _of(numbers: dict[str, int], recipe: str, variants: list[str], default: int = 0) -> int:
    """Return the number of the first variant that has one, else the recipe's."""
    named = [numbers[f"{recipe}+{variant}"] for variant in variants if f"{recipe}+{variant}" in numbers]
    return named[0] if named else numbers.get(recipe, default)


def count_steps(config: Any, recipe: str, variants: list[str]) -> Steps:
    """Count the training steps of a composed configuration.

    Raises:
        KeyError: `ROWS` does not know the recipe.
    """
    rows = _of(ROWS, recipe, variants)
    if not rows:
        raise KeyError(f"{recipe!r}: say in tests.long.training.recipe_steps.ROWS how many rows it trains on")
    trainer = config.trainer
    trained = rows // config.data.train_batch_size * trainer.total_epochs
    if trainer.total_training_steps is not None:
        trained = min(trained, trainer.total_training_steps)
    warm_ups = [int(trainer.critic_warmup)]
    for optimizer in ("actor_rollout_ref.actor.optim", "critic.optim"):
        steps = OmegaConf.select(config, f"{optimizer}.lr_warmup_steps")
        ratio = OmegaConf.select(config, f"{optimizer}.lr_warmup_steps_ratio")
        warm_ups.append(int(steps) if steps and steps > 0 else math.ceil((ratio or 0) * trained))
    return Steps(trained, max(warm_ups), _of(CURVES, recipe, variants, FEWEST))
