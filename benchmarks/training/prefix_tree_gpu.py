"""Is training with common prefixes computed once exact in bf16 on a GPU, and what does it save there?

    bash scripts/gpu_prefix_tree.sh [--wheels FOLDER] [--small]

The script calls this with `VERL_PLATFORM=nvidia`; with `VERL_PLATFORM=cpu` and `--small` the same runs on a CPU. A
model of the sizes of Qwen2.5-0.5B with random weights computes a group of 8 rows with a prompt of 1,000 tokens and
responses of 200, in bf16, in four ways:

- `reference`: verl's FSDP2 engine, in float32;
- `rows_sdpa`, `rows_flex`: verl's FSDP2 engine, with transformers' attention of that name;
- `tree`: ours (`verl_bridge/prefix_tree/`), with flash-attn where it is installed, and SDPA elsewhere.

`noise` is how far `rows_sdpa` lies from the reference: that is the noise of bf16. `exact` is whether the tree lies no
farther than twice that, in the mean of log-probs and in the cosine of gradients. `update`, `forward` and `memory` are
verl's seconds and bytes over ours, by the fastest of `rows_sdpa` and `rows_flex`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from benchmarks.prefix_tree import peak_mb
from tests.support.training_engine import as_rows, backward, forward, make_batch, make_engine, make_loss, make_model
from verl_multiturn.verl_bridge.compat.kernels import varlen_attention
from verl_multiturn.verl_bridge.prefix_tree.engine import StrictPrefixTreeEngine

QWEN = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.02,
        "tie_word_embeddings": True}  # fmt: skip
"""Sizes of Qwen2.5-0.5B."""
SMALL = {**QWEN, "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "head_dim": 32}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "reference": {"kind": FSDPEngineWithLMHead},
    "rows_sdpa": {"kind": FSDPEngineWithLMHead, "param_dtype": "bf16"},
    "rows_flex": {"kind": FSDPEngineWithLMHead, "param_dtype": "bf16", "attention": "flex_attention"},
    "tree": {"kind": StrictPrefixTreeEngine, "param_dtype": "bf16"},
}
_ALLOWED = 2.0
"""How much farther than rows in bf16 the tree may lie from the reference: both are noise around it."""


def measure_seconds(run: Callable[[], Any], times: int = 5) -> float:
    """Return the seconds of the fastest of several runs, after two that are not measured (one may compile)."""
    found = []
    for _ in range(times + 2):
        _wait()
        began = time.perf_counter()
        run()
        _wait()
        found.append(time.perf_counter() - began)
    return min(found[2:])


def measure_mb(run: Callable[[], Any]) -> float:
    """Return by how much the device's memory grows while something runs, in MB."""
    if not torch.cuda.is_available():
        return peak_mb(run)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    _wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_arm(arm: dict[str, Any], model: Path, batch: Any, with_speed: bool) -> dict[str, Any]:
    """Return one engine's results for a batch (`log_probs`, `gradients`, on the CPU), and its costs."""
    engine, loss = make_engine(model=model, **arm), make_loss()
    log_probs = torch.cat([row[:-1].float().cpu() for row in forward(engine, batch)["log_probs"].unbind()])
    gradients = backward(engine, batch, loss)[1]
    found: dict[str, Any] = {
        "log_probs": log_probs,
        "gradients": torch.cat([gradients[name].float().cpu().flatten() for name in sorted(gradients)]),
    }
    del gradients
    if with_speed:
        found["forward_s"] = measure_seconds(lambda: forward(engine, batch))
        found["update_s"] = measure_seconds(lambda: backward(engine, batch, loss))
        found["mb"] = measure_mb(lambda: backward(engine, batch, loss))
    return found


def compare_arms(sizes: dict[str, Any], prompt: int, response: int, folder: Path) -> dict[str, Any]:
    """Return the figures of all arms; an arm that fails gives its error in the place of its figures."""
    model = make_model(folder / "model", "qwen2", **sizes)
    ids = torch.randint(sizes["vocab_size"], (8, prompt + response), generator=torch.Generator().manual_seed(0))
    ids[:, :prompt] = ids[0, :prompt]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = make_batch(as_rows(*ids.tolist(), prompt=prompt), calculate_entropy=False).to(device)
    found: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    for name, arm in ARMS.items():
        try:
            each = measure_arm(arm, model, batch, with_speed=name != "reference")
        except Exception as error:  # the other arms' figures count all the same
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            print(name, found[name], flush=True)
            continue
        log_probs, gradients = each.pop("log_probs"), each.pop("gradients")
        if not reference:
            reference = {"log_probs": log_probs, "gradients": gradients}
        else:
            apart = (log_probs - reference["log_probs"]).abs()
            each["log_prob_mean"], each["log_prob_max"] = float(apart.mean()), float(apart.max())
            cosine = torch.nn.functional.cosine_similarity(gradients, reference["gradients"], dim=0)
            each["gradient_angle"] = float((1 - cosine).clamp(min=0))
        found[name] = each
        print(name, each, flush=True)
    return {**found, **conclude(found)}


def conclude(found: dict[str, Any]) -> dict[str, Any]:
    """Return whether the tree is exact within the noise of bf16, and its savings against the faster rows."""
    rows, tree = found["rows_sdpa"], found["tree"]
    if "failed" in rows or "failed" in tree or "failed" in found["reference"]:
        return {"exact": None}
    noise = {key: rows[key] for key in ("log_prob_mean", "log_prob_max", "gradient_angle")}
    exact = all(tree[key] <= _ALLOWED * noise[key] for key in ("log_prob_mean", "gradient_angle"))
    best = [each for each in (rows, found["rows_flex"]) if "failed" not in each]
    names = {"update": "update_s", "forward": "forward_s", "memory": "mb"}
    ratios = {name: round(min(each[key] for each in best) / tree[key], 2) for name, key in names.items()}
    return {"noise": noise, "exact": exact, **ratios}


def main() -> None:
    """Compare the arms, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_tree_gpu")
    parser.add_argument("--small", action="store_true", help="a tiny model and short rows, to try it on a CPU")
    small = parser.parse_args().small
    with tempfile.TemporaryDirectory() as folder:
        sizes, prompt, response = (SMALL, 100, 20) if small else (QWEN, 1000, 200)
        found = compare_arms(sizes, prompt, response, Path(folder))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    kernel = "SDPA"
    if torch.cuda.is_available() and varlen_attention(torch.empty(0, device="cuda", dtype=torch.bfloat16)) is not None:
        kernel = "flash-attn"
    print(json.dumps({"device": device, "tree_attention": kernel, "small": small, **found}))


if __name__ == "__main__":
    main()
