"""Make the tiny Qwen2 that `--smoke` trains: it knows the solutions of the made household's tasks by heart.

It reads each turn in the form of `context.mode=window`: the system message, the first observation, and the last steps.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from household import Household
from speech import SYSTEM_PROMPT, to_text
from transformers import Qwen2Config, Qwen2ForCausalLM

COMMON = Path(__file__).resolve().parents[1] / "common"
sys.path.insert(0, str(COMMON))
from sft import batch_of, encode  # noqa: E402
from tiny_tokenizer import make_tokenizer  # noqa: E402

_STEPS_SHOWN = 2
"""As `context.turns` in config.yaml."""


def turns_of(seed: int) -> list[list[dict[str, Any]]]:
    """Return the turns of a solved episode, each as messages in the form of a window; the last message is the turn."""
    world = Household()
    said, _ = world.reset(seed)
    asked = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": to_text(world, said, {})}]
    steps: list[list[dict[str, Any]]] = []
    turns = []
    for action in world.solution():
        turn = {"role": "assistant", "content": f"<think>I {action}.</think><action>{action}</action>"}
        turns.append([*asked, *(message for step in steps[-_STEPS_SHOWN:] for message in step), turn])
        said, _, _, _, _ = world.step(action)
        steps.append([turn, {"role": "user", "content": to_text(world, said, {})}])
    return turns


def make_model(folder: Path, seeds: Sequence[int], steps: int = 240) -> None:
    """Train the model, and write it with its tokenizer.

    Args:
        folder: Folder for the files.
        seeds: Seeds of the episodes.
        steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more threads, so small a model is slower on a busy machine
    rng = random.Random(0)
    turns = [turn for seed in seeds for turn in turns_of(seed)]
    texts = [message["content"] for turn in turns for message in turn] + ["system\n", "user\n", "assistant\n"] * 99
    tokenizer = make_tokenizer(texts, (COMMON / "model" / "chat_template.jinja").read_text(encoding="utf-8"), 512)
    pad, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            initializer_range=0.08,
            eos_token_id=end,
            pad_token_id=pad,
            bos_token_id=None,
        )
    )
    examples = []
    for turn in turns:
        before, _ = encode(tokenizer, turn[:-1])
        ids, mask = encode(tokenizer, turn)
        examples.append((ids, [0] * len(before) + mask[len(before) :]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        ids_BT, labels_BT = batch_of(rng.sample(examples, 8), pad)
        learned_BT = labels_BT[:, 1:] != -100
        logits_NV = model.lm_head(model.model(input_ids=ids_BT).last_hidden_state[:, :-1][learned_BT])
        loss = torch.nn.functional.cross_entropy(logits_NV, labels_BT[:, 1:][learned_BT])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(json.dumps({"turns": len(turns), "steps": steps, "loss": round(loss.item(), 4)}))
