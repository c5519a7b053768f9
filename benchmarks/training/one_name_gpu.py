"""Adapters on a GPU: does the engine sample from the model that the trainer has adapted?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.quickstart_runs import ROOT, start

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_STEPS = 5
_RANK, _ALPHA = 8, 16
# float32 everywhere, with the parts of SGLang and transformers that take it, so that only the model differs.
_SETTINGS = {
    f"{_MODEL}.lora_rank": _RANK,
    f"{_MODEL}.lora_alpha": _ALPHA,
    f"{_MODEL}.target_modules": "all-linear",
    f"{_MODEL}.use_remove_padding": False,
    f"++{_MODEL}.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    f"{_ROLLOUT}.load_format": "safetensors",
    f"{_ROLLOUT}.gpu_memory_utilization": 0.3,
    f"{_ROLLOUT}.enforce_eager": True,
    f"++{_ROLLOUT}.engine_kwargs.sglang.attention_backend": "torch_native",
    f"++{_ROLLOUT}.engine_kwargs.sglang.sampling_backend": "pytorch",
    "trainer.save_freq": _STEPS,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
}


def compare_adapters(seed: int, out: Path) -> dict[str, float]:
    """Train adapters for some steps and one more, and compare the log-probabilities of the last one's tokens.

    Returns:
        Means of |engine - model| over the sampled tokens, in nats: `adapted`, with the adapter of the checkpoint that
        the engine had got; `base`, without it. And the number of `tokens`.
    """
    from benchmarks.one_name import read

    words = [f"{key}={value}" for key, value in _SETTINGS.items()]
    with start("sync", _STEPS + 1, seed, out, *words, platform="nvidia") as running:
        if running.wait():
            raise SystemExit(f"the run with adapters failed with exit status {running.returncode}")
    records = [record for record in read(out) if record["step"] == _STEPS + 1 and not record["validation"]]
    stale = {version for record in records for version in record["versions"]} - {-1, _STEPS}
    if stale or not records:
        raise SystemExit(f"expected tokens of the version {_STEPS}, found others: {sorted(stale)}")
    model = adapted_model(out / "checkpoints" / f"global_step_{_STEPS}" / "actor")
    adapted = [gap for record in records for gap in gaps(model, record)]
    with model.disable_adapter():
        base = [gap for record in records for gap in gaps(model, record)]
    return {"adapted": sum(adapted) / len(adapted), "base": sum(base) / len(base), "tokens": len(adapted)}


def adapted_model(checkpoint: Path) -> Any:
    """Return the quickstart's model in float32 with the adapter of verl's checkpoint of one training worker."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(ROOT / "recipes" / "quickstart" / "model", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=_RANK, lora_alpha=_ALPHA, target_modules="all-linear"))
    saved = torch.load(checkpoint / "model_world_size_1_rank_0.pt", map_location="cpu", weights_only=False)
    adapter = {name: getattr(value, "_local_tensor", value).float() for name, value in saved.items() if "lora_" in name}
    missing, unexpected = model.load_state_dict(adapter, strict=False)
    lost = [name for name in missing if "lora_" in name]
    if not adapter or lost or unexpected:
        raise SystemExit(f"the checkpoint's adapter does not fit: missing {lost[:3]}, unexpected {unexpected[:3]}")
    return model.eval()


def gaps(model: Any, record: Mapping[str, Any]) -> list[float]:
    """Return |engine - model| of the log-probability of each sampled token of a conversation with one row."""
    import torch

    ids = torch.tensor([record["ids"]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    given = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    pairs = zip(record["mask"][1:], record["logprobs"][1:], given, strict=True)
    return [abs(engine - own) for is_sampled, engine, own in pairs if is_sampled]
