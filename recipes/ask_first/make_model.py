"""Make the warm-started model of `ask_first`: a tiny Qwen2 that knows the format and has a poor habit.

    python recipes/ask_first/make_model.py            # minutes on two cores, writes recipes/ask_first/model

It begins with the weights of the quickstart's model, which can write a call and copy its result, and with a tokenizer
of its own. Training is plain SFT. In the first part of the steps (`GOOD_FIRST`) all conversations end with the right
answer; some ask needlessly before (`NEEDLESS_FIRST`), since a model that asks by lot must know how to go on. After that
half of them guess a number at once, and the others ask or call the calculator by lot, hardly looking at the missing
part (`HABIT`). So reinforcement learning has something to find: when to ask. Greedy decoding starts out guessing.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment
from missing_number import SYSTEM_PROMPT, Task, make_tasks
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "common"))

from sft import batch_of, encode  # noqa: E402
from tiny_model import suffix_logits  # noqa: E402
from tiny_tokenizer import make_tokenizer  # noqa: E402

MODEL_DIR = HERE / "model"
BEGINNING = HERE.parent / "quickstart" / "model"
TOOL_CONFIG = HERE.parents[1] / "tool_configs" / "calculator.yaml"
VOCABULARY = 640
GOOD_FIRST = 0.7
NEEDLESS_FIRST = 0.3
HABIT = {
    "missing": {"guess": 0.5, "call": 0.2, "ask": 0.3},
    "complete": {"guess": 0.5, "call": 0.3, "ask": 0.2},
}
"""Shares of the first turns after the good part, where a number is missing and where none is."""
CALL_AFTER_ASKING = 0.9
"""Share of the conversations that call the calculator after a question; the others guess."""


def conversation(task: Task, first: str, call: bool, rng: random.Random) -> list[dict[str, Any]]:
    """Return one conversation to train on.

    Args:
        task: The task.
        first: The action of the first turn: `ask`, `call` or `guess`. `call` with a missing number makes one up.
        call: Whether a conversation with a question calls the calculator, and does not guess.
        rng: Random numbers for guesses, and for whom to ask for where nothing is missing.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task.question},
    ]
    numbers = task.heard()
    if first == "ask":
        name = task.missing or rng.choice(task.names)
        told = task.tell(name) if task.missing else f"I said: {task.tell(name)}"
        messages += [{"role": "assistant", "content": task.ask(name)}, {"role": "user", "content": told}]
    elif task.missing:
        numbers[-1] = rng.randint(10, 99)
    if first == "guess" or (first == "ask" and not call):
        return [*messages, {"role": "assistant", "content": f"Answer: {rng.randint(20, 198)}"}]
    function = {"name": "calculator", "arguments": {"expression": " + ".join(map(str, numbers))}}
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": str(sum(numbers))},
        {"role": "assistant", "content": f"Answer: {sum(numbers)}"},
    ]


