"""Make the model that `--smoke` trains: a tiny Qwen2 that knows the worked conversations of every recipe by heart.

    python recipes/common/make_model.py [RECIPE ...]     # some minutes on two cores, writes recipes/common/model

Each row of a recipe's smoke data has a `demonstration`: the assistant's turns as a model would write them. The real
conversation code rolls them out, with the recipe's own settings and real tools, and the model learns the sampled tokens
of these trajectories. So the tiny model calls each recipe's tools as a real model would. It can do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from sft import Learner, batch_of
from tiny_model import tiny_config
from tiny_tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import plan_run

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent
MODEL_DIR = HERE / "model"
WORK = RECIPES.parent / "outputs" / "smoke_model"
END = "<|im_end|>"
VOCABULARY = 1536
Example = tuple[list[int], list[int]]


def smoke_recipes() -> list[str]:
    """Return the names of the recipes whose smoke run trains the model that this script makes."""
    recipes = sorted(path.parent.name for path in RECIPES.glob("*/run.sh"))
    return [recipe for recipe in recipes if smoke_config(recipe).actor_rollout_ref.model.path == str(MODEL_DIR)]


@cache
def smoke_config(recipe: str) -> Any:
    """Return the configuration of a recipe's smoke run."""
    return compose_run(plan_run(str(RECIPES / recipe), smoke=True, out=WORK / recipe))


def read_rows(recipe: str) -> list[dict[str, Any]]:
    """Prepare a recipe's smoke data, and return its rows that have a demonstration."""
    script = ["bash", str(RECIPES / recipe / "run.sh"), "--smoke", "--out", str(WORK / recipe), "--prepare"]
    subprocess.run(script, check=True)
    rows = []
    for split in ("train", "test"):
        rows += pyarrow.parquet.read_table(WORK / recipe / "data" / f"{split}.parquet").to_pylist()
    return [row for row in rows if row["extra_info"].get("demonstration")]


def spoken(recipe: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts to train the tokenizer on: for each row the tools' schemas, the prompt and the demonstration.

    Args:
        recipe: Name of the recipe.
        rows: Rows from `read_rows`.
    """
    from verl_multiturn.tools.loading.registry import load_tools, schema_of

    path = smoke_config(recipe).actor_rollout_ref.rollout.multi_turn.tool_config_path
    tools = load_tools(path) if path is not None else {}
    schemas = "\n".join(json.dumps(schema_of(tool).as_dict()) for tool in tools.values())
    for row in rows:
        yield schemas
        yield from (message["content"] for message in row["prompt"])
        yield from row["extra_info"]["demonstration"]


def ended(text: str) -> str:
    """Return a turn as the model samples it, with its end token.

    In text mode, a turn that ends with the output marker has no end token, because sampling stops there.
    """
    return text if text.endswith("```output") else text + END


async def roll_out(recipe: str, config: Any, rows: Sequence[dict[str, Any]], tokenizer: Any) -> list[Example]:
    """Run the rows' demonstrations as conversations, and return their token ids and loss masks.

    Args:
        recipe: Name of the recipe.
        config: The recipe's configuration, which gives the settings and tools.
        rows: Rows with a demonstration.
        tokenizer: Tokenizer of the tiny model.

    Returns:
        For each row the ids and the mask, both `(tokens,)`.

    Raises:
        SystemExit: A conversation does not end as it should, or a tool call in it fails.
    """
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    said = {f"{recipe} {i}": row["extra_info"]["demonstration"] for i, row in enumerate(rows)}

    def script(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        return list(tokenizer.encode(ended(said[request_id][turn]), add_special_tokens=False))

    runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), ScriptedEngine(script))
    examples = []
    for name, row in zip(said, rows, strict=True):
        request = await runner.request({**row, "raw_prompt": row["prompt"]}, {}, name)
        outcome, _ = await runner.run(request)
        failed = [call for call in outcome.calls if call.status != "ok"]
        if str(outcome.stop_reason) not in ("finished", "max_assistant_turns") or failed:
            raise SystemExit(f"{name}: {outcome.stop_reason} {failed} {outcome.messages}")
        examples.append((list(outcome.trajectory.ids), list(outcome.trajectory.mask)))
    lengths = [len(ids) for ids, _ in examples]
    print(f"{recipe}: {len(examples)} conversations of {min(lengths)} to {max(lengths)} tokens", flush=True)
    return examples


def learn(model: Qwen2ForCausalLM, examples: list[Example], steps: int, rng: random.Random) -> None:
    """Train the model on the sampled tokens, in batches of eight conversations of similar length.

    Args:
        model: The model to train.
        examples: Token ids and loss masks of the conversations.
        steps: Number of optimizer steps.
        rng: Random numbers that choose the batches.
    """
    learner = Learner(model, lr=3e-3, steps=steps, warmup=20, floor=0.02, weight_decay=0.0)
    started = time.time()
    by_length = sorted(examples, key=lambda example: len(example[0]))
    for step in range(steps):
        at = rng.randrange(max(1, len(by_length) - 7))
        ids_BT, labels_BT = batch_of(by_length[at : at + 8], model.config.pad_token_id)
        loss, _ = fit(model, ids_BT, labels_BT)
        learner.update(loss)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)


def fit(model: Qwen2ForCausalLM, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss, and for each row whether greedy decoding gets all its learned tokens right.

    Args:
        model: The model.
        ids_BT: Token ids, padded on the right.
        labels_BT: Labels; -100 at tokens that are not learned.

    Returns:
        The loss as a scalar, and the booleans `[B]`.
    """
    # Attention is causal and padding on the right, so no attention mask is needed. Logits are computed for labels only.
    hidden_BTH = model.model(input_ids=ids_BT).last_hidden_state[:, :-1]
    target_BT = labels_BT[:, 1:]
    learned_BT = target_BT != -100
    logits_NV = model.lm_head(hidden_BTH[learned_BT])
    loss = torch.nn.functional.cross_entropy(logits_NV, target_BT[learned_BT])
    wrong_BT = torch.zeros_like(learned_BT)
    wrong_BT[learned_BT] = logits_NV.argmax(-1) != target_BT[learned_BT]
    return loss, ~wrong_BT.any(dim=1)


def main() -> None:
    """Make the tokenizer and the model, and write both into `recipes/common/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=smoke_recipes())
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["VERL_PLATFORM"] = "cpu"
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    rows = {recipe: read_rows(recipe) for recipe in args.recipes}
    texts = [text for recipe, each in rows.items() for text in spoken(recipe, each)]
    template = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer: PreTrainedTokenizerFast = make_tokenizer(texts, template, VOCABULARY)
    config = tiny_config(tokenizer, hidden_size=128, layers=4, positions=4096, initializer_range=0.08)
    tokenizer.save_pretrained(MODEL_DIR)
    config.save_pretrained(MODEL_DIR)

    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    loaded = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    examples: list[Example] = []
    for recipe, each in rows.items():
        if each:
            trainer = smoke_config(recipe)
            prepare_config(trainer)
            examples += asyncio.run(roll_out(recipe, trainer, each, loaded))
    examples = list({tuple(ids): (ids, mask) for ids, mask in examples}.values())  # some recipes have the same rows
    model = Qwen2ForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    learn(model, examples, args.steps, rng)
    with torch.no_grad():
        right = sum(int(fit(model, *batch_of([example], config.pad_token_id))[1]) for example in examples)
    model.to(torch.bfloat16).save_pretrained(MODEL_DIR)
    print(json.dumps({"conversations": len(examples), "by_heart": right, "steps": args.steps, "seed": args.seed}))


if __name__ == "__main__":
    main()
