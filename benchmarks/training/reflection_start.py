"""The model with which both arms of `benchmarks.reflection` begin: it adds rightly in some of the cases.

It is the quickstart's model with its tokenizer, after SFT. Every second conversation has a wrong first answer, which is
not learned, then the user's word and the right answer; so the model knows the form of a second try. The training ends
once the model's own first answer would be right with the probability `START`: then groups of samples differ, and there
is room above.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from benchmarks.reflection_task import WRONG, held_out, sums

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path[:0] = [str(RECIPES / "common"), str(RECIPES / "quickstart")]

from sft import Learner, batch_of, encode  # noqa: E402  # modules of the recipes, found by the line above
from task import make_messages  # noqa: E402
from tiny_model import suffix_logits  # noqa: E402

START = 0.3
BEGINNING = RECIPES / "quickstart" / "model"
FIGURES = "start.json"
_BATCH, _LEARNING_RATE, _MOST_UPDATES, _MEASURED_EVERY = 32, 2e-3, 6000, 50
_ENTRIES, _MEASURED = 3000, 256
# The seeds of the runs' rows are smaller.
_SEED = 10_000_000
_FARTHEST = 9
"""Largest distance of a made wrong answer from the right one."""

Encoded = tuple[list[int], list[int]]
"""Token ids and loss mask of a conversation."""


def conversation(entry: dict[str, Any], wrong: int | None) -> list[dict[str, str]]:
    """Return a conversation that ends in the right answer.

    Args:
        entry: The sum.
        wrong: The first answer, which the user calls wrong; None: the first answer is the right one.
    """
    messages = make_messages(entry["question"])
    if wrong is not None:
        messages += [{"role": "assistant", "content": f"Answer: {wrong}"}, {"role": "user", "content": WRONG}]
    return [*messages, {"role": "assistant", "content": f"Answer: {entry['answer']}"}]


def last_answer(mask: list[int]) -> list[int]:
    """Return a loss mask with its last run of ones alone. Example: [0, 1, 0, 1, 1, 0] gives [0, 0, 0, 1, 1, 0]."""
    end = len(mask) - mask[::-1].index(1)
    begin = end - len(list(takewhile(bool, reversed(mask[:end]))))
    return [int(begin <= at < end) for at in range(len(mask))]


def encoded(tokenizer: Any, entries: list[dict[str, Any]], again: bool, rng: random.Random) -> list[Encoded]:
    """Return the conversations of entries, of which the last answer is learned.

    Args:
        tokenizer: The model's tokenizer.
        entries: The sums.
        again: Whether a wrong first answer precedes the right one.
        rng: Random numbers that draw it.
    """
    found = []
    for entry in entries:
        wrong = int(entry["answer"]) + rng.choice((-1, 1)) * rng.randint(1, _FARTHEST) if again else None
        ids, mask = encode(tokenizer, conversation(entry, wrong))
        found.append((ids, last_answer(mask)))
    return found


@torch.no_grad()
def share_right(model: Qwen2ForCausalLM, rows: list[Encoded], prefix: list[int], pad: int) -> float:
    """Return the mean probability with which the model samples exactly the learned tokens, at temperature 1.

    Args:
        model: The model.
        rows: Conversations.
        prefix: Token ids with which all of them begin.
        pad: Id of the padding token.
    """
    ids_BT, labels_BT = batch_of(_after(rows, prefix), pad)
    logprobs_BTV = suffix_logits(model, prefix, ids_BT)[:, :-1].log_softmax(-1)
    targets_BT = labels_BT[:, 1:]
    logprobs_BT = logprobs_BTV.gather(-1, targets_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return float((logprobs_BT * (targets_BT != -100)).sum(1).exp().mean())


def make_start(out: Path, seed: int = 0) -> dict[str, Any]:
    """Make the start model in a folder, unless it is there, and return its figures.

    The figures are `updates`, `first_right` and `second_right`: the probability of a right first answer, and of a right
    second one behind a wrong one, over sums that neither arm is measured on.

    Args:
        out: Folder of model and tokenizer.
        seed: Seed of weights and batches.

    Raises:
        SystemExit: The model does not get there.
    """
    if (out / FIGURES).is_file():
        return dict(json.loads((out / FIGURES).read_text()))
    torch.set_num_threads(1)  # a second one does not pay for so small a model
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(BEGINNING)
    model = Qwen2ForCausalLM.from_pretrained(BEGINNING, dtype=torch.float32)
    pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    excluded = {entry["question"] for entry in held_out()}
    entries = sums(_ENTRIES, _SEED, excluded)
    measured = sums(_MEASURED, _SEED + _ENTRIES, excluded | {entry["question"] for entry in entries})
    learned = [encoded(tokenizer, entries, again, rng) for again in (False, True)]
    looked_at = [encoded(tokenizer, measured, again, rng) for again in (False, True)]
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*(ids for ids, _ in learned[0][:64]), strict=False))
    prefix = [ids[0] for ids in alike]
    learner = Learner(model, _LEARNING_RATE, _MOST_UPDATES, warmup=_MEASURED_EVERY)
    for update in range(1, _MOST_UPDATES + 1):
        rows = [rng.choice(learned[at % 2]) for at in range(_BATCH)]
        ids_BT, labels_BT = batch_of(_after(rows, prefix), pad)
        logits_BTV = suffix_logits(model, prefix, ids_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        learner.update(loss)
        if update % _MEASURED_EVERY:
            continue
        first, second = (share_right(model, rows, prefix, pad) for rows in looked_at)
        print(f"start: {update} updates, loss {loss.item():.3f}, right {first:.3f} and {second:.3f}", flush=True)
        if first >= START:
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
            figures = {"updates": update, "first_right": round(first, 4), "second_right": round(second, 4)}
            (out / FIGURES).write_text(json.dumps(figures) + "\n")
            return figures
    raise SystemExit(f"the start model was right in {first:.3f} of its samples after {_MOST_UPDATES} updates")


def _after(rows: list[Encoded], prefix: list[int]) -> list[Encoded]:
    return [(ids[len(prefix) :], mask[len(prefix) :]) for ids, mask in rows]
