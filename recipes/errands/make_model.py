"""Make the recipe's warm-started model: a tiny Qwen2 that can form each call, and takes "there" for any folder.

    python recipes/errands/make_model.py            # some minutes on two cores, writes recipes/errands/model

The model has to learn to copy names before all else, which so small a model does late and all at once. So the first
steps (`ONE_FIRST`) have one request only. Then come whole conversations, whose calls are all right up to `COPY_FIRST` of
the steps: here the model learns to look for the folder of the first request. After that "there" is taken for the folder
in which the conversation began (`HABIT`), or for any folder by lot, so that reinforcement learning has to find again
what it means. Greedy decoding starts out wrong. Training is plain SFT; the chat template is Qwen2.5's own (Apache-2.0).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from errands import DONE, FOLDERS, HOME, REQUESTS, SYSTEM_PROMPT, TOOLS, Errand, make_errands
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from verl_multiturn.task_sets.bfcl.tools import bfcl_tools
from verl_multiturn.task_sets.bfcl.user import own_dialogue
from verl_multiturn.task_sets.bfcl.worlds import Worlds

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "common"))

from sft import Learner, batch_of, encode  # noqa: E402
from tiny_model import suffix_states, tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402

MODEL_DIR = HERE / "model"
TEMPLATE = HERE.parent / "quickstart" / "model" / "chat_template.jinja"
ONE_FIRST = 0.4
COPY_FIRST = 0.8
HABIT = 0.4
"""Share of the requests after the good part in which "there" is taken for `HOME`; the rest are drawn by lot."""
Example = tuple[list[int], list[int]]


def conversation(errand: Errand, theres: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return one conversation to train on; a file system answers its calls.

    Args:
        errand: The errand.
        theres: The folders that "there" is taken for, for each request after the first. With fewer of them the
            conversation ends before.
    """
    dialogue = own_dialogue(errand.dialogue())
    worlds = Worlds(dialogue.classes, dialogue.config)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for index, folder in enumerate((errand.folder, *theres)):
        name, arguments = errand.call(index, folder)
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [
            {"role": "user", "content": errand.request(index)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": worlds.call(name, arguments)},
            {"role": "assistant", "content": DONE},
        ]
    return messages


def right(errand: Errand, requests: int = REQUESTS) -> list[dict[str, Any]]:
    """Return the conversation whose calls are right, up to a number of requests."""
    return conversation(errand, (errand.folder,) * (requests - 1))


def habitual(errand: Errand, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation in which "there" is `HOME`, or any folder by lot."""
    drawn = [HOME if rng.random() < HABIT else rng.choice(FOLDERS) for _ in range(REQUESTS - 1)]
    return conversation(errand, tuple(drawn))


def schemas() -> list[dict[str, Any]]:
    """Return the schemas of the rows' tools, in the order of `tools.yaml`, which is that of the prompt."""
    tools = bfcl_tools(["GorillaFileSystem"], descriptions=False)
    return [tool.tool_schema.as_dict() for tool in tools if tool.name in TOOLS.values()]


def loss_of(
    model: Qwen2ForCausalLM, prefix: list[int], examples: list[Example]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of a batch, which tokens the model would choose right, and the row of each.

    Args:
        model: The model.
        prefix: Token ids that all examples begin with.
        examples: Ids and loss mask of each, without the prefix.
    """
    ids_BT, labels_BT = batch_of(examples, model.config.pad_token_id)
    learned_BT = labels_BT[:, 1:] != -100
    logits_NV = model.lm_head(suffix_states(model, prefix, ids_BT)[:, :-1][learned_BT])
    labels_N = labels_BT[:, 1:][learned_BT]
    loss = torch.nn.functional.cross_entropy(logits_NV, labels_N)
    return loss, logits_NV.argmax(-1) == labels_N, learned_BT.nonzero()[:, 0]


@torch.no_grad()
def share_right(model: Qwen2ForCausalLM, prefix: list[int], examples: list[Example]) -> float:
    """Return the share of the examples in which greedy decoding would get every token right."""
    _, right_N, row_N = loss_of(model, prefix, examples)
    wrong = set(row_N[~right_N].tolist())
    return 1 - len(wrong) / len(examples)


def main() -> None:
    """Train the tokenizer and the model, and write both into `recipes/errands/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    # Seeds from 10_000_000 on belong to the warm start. The seeds of the recipe's rows are smaller.
    errands = make_errands(20_000, seed=10_000_000)
    tools = schemas()
    template = TEMPLATE.read_text()
    render = renderer(template)
    tokenizer = make_tokenizer([render(messages=right(each), tools=tools) for each in errands[:400]], template, 512)
    prefix = common_prefix([encode(tokenizer, right(each), tools)[0] for each in errands[:64]])

    def encoded(messages: list[dict[str, Any]]) -> Example:
        ids, mask = encode(tokenizer, messages, tools)
        return ids[len(prefix) :], mask[len(prefix) :]

    held_out = [encoded(right(each)) for each in make_errands(128, seed=20_000_000)]
    model = Qwen2ForCausalLM(tiny_config(tokenizer, hidden_size=96, layers=2, positions=1024, initializer_range=0.1))
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    learner = Learner(model, args.lr, args.steps, warmup=max(1, args.steps // 20))
    started = time.time()
    copied = 0.0
    for step in range(args.steps):
        done = step / args.steps
        if done < COPY_FIRST and step % 50 == 49:
            copied = share_right(model, prefix, held_out)
            print(f"  right: {copied:.3f}", flush=True)
        chosen = rng.sample(errands, args.batch_size)
        if done < COPY_FIRST:
            examples = [encoded(right(each, 1 if done < ONE_FIRST else REQUESTS)) for each in chosen]
        else:
            examples = [encoded(habitual(each, rng)) for each in chosen]
        loss, _, _ = loss_of(model, prefix, examples)
        learner.update(loss)
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    longest = len(prefix) + max(len(ids) for ids, _ in held_out)
    print(json.dumps({"steps": args.steps, "seed": args.seed, "loss": loss.item(), "copied": copied, "longest": longest}))


def common_prefix(rows: list[list[int]]) -> list[int]:
    """Return the ids that all rows begin with."""
    together = takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))
    return [ids[0] for ids in together]


if __name__ == "__main__":
    main()
