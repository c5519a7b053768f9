"""Make the model that `researcher --smoke` trains: a tiny Qwen2 that knows the worked conversations by heart.

    python recipes/researcher/by_heart.py            # minutes on two cores, writes recipes/researcher/model

The real conversation code rolls the worked conversations (`made_pages.Task.ways`) out, with the smoke run's settings
and tools, and the model learns the sampled tokens of all their rows, summaries among them. Most conversations are
right; some guess, and some have an invalid call, so that a group has something to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "common")]

from made_pages import Task, tasks, write_pages  # noqa: E402  # their folders are put on the path above
from make_model import END, Example, fit  # noqa: E402
from prepare_data import smoke_row  # noqa: E402
from sft import Learner, batch_of  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer  # noqa: E402

from verl_multiturn.runs.compose import compose_run  # noqa: E402
from verl_multiturn.runs.plan import plan_run  # noqa: E402

MODEL_DIR = HERE / "model"
TEMPLATE = HERE.parent / "common" / "model" / "chat_template.jinja"
WORK = HERE.parents[1] / "outputs" / "researcher_model"
VOCABULARY = 900
SHARES = {"good": 7, "guess": 2, "invalid": 1}
"""How often each way is learned."""


def learned() -> list[Task]:
    """Return the tasks that the model learns: those of the training split."""
    return [task for task in tasks() if not task.is_test]


def spoken(config: Any) -> Iterator[str]:
    """Yield the texts to train the tokenizer on: schemas, prompts, pages, turns and summaries."""
    from verl_multiturn.tools.loading.registry import load_tools, schema_of

    rollout = config.actor_rollout_ref.rollout
    schemas = [schema_of(tool).as_dict() for tool in load_tools(rollout.multi_turn.tool_config_path).values()]
    rng = random.Random(0)
    for task in tasks():
        yield json.dumps(schemas)
        yield from (message["content"] for message in smoke_row(task)["prompt"])
        yield rollout.custom.multiturn.context.summary_prompt + "\n\nSummary of the conversation so far:\n"
        yield from (f"{page['title']} (part 1 of 2)\n{page['text']}" for page in task.pages(rng))
        for turns in task.ways().values():
            yield from turns
            yield from map(task.summary, range(len(turns)))


async def roll_out(config: Any, tokenizer: Any) -> dict[str, list[Example]]:
    """Roll the worked conversations out; return the ids and loss masks of their rows, by way.

    Raises:
        SystemExit: A conversation ends otherwise than it should.
    """
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    asked = str(config.actor_rollout_ref.rollout.custom.multiturn.context.summary_prompt)
    said: dict[str, int] = {}
    worked: dict[str, tuple[Task, str]] = {f"{task.works} {way}": (task, way) for task in learned() for way in SHARES}

    def script(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        task, way = worked[request_id]
        done = said.setdefault(request_id, 0)
        if asked in tokenizer.decode(ids).split("<|im_start|>")[-2]:
            text = task.summary(done)
        else:
            text = task.ways()[way][done]
            said[request_id] += 1
        return list(tokenizer.encode(text + END, add_special_tokens=False))

    runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), ScriptedEngine(script))
    examples: dict[str, list[Example]] = {way: [] for way in SHARES}
    rows = []
    for name, (task, way) in worked.items():
        row = smoke_row(task)
        request = await runner.request({**row, "raw_prompt": row["prompt"]}, {}, name)
        outcome, _ = await runner.run(request)
        failed = [call.status for call in outcome.calls if call.status != "ok"]
        expected = ["bad_arguments"] if way == "invalid" else []
        if outcome.stop_reason != "finished" or failed != expected:
            raise SystemExit(f"{name}: {outcome.stop_reason} {failed} {outcome.messages}")
        rows.append(len(outcome.rows))
        examples[way] += [(list(each.trajectory.ids), list(each.trajectory.mask)) for each in outcome.rows]
    lengths = [len(ids) for each in examples.values() for ids, _ in each]
    print(f"{len(rows)} conversations of {min(rows)} to {max(rows)} rows of {min(lengths)} to {max(lengths)} tokens")
    return examples


def learn(model: Qwen2ForCausalLM, made: dict[str, list[Example]], steps: int, rng: random.Random) -> None:
    """Train the model on the sampled tokens, in batches of four rows.

    Args:
        model: The model to train.
        made: Rows by way, which `SHARES` weighs.
        steps: Number of updates.
        rng: Random numbers that choose the rows.
    """
    learner = Learner(model, lr=4e-3, steps=steps, warmup=20, floor=0.02, weight_decay=0.0)
    rows = [(row, SHARES[way]) for way, each in made.items() for row in each]
    for step in range(steps):
        chosen = rng.choices([row for row, _ in rows], weights=[share for _, share in rows], k=4)
        loss, _ = fit(model, *batch_of(chosen, model.config.pad_token_id))
        learner.update(loss)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Make the tokenizer and the model, and write both into `recipes/researcher/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["VERL_PLATFORM"] = "cpu"
    torch.manual_seed(args.seed)
    subprocess.run(["bash", str(HERE / "run.sh"), "--smoke", "--out", str(WORK), "--prepare"], check=True)
    config = compose_run(plan_run(str(HERE), smoke=True, out=WORK))
    write_pages(WORK / "data")
    tokenizer: PreTrainedTokenizerFast = make_tokenizer(
        list(spoken(config)), TEMPLATE.read_text(encoding="utf-8"), VOCABULARY
    )
    model_config = tiny_config(tokenizer, hidden_size=96, layers=3, positions=1024, initializer_range=0.1)
    tokenizer.save_pretrained(MODEL_DIR)
    model_config.save_pretrained(MODEL_DIR)

    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    prepare_config(config)
    made = asyncio.run(roll_out(config, PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)))
    model = Qwen2ForCausalLM(model_config)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    learn(model, made, args.steps, random.Random(args.seed))
    with torch.no_grad():
        right = sum(int(fit(model, *batch_of([each], model_config.pad_token_id))[1]) for each in made["good"])
    model.to(torch.bfloat16).save_pretrained(MODEL_DIR)
    print(json.dumps({"rows_of_good": len(made["good"]), "by_heart": right, "steps": args.steps, "seed": args.seed}))


if __name__ == "__main__":
    main()
