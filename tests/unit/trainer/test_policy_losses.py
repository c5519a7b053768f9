"""`mt_gspo` has one ratio and one clip for each turn, and is verl's `gspo` where a row has one turn.

With advantages of 1, the aggregation `token-sum` and no clip, the gradient of a token's log-prob is its ratio, negated.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.stack

WIDE = {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9}
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
Batch = dict[str, torch.Tensor]


def settings_of(counts: dict[str, Any] | None = None, **clips: float) -> Any:
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clips)
    config.global_batch_info.update(counts or {})
    return config


def computed(
    batch: Batch, name: str = "mt_gspo", aggregation: str = "token-sum", **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return a policy loss of a batch, its gradient at the log-probs and its metrics; verl calls it so, too."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=batch["old_log_prob"],
        log_prob=log_prob,
        advantages=batch["advantages"],
        response_mask=batch["mask"],
        loss_agg_mode=aggregation,
        config=settings_of(**settings),
        rollout_is_weights=batch.get("rollout_is_weights"),
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.detach(), log_prob.grad, metrics


def batch_of(masks: list[str], factors: list[list[float]], advantage: float = 1.0) -> Batch:
    """Return rows whose tokens are `factors` times as likely as before; "1" in a mask is a trained token."""
    log_prob = torch.tensor(factors).log() - 3.0
    return {
        "mask": torch.tensor([[each == "1" for each in mask] for mask in masks]),
        "log_prob": log_prob,
        "old_log_prob": torch.full_like(log_prob, -3.0),
        "advantages": torch.full_like(log_prob, advantage),
    }


def drawn(seed: int, masks: list[str]) -> Batch:
    """Draw rows with masks."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(masks), len(masks[0])

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    log_prob = -normal().abs()
    return {
        "mask": torch.tensor([[each == "1" for each in mask] for mask in masks]),
        "log_prob": log_prob,
        "old_log_prob": log_prob - 0.3 * normal(),
        "advantages": normal(),
        "rollout_is_weights": normal().exp(),
    }


@pytest.mark.parametrize(
    ("case", "mask", "factors", "ratios"),
    [
        ("two turns with an observation between", "110111", [4, 1, 9, 2, 2, 16], [2, 2, 0, 4, 4, 4]),
        ("an observation of one token in text mode", "1101", [4, 1, 9, 3], [2, 2, 0, 3]),
        ("one turn, sampled in two generations that touch", "1111", [4, 1, 1, 64], [4, 4, 4, 4]),
        ("a second turn that the length has cut", "11011", [4, 1, 7, 16, 1], [2, 2, 0, 4, 4]),
        ("a turn whose first tokens are too old", "001101", [5, 5, 4, 1, 9, 3], [0, 0, 2, 2, 0, 3]),
        ("an untrained token inside of a turn", "11011", [4, 1, 9, 9, 1], [2, 2, 0, 3, 3]),
        ("an observation at both ends", "011100", [9, 8, 1, 1, 9, 9], [0, 2, 2, 2, 0, 0]),
        ("no trained token", "000", [4, 1, 9], [0, 0, 0]),
        ("one token", "1", [5], [5]),
    ],
)
def test_a_turn_is_a_run_of_trained_tokens(case: str, mask: str, factors: list[float], ratios: list[float]) -> None:
    _, gradient, _ = computed(batch_of([mask], [factors]), **WIDE)
    assert (-gradient[0]).tolist() == pytest.approx(ratios, rel=1e-5), case
    assert not gradient[0][~torch.tensor([each == "1" for each in mask])].any()


def test_a_turn_ends_with_its_row() -> None:
    _, gradient, _ = computed(batch_of(["01", "10"], [[9, 2], [5, 9]]), **WIDE)
    assert (-gradient).flatten().tolist() == pytest.approx([0, 2, 5, 0], rel=1e-5)


def test_each_turn_is_clipped_by_its_own_ratio() -> None:
    factors = [[2, 2, 9, 1.1, 1.1, 1.1]]
    # By itself the second turn's last token is beyond the limits; its turn is not.
    inside = [[2, 2, 9, 0.1, 1, 11]]
    for given, ratio in ((factors, 1.1), (inside, (0.1 * 11) ** (1 / 3))):
        _, gradient, metrics = computed(batch_of(["110111"], given))
        assert (-gradient[0]).tolist() == pytest.approx([0, 0, 0, ratio, ratio, ratio], rel=1e-5)
        assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 5)
    _, gradient, metrics = computed(batch_of(["110111"], factors, advantage=-1.0))
    assert gradient[0].tolist() == pytest.approx([2, 2, 0, 1.1, 1.1, 1.1], rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0
    # verl's has one ratio for the row, and clips all of it.
    _, gradient, metrics = computed(batch_of(["110111"], factors), name="gspo")
    assert not gradient.any()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1)


def test_the_metrics_are_means_over_trained_tokens() -> None:
    factors = [[4, 1, 9, 2, 2, 16]]
    loss, _, metrics = computed(batch_of(["110111"], factors), aggregation="token-mean", **WIDE)
    assert loss.item() == pytest.approx(-(2 * 2 + 3 * 4) / 5, rel=1e-5)
    mean = torch.tensor([4.0, 1, 2, 2, 16]).log().mean().item()
    assert metrics == {
        "actor/pg_clipfrac": 0,
        "actor/ppo_kl": pytest.approx(-mean, rel=1e-5),
        "actor/pg_clipfrac_lower": 0,
    }


