"""Does verl, with our settings, descend the gradient of decoupled PPO?

    python -m benchmarks.decoupled

Decoupled PPO is equation 5 of AReaL (arXiv 2505.24298). The benchmark draws batches: prompts, ragged responses with
observations between the turns, rewards, and a policy of 7 tokens, in float64. The policy has a table of logits, a row
for each token before. Three older policies sampled each response, one after the other, as when a generation is
interrupted. Then it computes the gradient of the table in two ways:

- by verl, as its trainer does it: `_compute_old_log_prob` and `_compute_advantage` of the trainer and `ppo_loss` of the
  worker, with the composed configuration, after our start-up check derived its part. Only TransferQueue and the workers
  are replaced, by a table of rows in memory and by the policy above;
- by equation 5 written out, in plain Python numbers, with the derivative of a softmax in closed form. This part shares
  no code with verl, with torch or with our package.

`max_grad_diff` is the largest difference of an entry, over all batches and over two aggregations: `seq-mean-token-sum`,
the sum and mean of equation 5 unchanged, and `token-mean`, verl's default. `naive_cosine` is the cosine between the
gradients of equation 5 and of standard PPO (equation 2: no weight, and the behaviour policy is the proximal one;
`bypass_mode=True`). `default_cosine` and `truncated_cosine` are those of verl's defaults and of
`importance_weight=truncated`. The table has them for older policies that are nearer and further. The last line is one
JSON object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from hydra import compose, initialize_config_module
from rich.console import Console
from rich.table import Table
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.startup.needs import NEVER, set_needs
from verl_multiturn.verl_bridge.startup.view import RunView

VOCABULARY, GROUPS, GROUP_SIZE, VERSIONS = 7, 2, 4, 3
MAX_PROMPT, MAX_RESPONSE = 4, 14
STALENESSES = (0.1, 0.3, 0.5, 1.0)
STALENESS = 0.5
"""Standard deviation of the logits between an older policy and the step's first, in the last line's cosines."""
MOVED = 0.8
"""Standard deviation of the logits between the step's first policy and the current one."""
CLIP = 0.2
AGGREGATIONS = ("seq-mean-token-sum", "token-mean")
COMMON = (
    "trainer.v1.trainer_mode=separate_async",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
    "algorithm.adv_estimator=grpo",
)
# By name: overrides of verl's configuration, and our setting `importance_weight`.
VARIANTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "exact": ((), "exact"),
    "truncated": ((), "truncated"),
    "default": ((), "verl"),
    "naive": (
        ("algorithm.rollout_correction.bypass_mode=True", f"actor_rollout_ref.actor.clip_ratio_c={NEVER}"),
        "verl",
    ),
}


@dataclass(frozen=True)
class Row:
    """A conversation. The lists of the response have an entry for each of its tokens."""

    uid: str
    prompt: list[int]
    response: list[int]
    trained: list[int]
    """1 for a token that the model sampled, 0 for one of an observation."""
    versions: list[int]
    """The older policy that sampled each token."""
    reward: float


@dataclass(frozen=True)
class Drawn:
    """A batch and its policies, each a table `[V, V]` of logits by the token before and the token."""

    rows: list[Row]
    behaviour: list[list[list[float]]]
    proximal: list[list[float]]
    current: list[list[float]]


def draw(seed: int, staleness: float) -> Drawn:
    """Draw a batch. Its tokens are sampled from the older policies."""
    source = np.random.default_rng(seed)
    proximal = source.normal(size=(VOCABULARY, VOCABULARY))
    behaviour = proximal + staleness * source.normal(size=(VERSIONS, VOCABULARY, VOCABULARY))
    current = proximal + MOVED * source.normal(size=proximal.shape)
    rows = []
    for index in range(GROUPS * GROUP_SIZE):
        prompt = source.integers(VOCABULARY, size=source.integers(1, MAX_PROMPT + 1)).tolist()
        length = int(source.integers(3, MAX_RESPONSE + 1))
        versions = sorted(source.integers(VERSIONS, size=length).tolist())
        trained = [1, *(source.random(length - 1) < 0.75).astype(int).tolist()]
        if index == 0:
            trained = [0] * length  # an invalid conversation
        response: list[int] = []
        for version in versions:
            logits = behaviour[version][(prompt + response)[-1]]
            chances = np.exp(logits) / np.exp(logits).sum()
            response.append(int(source.choice(VOCABULARY, p=chances)))
        rows.append(Row(f"group{index // GROUP_SIZE}", prompt, response, trained, versions, float(source.normal())))
    return Drawn(rows, behaviour.tolist(), proximal.tolist(), current.tolist())


# --- Equation 5, written out


def probability(logits: Sequence[float], token: int) -> float:
    """Return the probability of a token."""
    return math.exp(logits[token]) / math.fsum(math.exp(logit) for logit in logits)


