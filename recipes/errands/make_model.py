"""Make the recipe's warm-started model: a tiny Qwen2 that can form each call, and takes "there" for any folder.

    python recipes/errands/make_model.py            # 1 to 2 minutes of one core, writes recipes/errands/model

Training is plain SFT, in three parts. The model has to learn to copy names before all else, which so small a model does
late and all at once; so the conversations of the first part have one request only. Those of the second are whole and
right, so that the model learns to look for the folder of the first request. Each of the two lasts until held-out
conversations are right. In the last part "there" is mostly taken for the folder in which the conversation began, or for
a wrong one, so that reinforcement learning has to find its meaning again. Greedy decoding starts out wrong, and the
remaining share of the right folder should be much the same for all four: the last line has it (`sampled_right`). The
chat template is Qwen2.5's own (Apache-2.0).
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from errands import DONE, FOLDERS, HOME, REQUESTS, SYSTEM_PROMPT, TOOLS, Errand, make_errands
from transformers import Qwen2ForCausalLM

from verl_multiturn.task_sets.bfcl.tools import bfcl_tools
from verl_multiturn.task_sets.bfcl.user import own_dialogue
from verl_multiturn.task_sets.bfcl.worlds import DialogueWorlds

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "common"))

from sft import Learner, batch_of, encode  # noqa: E402
from tiny_model import suffix_states, tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402

MODEL_DIR = HERE / "model"
TEMPLATE = HERE.parent / "quickstart" / "model" / "chat_template.jinja"
ENOUGH = 0.98
"""Share of the held-out conversations that have to be right at the end of the first two parts."""
HOME_CARDS, RIGHT_CARDS, OTHER_CARDS = 10, 6, 3
"""How often "there" is taken for `HOME`, for the right folder and for each other, in 25 requests of the last part."""
Example = tuple[list[int], list[int]]


def conversation(errand: Errand, theres: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return one conversation to train on; a file system answers its calls.

    Args:
        errand: The errand.
        theres: The folders that "there" is taken for, for each request after the first. With fewer of them the
            conversation ends before.
    """
    dialogue = own_dialogue(errand.dialogue())
    worlds = DialogueWorlds(dialogue.classes, dialogue.config)
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


def one_request(_: Errand) -> tuple[str, ...]:
    """Return no folders: the conversation has the first request alone."""
    return ()


def right(errand: Errand) -> tuple[str, ...]:
    """Return the folders that "there" means."""
    return (errand.folder,) * (REQUESTS - 1)


def schemas() -> list[dict[str, Any]]:
    """Return the schemas of the rows' tools, in the order of `tools.yaml`, which is that of the prompt."""
    tools = bfcl_tools(["GorillaFileSystem"], descriptions=False)
    return [tool.tool_schema.as_dict() for tool in tools if tool.name in TOOLS.values()]


