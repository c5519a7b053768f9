"""Make the tiny Qwen2 that `--smoke` trains: it knows how to serve a few customers by heart."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from verl_multiturn.task_sets.tau2.package import tool_schemas

COMMON = Path(__file__).resolve().parents[1] / "common"
sys.path.insert(0, str(COMMON))
from sft import Learner, encode  # noqa: E402  # the folder is on the path only now
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer  # noqa: E402


def make_model(
    folder: Path, domain: str, conversations: Sequence[tuple[Sequence[str], list[dict[str, Any]]]], steps: int = 120
) -> None:
    """Train the model, and write it with its tokenizer.

    Args:
        folder: Folder for the files.
        domain: Name of the domain.
        conversations: For each task the names of its tools, and the conversation that solves it.
        steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more threads, so small a model is slower on a busy machine
    rng = random.Random(0)
    schemas = tool_schemas(domain)
    texts = [message["content"] for _, messages in conversations for message in messages]
    texts += [json.dumps(schemas[name]) for names, _ in conversations for name in names]
    texts += ["system\n", "user\n", "assistant\n"] * 99
    tokenizer = make_tokenizer(texts, (COMMON / "model" / "chat_template.jinja").read_text(encoding="utf-8"), 1024)
    config = tiny_config(tokenizer, hidden_size=64, layers=2, positions=4096, initializer_range=0.12)
    model = Qwen2ForCausalLM(config)
    examples = []
    for names, messages in conversations:
        ids, mask = encode(tokenizer, messages, [schemas[name] for name in names])
        greeted, _ = encode(tokenizer, messages[:2], [schemas[name] for name in names])
        examples.append((ids, [0] * len(greeted) + mask[len(greeted) :]))  # the greeting is not the model's
    learner = Learner(model, lr=5e-3, steps=steps, warmup=10, weight_decay=0.0)
    for step in range(steps):
        loss = learner.learn(rng.sample(examples, min(2, len(examples))))
        if step % 20 == 0:
            print(json.dumps({"step": step, "loss": round(loss.item(), 4)}), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lengths = [len(ids) for ids, _ in examples]
    print(json.dumps({"conversations": len(examples), "tokens": max(lengths), "loss": round(loss.item(), 4)}))
