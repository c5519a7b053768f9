"""verl's FSDP2 engine and ours in this process, a world of one rank: on the CPU unless `VERL_PLATFORM` has another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import torch
import torch.distributed
import verl  # noqa: F401  # it loads the plugin, and with it the CPU platform
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.1,
}  # fmt: skip
"""A tiny model's."""


def join_world() -> None:
    """Make this process the only rank, unless it is one already."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


def make_model(folder: Path, family: str = "qwen2", seed: int = 0, **sizes: Any) -> Path:
    """Write a model of random weights, without a tokenizer, and return its folder."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_engine(
    kind: type,
    model: Path,
    *,
    checkpointing: bool = False,
    lr: float = 0.0,
    param_dtype: str = "fp32",
    attention: str = "sdpa",
    **settings: Any,
) -> Any:
    """Return an engine with a model, whose parameters are kept in float32.

    Args:
        kind: Class of the engine.
        model: The model's folder.
        checkpointing: Whether activations are computed again in the backward pass.
        lr: Learning rate.
        param_dtype: The precision in which it computes, `fp32` or `bf16`; gradients are reduced in float32.
        attention: transformers' name of the rows' attention.
        **settings: Further settings of `FSDPEngineConfig`, and `use_remove_padding`.
    """
    join_world()
    padding = settings.pop("use_remove_padding", False)
    precision = {"param_dtype": param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    settings = {"strategy": "fsdp2", "use_torch_compile": False, "dtype": "float32", **settings}
    engine = kind(
        HFModelConfig(
            path=str(model), load_tokenizer=False, use_remove_padding=padding,
            enable_gradient_checkpointing=checkpointing, override_config={"attn_implementation": attention},
        ),
        FSDPEngineConfig(mixed_precision=precision, **settings),
        FSDPOptimizerConfig(lr=lr, total_training_steps=10),
        CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def make_batch(
    rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], seed: int = 0, **flags: Any
) -> TensorDict:
    """Return verl's batch of rows, with made advantages and old log-probs.

    Args:
        rows: Prompt, response, and the response's mask.
        seed: Seed of the data.
        **flags: The batch's own flags, beside those of verl's trainer; a tensor has a value for each row.
    """
    draw = torch.Generator().manual_seed(seed)
    prompts, responses, masks = ([torch.tensor(list(row[i]), dtype=torch.int64) for row in rows] for i in range(3))
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    noise = [torch.randn(len(each), generator=draw) for each in responses]
    columns = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(each)) for each in ids],
        "prompts": prompts,
        "responses": responses,
        "response_mask": masks,
        "loss_mask": [torch.cat([torch.zeros_like(a), b]) for a, b in zip(prompts, masks, strict=True)],
        "advantages": [torch.randn(1, generator=draw).expand(len(each)).clone() for each in responses],
        "old_log_probs": [-4.5 + 0.3 * each for each in noise],
        "ref_log_prob": [-4.5 - 0.3 * each for each in noise],
        "rollout_is_weights": [(0.3 * each).exp() for each in noise],
    }
    jagged = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()}
    said = {
        "use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(rows),
        "global_batch_size": len(rows), "temperature": 1.0, "calculate_entropy": True, "compute_loss": True,
        "pad_mode": DatasetPadMode.NO_PADDING, "return_model_output": True, "pad_token_id": 0,
    }  # fmt: skip
    said |= flags
    of_rows = {name: each for name, each in said.items() if isinstance(each, torch.Tensor)}
    return tu.get_tensordict({**jagged, **of_rows}, {name: each for name, each in said.items() if name not in of_rows})


def make_loss(mode: str = "vanilla", **settings: Any) -> Any:
    """Return verl's loss of a policy, in one of verl's modes."""
    policy = settings.pop("policy_loss", None) or PolicyLossConfig(loss_mode=mode, dro_beta=0.1)
    said = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": False}
    return partial(ppo_loss, config=ActorConfig(**{**said, **settings}, policy_loss=policy))


def forward(engine: Any, batch: TensorDict) -> dict[str, Any]:
    """Return the columns that an engine computes without a loss, as the pass for old log-probs does."""
    with engine.eval_mode(), torch.no_grad():
        output: dict[str, Any] = engine.forward_backward_batch(batch.clone(), None, forward_only=True)
    return dict(output["model_output"])


def backward(engine: Any, batch: TensorDict, loss: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the metrics of an engine's update on a batch, and the gradient of each parameter."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch.clone(), loss, forward_only=False)
        gradients = {
            name: (each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad).clone()
            for name, each in engine.module.named_parameters()
            if each.grad is not None
        }
        engine.optimizer_zero_grad()
    return output, gradients


def farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two columns of rows lie apart; a row's last value, which predicts nothing, is skipped."""
    pairs = zip(one.unbind(), other.unbind(), strict=True)
    return max(float((a[:-1] - b[:-1]).abs().max()) for a, b in pairs if len(a) > 1)


def gradients_differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest difference as a share of the largest entry, and the cosine of the whole gradients."""
    assert one.keys() == other.keys()
    first, second = (torch.cat([each[name].double().flatten() for name in sorted(each)]) for each in (one, other))
    size = float(first.abs().max())
    cosine = float(torch.nn.functional.cosine_similarity(first, second, dim=0)) if size else 1.0
    return float((first - second).abs().max()) / (size or 1.0), cosine


def as_rows(*rows: Sequence[int], prompt: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Return rows of ids as prompt, response and a mask of ones."""
    return [(list(row[:prompt]), list(row[prompt:]), [1] * (len(row) - prompt)) for row in rows]


def random_rows(seed: int, most: int = 40, vocabulary: int = 96) -> list[tuple[list[int], list[int], list[int]]]:
    """Draw the rows of a forest: prompts, responses that branch off anywhere, and masks with gaps."""
    draw = np.random.default_rng(seed)

    def ids(number: int) -> list[int]:
        return [int(each) for each in draw.integers(1, vocabulary, number)]

    rows: list[tuple[list[int], list[int], list[int]]] = []
    for _ in range(draw.integers(1, 4)):
        prompt = ids(int(draw.integers(1, most)))
        begun: list[list[int]] = [[]]
        for _ in range(draw.integers(1, 7)):
            known = begun[draw.integers(len(begun))]
            response = [*known[: draw.integers(0, len(known) + 1)], *ids(int(draw.integers(1, most)))]
            begun.append(response)
            rows.append((prompt, response, [int(each) for each in draw.integers(0, 2, len(response) - 1)] + [1]))
    return [rows[i] for i in draw.permutation(len(rows))]
