"""Make the tiny Qwen2 that `--smoke` trains: it knows the programs of the made problems by heart."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

COMMON = Path(__file__).resolve().parents[1] / "common"
sys.path.insert(0, str(COMMON))
from sft import Learner, encode  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402


def make_model(folder: Path, rows: Sequence[dict[str, Any]], steps: int = 240) -> None:
    """Train the model, and write it with its tokenizer.

    Args:
        folder: Folder for the files.
        rows: Rows with a demonstration.
        steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more threads, so small a model is slower on a busy machine
    rng = random.Random(0)
    said = [
        [*row["prompt"], *({"role": "assistant", "content": turn} for turn in row["extra_info"]["demonstration"])]
        for row in rows
    ]
    template = (COMMON / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    render = renderer(template)
    tokenizer = make_tokenizer([render(messages=messages, tools=None) for messages in said], template, 768)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, 64, 2, 2048, 0.12))
    examples = [encode(tokenizer, messages) for messages in said]
    learner = Learner(model, lr=4e-3, steps=steps, warmup=16, floor=0.02, weight_decay=0.0)
    for _ in range(steps):
        loss = learner.learn(rng.sample(examples, 4))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lengths = [len(ids) for ids, _ in examples]
    print(json.dumps({"problems": len(said), "tokens": lengths, "steps": steps, "loss": round(loss.item(), 4)}))
