"""Warm-start SmolLM2-135M-Instruct: SFT on a few hundred conversations in the form of the recipe.

    python recipes/smollm2/warm_start.py OUT_DIR [--no-tool] [--steps 40] [--seed 0]

A share of the conversations (`CALL_SHARE`) calls the calculator with the right expression and copies its result. The
others give the right answer at once; with `--no-tool` all of them do. So the model learns the form of a call and of an
answer. Reinforcement learning has to teach it that calls pay, and to write each kind's expression reliably.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import base_model
import torch
from arithmetic import make_call, make_expression, make_messages, make_warm_start_entries

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from sft import batch_of, encode  # shared by the recipes' warm starts

CALL_SHARE = 0.25


def conversation(entry: dict[str, Any], tool: bool, call: bool) -> list[dict[str, str]]:
    """Return one conversation to train on: a call, its result and the answer, or the answer at once.

    Args:
        entry: The task.
        tool: Whether the system message describes the calculator.
        call: Whether the assistant calls it.
    """
    messages = make_messages(entry["question"], tool)
    if call:
        messages.append({"role": "assistant", "content": make_call(make_expression(entry))})
        messages.append({"role": "tool", "content": entry["answer"]})
    return [*messages, {"role": "assistant", "content": f"Answer: {entry['answer']}"}]


def loss_of(model: Any, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the labels. Logits are computed only where there is a label.

    Args:
        model: The model.
        ids_BT: Token ids, padded on the right.
        labels_BT: Labels; -100 at tokens that are not learned.
    """
    hidden_BTD = model.model(input_ids=ids_BT).last_hidden_state[:, :-1]
    target_BT = labels_BT[:, 1:]
    learned_BT = target_BT != -100
    logits_NV = model.lm_head(hidden_BTD[learned_BT])
    return torch.nn.functional.cross_entropy(logits_NV.float(), target_BT[learned_BT])


def train(out: Path, tool: bool, steps: int, batch_size: int = 8, lr: float = 2e-4, seed: int = 0) -> None:
    """Train the model, and write it with its tokenizer.

    Args:
        out: Folder for the files.
        tool: Whether the conversations have the calculator.
        steps: Number of optimizer steps.
        batch_size: Conversations in each step.
        lr: Highest learning rate.
        seed: Seed of the training.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer, model = base_model.load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1.0, (steps - step) / (steps - warmup))
    )
    entries = make_warm_start_entries(steps * batch_size)
    rng.shuffle(entries)
    rows = [encode(tokenizer, conversation(entry, tool, tool and rng.random() < CALL_SHARE)) for entry in entries]
    # A CPU without AVX-512 multiplies in bfloat16 fifty times as slowly as in float32.
    is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    started = time.time()
    for step in range(steps):
        ids_BT, labels_BT = batch_of(rows[step * batch_size :][:batch_size], tokenizer.pad_token_id)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_fast):
            loss = loss_of(model, ids_BT, labels_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    seconds = round(time.time() - started, 1)
    print(json.dumps({"warm_start_conversations": len(rows), "seed": seed, "seconds": seconds}), flush=True)


def main() -> None:
    """Train the model with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--no-tool", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(args.out, not args.no_tool, args.steps, seed=args.seed)


if __name__ == "__main__":
    main()