@dataclass
class Reached:
    """The numbers of trained tokens of each kind, which show the cases in the batches."""

    tokens: int = 0
    clipped: int = 0
    """Tokens whose gradient the clip sets to 0."""
    heavy: int = 0
    """Tokens with a weight above 2, verl's default threshold."""
    dual: int = 0
    """Tokens of a negative advantage with a ratio above 3, where verl's dual clip bites."""


def equation(
    drawn: Drawn, advantages: list[list[float]], aggregation: str, proximal_is_behaviour: bool = False
) -> tuple[list[list[float]], Reached]:
    """Compute the gradient of the negative objective with respect to the current policy's table.

    Args:
        drawn: The batch.
        advantages: For each row, an advantage for each token of its response.
        aggregation: One of `AGGREGATIONS`.
        proximal_is_behaviour: Equation 2 in the place of equation 5: the weight is 1 then.
    """
    gradient, reached = [[0.0] * VOCABULARY for _ in range(VOCABULARY)], Reached()
    reached.tokens = sum(sum(row.trained) for row in drawn.rows)
    divisor = reached.tokens if aggregation == "token-mean" else len(drawn.rows)
    for row, row_advantages in zip(drawn.rows, advantages, strict=True):
        before = [*row.prompt, *row.response][len(row.prompt) - 1 : -1]
        for context, token, trained, version, advantage in zip(
            before, row.response, row.trained, row.versions, row_advantages, strict=True
        ):
            if not trained:
                continue
            behaviour = probability(drawn.behaviour[version][context], token)
            proximal = behaviour if proximal_is_behaviour else probability(drawn.proximal[context], token)
            weight, ratio = proximal / behaviour, probability(drawn.current[context], token) / proximal
            clipped = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
            reached.clipped += clipped
            reached.heavy += weight > 2
            reached.dual += advantage < 0 and ratio > 3
            if clipped:
                continue  # the minimum is the clipped term, which is constant
            for other in range(VOCABULARY):
                slope = (other == token) - probability(drawn.current[context], other)
                gradient[context][other] -= weight * ratio * advantage * slope / divisor
    return gradient, reached


# --- verl's gradient


class Queue:
    """TransferQueue's calls that the trainer's two methods make, over rows in memory."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        """Return the columns that all rows have."""
        names = [name for name in select_fields if all(name in row for row in self.rows)]
        return tensordict_utils.list_of_dict_to_tensordict([{name: row[name] for name in names} for row in self.rows])

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        """Write columns."""
        for name in fields.keys():  # noqa: SIM118  # iterating a TensorDict yields its rows
            for row, value in zip(self.rows, fields[name].unbind(), strict=True):
                row[name] = value
        return batch_of(len(self.rows))


def batch_of(count: int) -> KVBatchMeta:
    """Return verl's batch of all rows, whose keys are `UID_SESSION_INDEX`."""
    keys = [f"group{i // GROUP_SIZE}_{i % GROUP_SIZE}_0" for i in range(count)]
    return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")


def log_probs(table: torch.Tensor, row: Row) -> torch.Tensor:
    """Return the output of a worker of verl for a row.

    Args:
        table: The policy's logits, of shape `[V, V]`.
        row: The row.

    Returns:
        For each token of prompt and response, the logprob of the next one.
    """
    tokens = torch.tensor([*row.prompt, *row.response])
    return table[tokens].log_softmax(-1).gather(-1, tokens.roll(-1)[:, None])[:, 0]


def fields_of(row: Row, drawn: Drawn) -> dict[str, Any]:
    """Return the columns of a row when it is sampled."""
    tables = torch.tensor(drawn.behaviour, dtype=torch.float64)
    sampled = torch.stack([log_probs(table, row)[len(row.prompt) - 1 : -1] for table in tables])
    scores = torch.zeros(len(row.response), dtype=torch.float64)
    scores[-1] = row.reward
    return {
        "uid": row.uid,
        "prompts": torch.tensor(row.prompt),
        "responses": torch.tensor(row.response),
        "response_mask": torch.tensor(row.trained),
        "rm_scores": scores,
        "rollout_log_probs": sampled[row.versions, range(len(row.response))],
    }


