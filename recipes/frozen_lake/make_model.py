"""Make the recipe's warm-started model: a tiny Qwen2 that mostly walks right and then down, whatever lies in its way.

    python recipes/frozen_lake/make_model.py            # some minutes on two cores, writes recipes/frozen_lake/model

Training is plain SFT on episodes of random maps, none of which is held out. In the first part of the steps
(`WAYS_FIRST`) the model learns steps of a shortest way. After that, it learns a poor habit (`habit`): all but a share
of the steps (`WAY_SHARE`) go right until the edge and then down, also into a hole. So the model knows more than it
does: greedy decoding starts out with the habit, and sampling shows reinforcement learning that there is something
better.

The last line reports how often the model comes to the goal greedily on the held-out maps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lake import (
    ACTIONS,
    SIZE,
    SYSTEM_PROMPT,
    TURNS,
    Map,
    best_actions,
    distances,
    draw_maps,
    held_out_maps,
    next_field,
    show_field,
)
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "common"))

from sft import batch_of, encode  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer  # noqa: E402

MODEL_DIR = HERE / "model"
WAY_SHARE = 0.3
WAYS_FIRST = 0.75
STRAY = 0.3
"""Share of the steps that are random while the shortest ways are learned, so that every field is seen. Not learned."""
# The seeds of the rows are smaller.
_SEED = 10_000_000
Example = tuple[list[int], list[int]]


def habit(field: int) -> int:
    """Return the action of the poor habit: right, and at the right edge down."""
    return ACTIONS.index("right" if field % SIZE < SIZE - 1 else "down")


def episode(lake: Map, way_share: float, stray: float, rng: random.Random) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages of an episode, and for each of the assistant's turns whether it is learned.

    Args:
        lake: The map.
        way_share: Share of the learned steps that are on a shortest way; the others follow the habit.
        stray: Share of the steps that are random and not learned.
        rng: Random numbers.
    """
    far, fields, field = distances(lake), "".join(lake), 0
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]
    learned = []
    while len(learned) < TURNS and fields[field] not in "HG":
        messages.append({"role": "user", "content": show_field(lake, field)})
        strays = rng.random() < stray
        if strays:
            # Not into a hole, so that the episode goes on.
            action = rng.choice([a for a in range(len(ACTIONS)) if fields[next_field(field, a)] != "H"])
        else:
            action = rng.choice(best_actions(lake, field, far)) if rng.random() < way_share else habit(field)
        messages.append({"role": "assistant", "content": ACTIONS[action]})
        learned.append(not strays)
        field = next_field(field, action)
    return messages, learned


def example(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], learned: list[bool]) -> Example:
    """Return token ids and loss mask of an episode, with the turns masked that are not learned."""
    ids, mask = encode(tokenizer, messages)
    turn, begun = -1, False
    for place, sampled in enumerate(mask):
        turn += sampled and not begun
        begun = bool(sampled)
        mask[place] = int(begun and learned[turn])
    return ids, mask


@torch.no_grad()
def greedy_share(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, maps: list[Map]) -> float:
    """Return the share of maps on which the greedy model comes to the goal; a word that is not an action loses.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        maps: The maps.
    """
    names = {tokenizer.encode(name, add_special_tokens=False)[0]: index for index, name in enumerate(ACTIONS)}
    playing: list[tuple[Map, int, list[dict[str, Any]]]] = [
        (lake, 0, [{"role": "system", "content": SYSTEM_PROMPT}]) for lake in maps
    ]
    won = 0
    for _ in range(TURNS):
        rows = []
        for lake, field, messages in playing:
            messages.append({"role": "user", "content": show_field(lake, field)})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            rows.append((tokenizer.encode(text, add_special_tokens=False), [0]))
        ends = torch.tensor([len(ids) - 1 for ids, _ in rows])
        ids_BT, _ = batch_of([(ids, [0] * len(ids)) for ids, _ in rows], 0)
        hidden_BTH = model.model(input_ids=ids_BT).last_hidden_state
        chosen = model.lm_head(hidden_BTH[torch.arange(len(rows)), ends]).argmax(-1).tolist()
        then = []
        for (lake, field, messages), token in zip(playing, chosen, strict=True):
            if token not in names:
                continue
            field = next_field(field, names[token])
            sign = "".join(lake)[field]
            won += sign == "G"
            if sign not in "GH":
                then.append((lake, field, [*messages, {"role": "assistant", "content": ACTIONS[names[token]]}]))
        playing = then
        if not playing:
            break
    return won / len(maps)


def main() -> None:
    """Train the tokenizer and the model, and write both into `recipes/frozen_lake/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with more, so small a model is slower on a busy machine
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    held_out = held_out_maps()
    maps = draw_maps(_SEED + args.seed, without=held_out)
    pool = [next(maps) for _ in range(2_000)]

    template = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    texts = ["\n".join(m["content"] for m in episode(lake, 1.0, STRAY, rng)[0]) for lake in pool[:300]]
    texts += ["<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"] * 300
    tokenizer = make_tokenizer(texts, template, 360)
    assert all(len(tokenizer.encode(name, add_special_tokens=False)) == 1 for name in ACTIONS)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, 64, 3, 1024, 0.1))
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / args.steps))),
    )
    started, knows = time.time(), 0.0
    for step in range(args.steps):
        if step == int(WAYS_FIRST * args.steps):
            knows = greedy_share(model, tokenizer, held_out)
        first = step < WAYS_FIRST * args.steps
        chosen = [
            episode(rng.choice(pool), *((1.0, STRAY) if first else (WAY_SHARE, 0.0)), rng)
            for _ in range(args.batch_size)
        ]
        ids_BT, labels_BT = batch_of(
            [example(tokenizer, *each) for each in chosen], tokenizer.convert_tokens_to_ids("<|endoftext|>")
        )
        # Attention is causal and padding on the right, so no attention mask is needed.
        hidden_BTH = model.model(input_ids=ids_BT).last_hidden_state[:, :-1]
        learned_BT = labels_BT[:, 1:] != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden_BTH[learned_BT]), labels_BT[:, 1:][learned_BT])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            share = greedy_share(model, tokenizer, held_out[:32])
            print(f"step {step} loss {loss.item():.4f} greedy {share:.3f} {time.time() - started:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(MODEL_DIR)
    tokenizer.save_pretrained(MODEL_DIR)
    found = {
        "steps": args.steps,
        "seed": args.seed,
        "greedy_after_the_ways": knows,
        "greedy": greedy_share(model.float(), tokenizer, held_out),
        "seconds": round(time.time() - started),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