def loss_of(
    model: Qwen2ForCausalLM, prefix: list[int], examples: list[Example]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of each learned token of a batch, which of them the model would choose right, and their rows.

    Args:
        model: The model.
        prefix: Token ids that all examples begin with.
        examples: Ids and loss mask of each, without the prefix.
    """
    ids_BT, labels_BT = batch_of(examples, model.config.pad_token_id)
    learned_BT = labels_BT[:, 1:] != -100
    logits_NV = model.lm_head(suffix_states(model, prefix, ids_BT)[:, :-1][learned_BT])
    labels_N = labels_BT[:, 1:][learned_BT]
    loss_N = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="none")
    return loss_N, logits_NV.argmax(-1) == labels_N, learned_BT.nonzero()[:, 0]


@torch.no_grad()
def share_right(model: Qwen2ForCausalLM, prefix: list[int], examples: list[Example]) -> float:
    """Return the share of the examples in which greedy decoding would get every token right."""
    _, right_N, row_N = loss_of(model, prefix, examples)
    wrong = set(row_N[~right_N].tolist())
    return 1 - len(wrong) / len(examples)


@torch.no_grad()
def chance(model: Qwen2ForCausalLM, prefix: list[int], examples: list[Example]) -> float:
    """Return the mean probability with which sampling would give the examples' turns."""
    loss_N, _, row_N = loss_of(model, prefix, examples)
    return float((-torch.zeros(len(examples)).index_add(0, row_N, loss_N)).exp().mean())


def main() -> None:
    """Train the tokenizer and the model, and write both into `recipes/errands/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-steps", type=int, default=1500, help="most steps of each of the first two parts")
    parser.add_argument("--habit-steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums of several threads differ in their last digits, and so would the model
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    # Seeds from 10_000_000 on belong to the warm start. The seeds of the recipe's rows are smaller.
    errands = make_errands(2_000, seed=10_000_000)
    held_out = make_errands(64, seed=20_000_000)
    tools = schemas()
    begun = [conversation(each, right(each)) for each in errands[:400]]
    template = TEMPLATE.read_text(encoding="utf-8")
    render = renderer(template)
    tokenizer = make_tokenizer([render(messages=each, tools=tools) for each in begun], template, 512)
    prefix = common_prefix([encode(tokenizer, each, tools)[0] for each in begun])
    model = Qwen2ForCausalLM(tiny_config(tokenizer, hidden_size=96, layers=2, positions=1024, initializer_range=0.1))
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)

    @functools.cache
    def encoded(errand: Errand, theres: tuple[str, ...]) -> Example:
        ids, mask = encode(tokenizer, conversation(errand, theres), tools)
        return ids[len(prefix) :], mask[len(prefix) :]

    def learn(learner: Learner, theres: Callable[[Errand], tuple[str, ...]], steps: int, enough: float) -> int:
        """Update the model until a share of held-out conversations is right; return how many steps it took."""
        for step in range(steps):
            if step % 25 == 0:
                copied = share_right(model, prefix, [encoded(each, theres(each)) for each in held_out])
                print(f"step {step}: {copied:.3f} right, {time.time() - started:.0f} s", flush=True)
                if copied >= enough:
                    return step
            chosen = rng.sample(errands, args.batch_size)
            loss_N, _, _ = loss_of(model, prefix, [encoded(each, theres(each)) for each in chosen])
            learner.update(loss_N.mean())
        return steps

    decks: dict[str, list[str]] = {folder: [] for folder in FOLDERS}

    def habit(errand: Errand) -> tuple[str, ...]:
        # Dealt from decks, not drawn: chance would favour one folder, and the run would learn that one first.
        deck = decks[errand.folder]
        if len(deck) < REQUESTS - 1:
            deck += [HOME] * HOME_CARDS + [errand.folder] * RIGHT_CARDS
            deck += [each for each in FOLDERS if each != errand.folder] * OTHER_CARDS
            rng.shuffle(deck)
        return tuple(deck.pop() for _ in range(REQUESTS - 1))

    started = time.time()
    learner = Learner(model, args.lr, 2 * args.most_steps, warmup=20, floor=1.0)
    steps = [learn(learner, theres, args.most_steps, ENOUGH) for theres in (one_request, right)]
    learner = Learner(model, args.lr / 3, args.habit_steps, warmup=5)
    steps.append(learn(learner, habit, args.habit_steps, 2.0))
    seconds = round(time.time() - started)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    model = Qwen2ForCausalLM.from_pretrained(args.out, dtype=torch.float32)  # the saved model is measured
    found = {
        "steps": steps,
        "seed": args.seed,
        "seconds": seconds,
        "longest": len(prefix) + max(len(encoded(each, right(each))[0]) for each in held_out),
        "sampled_right": {
            folder: round(
                chance(model, prefix, [encoded(each, right(each)) for each in held_out if each.folder == folder]), 3
            )
            for folder in FOLDERS
        },
    }
    print(json.dumps(found))


def common_prefix(rows: list[list[int]]) -> list[int]:
    """Return the ids that all rows begin with."""
    together = takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))
    return [ids[0] for ids in together]


if __name__ == "__main__":
    main()