ONE_TURN = ["111100000", "000111111", "111111111", "000000000", "000010000", "001111100"]
SEVERAL = ["110111001", "100010011", "111111111", "000000000", "010101010", "001100110"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_one_turn_has_the_loss_gradient_and_metrics_of_gspo(seed: int, aggregation: str) -> None:
    batch = drawn(seed, ONE_TURN)
    if seed == 2:  # beyond the bound of the ratio's logarithm, and without the weights of rollout correction
        batch["old_log_prob"][1] -= 30
        del batch["rollout_is_weights"]
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.05}
    ours, verls = (computed(batch, name, aggregation, **clips) for name in ("mt_gspo", "gspo"))
    assert torch.equal(ours[0], verls[0])
    assert torch.equal(ours[1], verls[1])
    assert ours[2] == verls[2]
    assert ours[2]["actor/pg_clipfrac"] > 0
    several = drawn(seed, SEVERAL)
    assert not torch.equal(computed(several, aggregation=aggregation)[1], computed(several, "gspo", aggregation)[1])


def test_turns_have_the_gradient_of_rows_of_their_own() -> None:
    batch = drawn(3, SEVERAL)
    masks: list[str] = []
    owners: list[int] = []
    for row, mask in enumerate(SEVERAL):
        for run in re.finditer("1+", mask):
            masks.append("0" * run.start() + run.group() + "0" * (len(mask) - run.end()))
            owners.append(row)
    apart = {name: column[owners] for name, column in batch.items()}
    apart["mask"] = torch.tensor([[each == "1" for each in mask] for mask in masks])
    (loss, gradient, metrics), (other, parts, others) = computed(batch), computed(apart, "gspo")
    assert len(masks) > len(SEVERAL)
    assert loss.item() == pytest.approx(other.item(), rel=1e-5)
    assert torch.equal(torch.zeros_like(gradient).index_add(0, torch.tensor(owners), parts), gradient)
    assert metrics == pytest.approx(others, rel=1e-5)


def test_one_advantage_has_the_gradient_of_the_papers_objective() -> None:
    """Its gradient goes through the ratio of a whole sequence, which is a row's one turn here."""
    batch = drawn(4, ["000111111", "111100000", "001111100"])
    advantages = torch.tensor([1.5, -0.5, 1.0])
    batch["advantages"] = advantages[:, None].expand(3, 9)
    del batch["rollout_is_weights"]
    low, high = 0.1, 0.05
    log_prob = batch["log_prob"].clone().requires_grad_()
    changes = zip(log_prob - batch["old_log_prob"], batch["mask"], strict=True)
    ratios = torch.stack([change[mask].mean().exp() for change, mask in changes])
    objective = torch.minimum(ratios * advantages, ratios.clamp(1 - low, 1 + high) * advantages).mean()
    (wanted,) = torch.autograd.grad(-objective, log_prob)
    loss, gradient, _ = computed(batch, aggregation="seq-mean-token-mean", clip_ratio_low=low, clip_ratio_high=high)
    assert loss.item() == pytest.approx(-objective.item(), rel=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-8)
    assert wanted.any(-1).tolist() != [False] * 3


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches_and_ranks(aggregation: str) -> None:
    batch = drawn(0, SEVERAL)
    whole = {"batch_num_tokens": int(batch["mask"].sum()), "global_batch_size": 6, "loss_scale_factor": 64}
    loss, gradient, _ = computed(batch, aggregation=aggregation, counts={"dp_size": 1, **whole})
    for ranks, size in ((1, 1), (1, 2), (1, 4), (2, 3), (3, 1)):
        order = torch.arange(6).view(ranks, -1)
        losses, parts = 0.0, torch.zeros_like(gradient)
        for own in order:
            for rows in own.split(size):
                part = {name: column[rows] for name, column in batch.items()}
                found, parts[rows], _ = computed(part, aggregation=aggregation, counts={"dp_size": ranks, **whole})
                losses += float(found) / ranks
        torch.testing.assert_close(parts / ranks, gradient, rtol=1e-6, atol=1e-8)
        assert losses == pytest.approx(float(loss), rel=1e-5)


def test_the_weights_of_rollout_correction_multiply_each_tokens_loss() -> None:
    batch = batch_of(["110111"], [[4, 1, 9, 2, 2, 16]])
    weights = torch.tensor([[1.0, 0.5, 7, 2, 1, 0]])
    _, gradient, _ = computed({**batch, "rollout_is_weights": weights}, **WIDE)
    assert (-gradient[0]).tolist() == pytest.approx([2, 1, 0, 8, 4, 0], rel=1e-5)


@pytest.mark.parametrize("name", ["log_prob", "old_log_prob", "advantages", "rollout_is_weights"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e4])
def test_no_number_at_an_untrained_token_reaches_the_loss(name: str, value: float) -> None:
    batch = drawn(1, SEVERAL)
    other = {**batch, name: torch.where(batch["mask"], batch[name], value)}
    for aggregation in AGGREGATIONS:
        (loss, gradient, metrics), found = (computed(each, aggregation=aggregation) for each in (batch, other))
        assert torch.equal(found[0], loss)
        assert torch.equal(found[1], gradient)
        assert found[2] == metrics
