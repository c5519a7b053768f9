"""Make the recipe's warm-started model: a tiny Qwen2 that repairs by lot, half of the time after a look at the test.

    python recipes/repair/make_model.py            # some minutes on two cores, writes recipes/repair/model

Half of the conversations repair a function by lot at once. The others run the test first, and then choose the repair by
lot, too, whatever the test's output. So running the test earns nothing yet, and reinforcement learning has two things
to find: to follow the test, and to run it. In the first part of the steps (`COPY_FIRST`) those who run the test repair
the function that it names; without that, so small a model would learn too late to read it. Training is plain SFT; the
chat template is Qwen2.5's own (Apache-2.0).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from repositories import FUNCTIONS, TESTS, Repository, make_messages, make_repositories, repair_of, shown
from transformers import Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "common"))

from sft import Learner, batch_of, encode  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer, renderer  # noqa: E402

MODEL_DIR = HERE / "model"
TEMPLATE = HERE.parent / "quickstart" / "model" / "chat_template.jinja"
TEST_SHARE = 0.5
COPY_FIRST = 0.85


def conversation(repository: Repository, test_first: bool, repaired: str) -> list[dict[str, str]]:
    """Return one conversation to train on.

    Args:
        repository: The repository.
        test_first: Whether the model runs the test before it repairs.
        repaired: Name of the function that it repairs.
    """
    messages = make_messages()
    if test_first:
        messages += [said(TESTS), {"role": "user", "content": shown(repository.complaint(), 1)}]
    return [
        *messages,
        said(repair_of(repaired)),
        {"role": "user", "content": shown("", 0)},
        {"role": "assistant", "content": "Done."},
    ]


def said(command: str) -> dict[str, str]:
    """Return the turn in which the model writes a command."""
    return {"role": "assistant", "content": f"```bash\n{command}\n```"}


def main() -> None:
    """Train the tokenizer and the model, and write both into `recipes/repair/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    # Seeds from 10_000_000 on belong to the warm start. The seeds of the recipe's rows are smaller.
    repositories = make_repositories(20_000, seed=10_000_000)
    by_lot = [(each, rng.random() < TEST_SHARE, rng.choice(sorted(FUNCTIONS))) for each in repositories]
    reading = [conversation(each, first, each.wrong if first else drawn) for each, first, drawn in by_lot]
    drawing = [conversation(*each) for each in by_lot]
    template = TEMPLATE.read_text(encoding="utf-8")
    render = renderer(template)
    tokenizer = make_tokenizer([render(messages=each) for each in drawing[:400]], template, 512)
    config = tiny_config(tokenizer, hidden_size=128, layers=4, positions=1024, initializer_range=0.08)
    model = Qwen2ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    learner = Learner(model, args.lr, args.steps, warmup=max(1, args.steps // 20))
    examples = {
        True: [encode(tokenizer, each) for each in reading],
        False: [encode(tokenizer, each) for each in drawing],
    }
    started = time.time()
    for step in range(args.steps):
        chosen = rng.sample(examples[step < COPY_FIRST * args.steps], args.batch_size)
        ids_BT, labels_BT = batch_of(chosen, config.pad_token_id)
        logits_BTV = model(input_ids=ids_BT).logits  # attention is causal and padding on the right: no mask is needed
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        learner.update(loss)
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(MODEL_DIR)
    tokenizer.save_pretrained(MODEL_DIR)
    lengths = [len(ids) for ids, _ in examples[False]]
    print(json.dumps({"steps": args.steps, "seed": args.seed, "loss": loss.item(), "longest": max(lengths)}))


if __name__ == "__main__":
    main()
