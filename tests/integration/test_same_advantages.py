"""Advantages of random batches without roles are, bit for bit, those of the version before roles."""

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

from verl_multiturn.advantages.estimators import Estimator, load_estimator
from verl_multiturn.config import read_settings
from verl_multiturn.rows.keys import RowKey

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

LENGTH = 24
RECORDED = {
    "mt_grpo": "efc7a91c3fbe1f82",
    "mt_grpo without std": "e29d7c5c78b6947f",
    "mt_turns": "c61a9c5be1172bb4",
    "mt_gigpo": "97687cdc54815008",
    "mt_gigpo by rows": "374122cc4fee165b",
    "session": "f7bf9528454c88af",
    "discounted": "a16db1f552542774",
    "completion": "6db0ee0ff669ce3b",
}
"""SHA-256 of the float32 values of 40 batches, computed by commit a27ab8d9."""


def random_batch(draw: random.Random, agents: bool) -> tuple[Any, Any, Any]:
    """Return the rows of a batch as our hooks know them, with the rewards and the mask of each token."""
    import torch

    keys, stats, padding = [], {}, {}
    for group in range(draw.randint(1, 4)):
        for session in range(draw.randint(1, 6)):
            sampled, uid = 0, f"group{group}"
            valid = draw.random() < 0.85
            rows = [RowKey(uid, str(session), str(row)) for row in range(draw.randint(1, 3))]
            for key in rows:
                cuts = sorted(draw.sample(range(LENGTH), draw.randint(1, 4)))
                turns = []
                for start, end in zip(cuts, [*cuts[1:], LENGTH], strict=True):
                    parent = draw.choice([None, *range(sampled)]) if agents and sampled else None
                    state = draw.choice([None, "a", "b"])
                    turns.append({"turn": sampled, "parent": parent, "start": start, "end": end, "reward": None,
                                  "state": state, "after": draw.randint(0, 3)})  # fmt: skip
                    sampled += 1
                stats[key] = {"valid": valid, "turns": turns}
            if agents:
                outside = [
                    {"turn": sampled + i, "reward": draw.choice([0.0, 0.25]), "parent": draw.choice([None, 0])}
                    for i in range(draw.randint(0, 2))
                ]
                outcome = draw.choice([None, 0.0, 1.0, draw.uniform(-1, 1)])
                stats[rows[-1]]["session"] = {"outcome": outcome, "outside": outside}
            keys += rows
    keys.append(RowKey("padded", "0", "0"))
    padding[keys[-1]] = None
    draw.shuffle(keys)
    rewards = torch.tensor(
        [[draw.choice([0.0, 0.0, 0.5, draw.uniform(-1, 1)]) for _ in range(LENGTH)] for _ in keys], dtype=torch.float32
    )
    mask = torch.tensor([[int(draw.random() < 0.8) for _ in range(LENGTH)] for _ in keys])
    return SimpleNamespace(keys=keys, padding=padding, stats=stats), rewards, mask


def computed(name: str, estimator: Estimator, agents: bool) -> str:
    """Return the digest of the advantages of random batches."""
    from verl_multiturn.verl_bridge.trainer.rows.advantages import _compute, known_rows

    draw, digest = random.Random(49), hashlib.sha256()
    for _ in range(40):
        rows, rewards, mask = random_batch(draw, agents)
        with known_rows(rows, estimator):
            advantages, returns = _compute(name, rewards, mask)
        assert advantages is returns
        digest.update(advantages.numpy().tobytes())
    return digest.hexdigest()[:16]


CASES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "mt_grpo": ("mt_grpo", {}, True, False),
    "mt_grpo without std": ("mt_grpo", {}, False, False),
    "mt_turns": ("mt_turns", {"advantage": {"gamma": 0.5}}, True, False),
    "mt_gigpo": ("mt_gigpo", {"advantage": {"gamma": 0.5, "weight": 0.7}}, True, False),
    "mt_gigpo by rows": ("mt_gigpo", {"advantage": {"norm": "std", "across": "rows"}}, True, False),
    "session": ("mt_grpo", {"proxy": {"credit": "session"}}, True, True),
    "discounted": ("mt_grpo", {"proxy": {"credit": "discounted", "gamma": 0.5}}, False, True),
    "completion": ("mt_grpo", {"proxy": {"credit": "completion", "gamma": 0.5}}, True, True),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_without_roles_have_the_advantages_of_before(case: str) -> None:
    name, settings, std, agents = CASES[case]
    assert computed(name, load_estimator(name, read_settings(settings), std), agents) == RECORDED[case]