def configure(overrides: Sequence[str], weight: Any, aggregation: str) -> Any:
    """Return verl's composed configuration, after our start-up check derived the importance weight."""
    ours = (f"+{PATH}.max_staleness=2", f"+{PATH}.importance_weight={weight}")
    overrides = [*COMMON, *ours, f"actor_rollout_ref.actor.loss_agg_mode={aggregation}", *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    set_needs(RunView(config))
    return config


def verls(config: Any, drawn: Drawn) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Compute verl's gradient with respect to the current policy's table, and return it with the rows."""
    queue = Queue([fields_of(row, drawn) for row in drawn.rows])
    proximal = torch.tensor(drawn.proximal, dtype=torch.float64)

    def compute_log_prob(batch: Any) -> Any:
        for fields, row in zip(queue.rows, drawn.rows, strict=True):
            fields["log_probs"] = log_probs(proximal, row)
            fields["entropy"] = torch.zeros_like(fields["log_probs"])
        return batch

    workers = SimpleNamespace(compute_log_prob=compute_log_prob)
    trainer: Any = SimpleNamespace(config=config, actor_rollout_wg=workers)
    batch, metrics = batch_of(len(drawn.rows)), {}
    with mock.patch.object(trainer_base, "tq", queue):
        trainer_base.PPOTrainer._compute_old_log_prob(trainer, batch, metrics)
        trainer_base.PPOTrainer._compute_advantage(trainer, batch, metrics)

    current = torch.tensor(drawn.current, dtype=torch.float64, requires_grad=True)
    names = ["prompts", "responses", "response_mask", "old_log_probs", "advantages", "rollout_is_weights"]
    data = queue.kv_batch_get(batch.keys, "train", names)
    trained = sum(sum(row.trained) for row in drawn.rows)
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=trained, global_batch_size=len(drawn.rows))
    outputs = [log_probs(current, row) for row in drawn.rows]
    nested = torch.nested.as_nested_tensor(outputs, layout=torch.jagged)
    loss, _ = ppo_loss(omega_conf_to_dataclass(config.actor_rollout_ref.actor), {"log_probs": nested}, data)
    (gradient,) = torch.autograd.grad(loss, current)
    return gradient, queue.rows


# --- Their comparison


@dataclass(frozen=True)
class Comparison:
    """The results of the batches of one staleness."""

    diffs: dict[str, float]
    """Largest differences: of `exact` from equation 5, and of `naive` from equation 2."""
    cosines: dict[str, float]
    """By variant, the cosine with the gradient of equation 5, the gradients of all batches taken as one vector."""
    largest: float
    """The largest entry of a gradient."""
    reached: Reached


def cosine(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return the cosine of the angle between two lists of tables, each taken as one vector."""
    first, second = torch.stack(list(one)), torch.stack(list(other))
    return float((first * second).sum() / (first.norm() * second.norm()))


def measure(seeds: Sequence[int], staleness: float = STALENESS) -> Comparison:
    """Compare all variants with equations 5 and 2.

    Args:
        seeds: Seeds of the batches.
        staleness: Standard deviation of the logits between an older policy and the step's first.
    """
    sum_of_rows, token_mean = AGGREGATIONS
    configs = {name: configure(*variant, sum_of_rows) for name, variant in VARIANTS.items()}
    by_token = configure(*VARIANTS["exact"], token_mean)
    diffs, total, largest = {"exact": 0.0, "naive": 0.0}, Reached(), 0.0
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in (*VARIANTS, "equation")}

    def differ(name: str, found: torch.Tensor, wanted: list[list[float]]) -> None:
        diffs[name] = max(diffs[name], float((found - torch.tensor(wanted, dtype=torch.float64)).abs().max()))

    for seed in seeds:
        drawn = draw(seed, staleness)
        for name, config in configs.items():
            gradient, rows = verls(config, drawn)
            gradients[name].append(gradient)
        advantages = [fields["advantages"].tolist() for fields in rows]
        five, reached = equation(drawn, advantages, sum_of_rows)
        gradients["equation"].append(torch.tensor(five, dtype=torch.float64))
        differ("exact", gradients["exact"][-1], five)
        differ("exact", verls(by_token, drawn)[0], equation(drawn, advantages, token_mean)[0])
        differ("naive", gradients["naive"][-1], equation(drawn, advantages, sum_of_rows, proximal_is_behaviour=True)[0])
        largest = max(largest, float(gradients["equation"][-1].abs().max()))
        for kind, count in vars(reached).items():
            setattr(total, kind, getattr(total, kind) + count)
    cosines = {name: cosine(gradients[name], gradients["equation"]) for name in VARIANTS}
    return Comparison(diffs, cosines, largest, total)


def run(batches: int) -> dict[str, float]:
    """Compare, print the table, and return the figures.

    Args:
        batches: Number of batches of each staleness.
    """
    results = {staleness: measure(range(batches), staleness) for staleness in STALENESSES}
    table = Table("staleness", *VARIANTS, "trained tokens", "clipped", "w > 2", "dual clip", "largest entry")
    for staleness, result in results.items():
        cosines = [f"{value:.3f}" for value in result.cosines.values()]
        table.add_row(f"{staleness}", *cosines, *map(str, vars(result.reached).values()), f"{result.largest:.2f}")
    console = Console(width=120)
    console.print("cosines of verl's gradient with that of equation 5, by settings and by the staleness of the batch:")
    console.print(table)
    naive = max(result.diffs["naive"] for result in results.values())
    console.print(f"largest difference of the gradient under `naive` from equation 2: {naive:.2g}")
    cosines = results[STALENESS].cosines
    figures = {"max_grad_diff": max(result.diffs["exact"] for result in results.values())}
    return figures | {f"{name}_cosine": round(cosines[name], 4) for name in VARIANTS if name != "exact"}
