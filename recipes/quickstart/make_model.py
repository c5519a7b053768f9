"""Make the quickstart's warm-started model: a tiny Qwen2 that sometimes calls the calculator and mostly guesses.

    python recipes/quickstart/make_model.py            # six minutes on two cores, writes recipes/quickstart/model

The chat template is Qwen2.5's own (Apache-2.0). The tokenizer is a small byte-level BPE, trained here on rendered
conversations, with Qwen2.5's control tokens and single-digit numbers. Training is plain SFT. In the first part of the
steps (`COPY_FIRST`) all conversations call the calculator and copy its result. After that, a share of them does
(`CALL_SHARE`), and the others guess a number. So reinforcement learning has something to find, and greedy decoding
starts out wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from task import make_entries, make_messages
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "common"))

from sft import Learner, batch_of, encode  # noqa: E402
from tiny_model import suffix_logits, tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402

MODEL_DIR = HERE / "model"
TOOL_CONFIG = HERE.parents[1] / "tool_configs" / "calculator.yaml"
CALL_SHARE = 0.4
COPY_FIRST = 0.6


def conversation(entry: dict[str, Any], call: bool, rng: random.Random) -> list[dict[str, Any]]:
    """Return one conversation to train on: a tool call and its copied result, or a guess.

    Args:
        entry: The task, from `make_entries`.
        call: Whether the assistant calls the calculator.
        rng: Random numbers for the guess.
    """
    messages: list[dict[str, Any]] = list(make_messages(entry["question"]))
    answer = entry["answer"]
    if call:
        arguments = {"expression": entry["metadata"]["expression"]}
        function = {"name": "calculator", "arguments": arguments}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": answer})
    else:
        answer = str(rng.randint(-999, 1999))
    return [*messages, {"role": "assistant", "content": f"Answer: {answer}"}]


def main() -> None:
    """Train the tokenizer and the model, and write both into `recipes/quickstart/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    tools = [entry["tool_schema"] for entry in yaml.safe_load(TOOL_CONFIG.read_text(encoding="utf-8"))["tools"]]
    template = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    # Seeds from 10_000_000 on belong to the warm start. The seeds of the quickstart's rows are smaller.
    entries = make_entries(20_000, seed=10_000_000)

    render = renderer(template)
    texts = [
        render(messages=conversation(entry, index % 2 == 0, rng), tools=tools)
        for index, entry in enumerate(entries[:400])
    ]
    tokenizer = make_tokenizer(texts, template, 640)

    # With the default range of 0.02, so small a model learns to copy late.
    config = tiny_config(tokenizer, hidden_size=128, layers=4, positions=2048, initializer_range=0.08)
    model = Qwen2ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    learner = Learner(model, args.lr, args.steps, warmup=max(1, args.steps // 20))
    examples = [encode(tokenizer, conversation(entry, call, rng), tools) for entry in entries for call in (True, False)]
    calling, guessing = examples[::2], examples[1::2]
    first = examples[0][0]
    shared = [
        all(ids[at] == first[at] for ids, _ in examples[:64]) for at in range(min(len(ids) for ids, _ in examples[:64]))
    ]
    prefix = first[: shared.index(False)]
    started = time.time()
    for step in range(args.steps):
        # The model has to learn to copy first, so the guesses come only after a part of the steps.
        call_share = 1.0 if step < COPY_FIRST * args.steps else CALL_SHARE
        chosen = [rng.choice(calling if rng.random() < call_share else guessing) for _ in range(args.batch_size)]
        rows = [(ids[len(prefix) :], mask[len(prefix) :]) for ids, mask in chosen]
        ids_BT, labels_BT = batch_of(rows, config.pad_token_id)
        logits_BTV = suffix_logits(model, prefix, ids_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        learner.update(loss)
        if step % 50 == 0 or step == args.steps - 1:
            print(
                f"step {step} loss {loss.item():.4f} tokens {ids_BT.shape[1]} {time.time() - started:.0f} s", flush=True
            )
            if step % 100 == 0:
                print(f"  copied right: {copy_accuracy(model, tokenizer, tools, config.pad_token_id):.3f}", flush=True)
    accuracy = copy_accuracy(model, tokenizer, tools, config.pad_token_id)
    print(
        json.dumps({"steps": args.steps, "seed": args.seed, "copied_right": accuracy, "seconds": time.time() - started})
    )
    model.to(torch.bfloat16).save_pretrained(MODEL_DIR)
    tokenizer.save_pretrained(MODEL_DIR)


@torch.no_grad()
def copy_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tools: list[Any], pad: int) -> float:
    """Return the share of held-out conversations with a call in which greedy decoding gets every token right.

    The token that begins the call is not counted.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tools: Tool schemas for the chat template.
        pad: Id of the padding token.
    """
    rng = random.Random(1)
    rows = [encode(tokenizer, conversation(e, True, rng), tools) for e in make_entries(128, seed=20_000_000)]
    ids_BT, labels_BT = batch_of(rows, pad)
    guess_BT = model(input_ids=ids_BT, attention_mask=(ids_BT != pad).long()).logits[:, :-1].argmax(-1)
    target_BT = labels_BT[:, 1:]
    call_token = tokenizer.convert_tokens_to_ids("<tool_call>")
    # Whether the first token begins a call or a guess is random by design.
    right_BT = (guess_BT == target_BT) | (target_BT == -100) | (target_BT == call_token)
    return float(right_BT.all(dim=1).float().mean())


if __name__ == "__main__":
    main()