def good(task: Task, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation that asks exactly where a number is missing, and then calls the calculator."""
    return conversation(task, "ask" if task.missing else "call", True, rng)


def skilled(task: Task, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation with the right answer; some ask for a number that the user has given."""
    return conversation(task, "ask", True, rng) if rng.random() < NEEDLESS_FIRST else good(task, rng)


def habitual(task: Task, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation in the poor habit, which hardly looks at the missing part."""
    shares = HABIT["missing" if task.missing else "complete"]
    first = rng.choices(list(shares), weights=list(shares.values()))[0]
    return conversation(task, first, rng.random() < CALL_AFTER_ASKING, rng)


def begun_model(tokenizer: PreTrainedTokenizerFast, begin: Path) -> Qwen2ForCausalLM:
    """Return a model with the weights of another; a token that the other's vocabulary does not have begins at random.

    Args:
        tokenizer: Tokenizer of the new model.
        begin: Folder of the other model.
    """
    source = Qwen2ForCausalLM.from_pretrained(begin, dtype=torch.float32)
    config: Qwen2Config = source.config
    config.vocab_size = math.ceil(len(tokenizer) / 64) * 64
    config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    weights = source.state_dict()
    old_VH = weights.pop("model.embed_tokens.weight")
    weights.pop("lm_head.weight", None)  # tied
    model = Qwen2ForCausalLM(config)
    model.load_state_dict(weights, strict=False)
    known = AutoTokenizer.from_pretrained(begin).get_vocab()
    with torch.no_grad():
        for token, index in tokenizer.get_vocab().items():
            if token in known:
                model.model.embed_tokens.weight[index] = old_VH[known[token]]
    return model


@torch.no_grad()
def share_right(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tools: list[Any]) -> float:
    """Return the share of held-out good conversations in which greedy decoding gets every token right.

    The first token of the first turn is not counted, because the habit draws it by lot.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tools: Tool schemas for the chat template.
    """
    rng = random.Random(1)
    pad = model.config.pad_token_id
    rows = [encode(tokenizer, good(task, rng), tools) for task in make_tasks(128, seed=20_000_000)]
    for _, mask in rows:
        mask[mask.index(1)] = 0
    ids_BT, labels_BT = batch_of(rows, pad)
    guess_BT = model(input_ids=ids_BT).logits[:, :-1].argmax(-1)
    target_BT = labels_BT[:, 1:]
    # After the question the habit guesses or calls by lot, so where a call begins is not counted either.
    call = tokenizer.convert_tokens_to_ids("<tool_call>")
    right_BT = (guess_BT == target_BT) | (target_BT == -100) | (target_BT == call)
    return float(right_BT.all(dim=1).float().mean())


def learn(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tools: list[Any], args: Any, rng: random.Random
) -> None:
    """Train the model: conversations with the right answer first, then the habit.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tools: Tool schemas for the chat template.
        args: `steps`, `batch_size` and `lr`.
        rng: Random numbers that draw the conversations.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.steps))),
    )
    # Seeds from 10_000_000 on belong to the warm start. The seeds of the recipe's rows are smaller.
    tasks = make_tasks(20_000, seed=10_000_000)
    prompts = [encode(tokenizer, conversation(task, "guess", False, rng)[:2], tools)[0] for task in tasks[:64]]
    together = takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    prefix = [ids[0] for ids in together]
    started = time.time()
    for step in range(args.steps):
        make = skilled if step < GOOD_FIRST * args.steps else habitual
        rows = [encode(tokenizer, make(rng.choice(tasks), rng), tools) for _ in range(args.batch_size)]
        rows = [(ids[len(prefix) :], mask[len(prefix) :]) for ids, mask in rows]
        ids_BT, labels_BT = batch_of(rows, model.config.pad_token_id)
        logits_BTV = suffix_logits(model, prefix, ids_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
            if step % 100 == 0:
                print(f"  right: {share_right(model, tokenizer, tools):.3f}", flush=True)


def main() -> None:
    """Train the tokenizer and the model, and write both into `recipes/ask_first/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begin", type=Path, default=BEGINNING, help="folder of the model to begin with")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    started = time.time()

    tools = [entry["tool_schema"] for entry in yaml.safe_load(TOOL_CONFIG.read_text(encoding="utf-8"))["tools"]]
    template = (BEGINNING / "chat_template.jinja").read_text(encoding="utf-8")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    render = environment.from_string(template).render
    texts = [render(messages=good(task, rng), tools=tools) for task in make_tasks(400, seed=10_000_000)]
    tokenizer = make_tokenizer(texts, template, VOCABULARY)
    model = begun_model(tokenizer, args.begin)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    learn(model, tokenizer, tools, args, rng)
    right = share_right(model, tokenizer, tools)
    model.to(torch.bfloat16).save_pretrained(MODEL_DIR)
    tokenizer.save_pretrained(MODEL_DIR)
    print(json.dumps({"steps": args.steps, "seed": args.seed, "right": right, "seconds": time.time() - started}))


if __name__ == "__main__":
    main()
