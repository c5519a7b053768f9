"""Checkpoints for `benchmarks.export`: written by verl's own checkpoint manager, from real FSDP2 ranks on the CPU."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any

import torch

RANK, ALPHA = 8, 16
ROWS, TOKENS = 4, 48


def ids(vocabulary: int) -> torch.Tensor:
    """Return the token ids for which logits are compared."""
    return torch.randint(vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(7))


def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of a model for these token ids, in float32."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids(model.config.vocab_size), use_cache=False).logits.float()
    return found


def write(base: Path, out: Path, ranks: int, lora: bool) -> torch.Tensor:
    """Write a checkpoint with that many ranks, and return the logits that its model had before it was split.

    Without LoRA the weights are the base's, moved at random; with it, the base's and an adapter drawn at random.

    Args:
        base: A Hugging Face folder.
        out: The folder of the checkpoint.
        ranks: Number of processes.
        lora: Whether the model has an adapter.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    torch.multiprocessing.spawn(_rank, (str(base), str(out), ranks, lora, port), nprocs=ranks)
    found: torch.Tensor = torch.load(out / "logits.pt")
    return found


def train_lora(base: Path, out: Path, updates: int = 3) -> torch.Tensor:
    """Train an adapter by verl's own FSDP2 engine and save it, and return the logits that the engine's model then has.

    Advantages are drawn at random: their values do not matter here.
    """
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    torch.multiprocessing.spawn(_train, (str(base), str(out), updates), nprocs=1)
    found: torch.Tensor = torch.load(out / "logits.pt")
    return found


def _train(rank: int, base: str, out: str, updates: int) -> None:
    warnings.simplefilter("ignore")
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from tests.support.training_engine import join_world, make_batch, make_loss

    join_world()
    adapter = {"lora_rank": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    plain = {"use_remove_padding": False, "enable_gradient_checkpointing": False}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(path=base, **adapter, **plain, override_config={"attn_implementation": "sdpa"}),
        FSDPEngineConfig(
            strategy="fsdp2",
            dtype="float32",
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(lr=0.02, total_training_steps=updates),
        CheckpointConfig(),
    )
    engine.initialize()
    draw = torch.Generator().manual_seed(3)
    rows = [(*torch.randint(300, (2, 12), generator=draw).tolist(), [1] * 12) for _ in range(8)]
    for update in range(updates):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(make_batch(rows, update), make_loss(), forward_only=False)
            engine.optimizer_step()
    Path(out).mkdir(parents=True)
    with engine.eval_mode():
        torch.save(logits_of(engine.module), Path(out) / "logits.pt")
    engine.save_checkpoint(out, global_step=updates)
    torch.distributed.destroy_process_group()


def _rank(rank: int, base: str, out: str, ranks: int, lora: bool, port: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from omegaconf import OmegaConf
    from peft import LoraConfig, TaskType, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    layers = model.model.layers
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(
                TaskType.CAUSAL_LM,
                r=RANK,
                lora_alpha=ALPHA,
                target_modules="all-linear",
                bias="none",
                init_lora_weights=False,
            ),
        ).eval()
    else:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn_like(weight))
    if rank == 0:
        Path(out).mkdir(parents=True)
        torch.save(logits_of(model), Path(out) / "logits.pt")
    torch.distributed.barrier()
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    contents = OmegaConf.create({"load_contents": ["model"], "save_contents": ["model"]})
    tokenizer = AutoTokenizer.from_pretrained(base)
    FSDPCheckpointManager(model, None, None, tokenizer, checkpoint_config=contents).save_checkpoint(out, global_step=1)
    torch.distributed.destroy_process_group()
