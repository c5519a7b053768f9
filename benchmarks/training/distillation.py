"""Is the loss of every row 0 where teacher and student are the same model?

    python -m benchmarks.distillation [--forests 100]

A tiny model of transformers is student and teacher. Each random forest is a conversation: its rows share prompts and
beginnings, as those of context windows and of sessions do. They go through our worker's questions, verl's method and
client, and the teacher answers in the form of verl's servers (`tests/support/teachers.py`). The rows go with their
columns into verl's FSDP2 engine and into ours, which computes common prefixes once, with verl's own losses; each forest
has another one.

- `loss`: the farthest from 0 that a loss was, in absolute value;
- `rows`, `asked`: rows of the forests, and questions to the teacher, one for each;
- `differing`: rows whose columns are not, to the bit, those of verl for a conversation of that row alone;
- `gradient`, `cosine`: with another teacher, our engine beside verl's: the largest difference as a share of the largest
  entry, and the smallest cosine.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.support.teachers import (
    VERLS_WORKER,
    ModelClient,
    ask,
    loss_of,
    row_output,
    teaching,
    with_columns,
    worker_of,
)
from tests.support.training_engine import backward, gradients_differ, make_batch, make_engine, make_model, random_rows
from verl_multiturn.verl_bridge.prefix_tree.engine import PrefixTreeEngine

MEANS = ("token-mean", "seq-mean-token-mean")
"""verl's aggregations that are means: a sum has the rounding of each of its tokens, some 1e-8 to 1e-7."""
_COLUMNS = ("teacher_ids", "teacher_logprobs")


def losses() -> list[dict[str, Any]]:
    """Return settings of every loss of verl's against a teacher, by itself and as a reward."""
    kinds = [(mode, as_reward) for mode in DISTILLATION_SETTINGS_REGISTRY for as_reward in (False, True)]
    return [
        {"loss_mode": mode, "topk": 8, "use_task_rewards": False, "use_policy_gradient": as_reward}
        for mode, as_reward in kinds
        if as_reward or mode != "k1"  # verl refuses that one
    ]


async def run(forests: int, folder: Path) -> dict[str, Any]:
    """Try as many forests, and return the figures."""
    student, other = (make_model(folder / str(seed), "qwen3", seed) for seed in (0, 1))
    engines = [make_engine(kind, student) for kind in (FSDPEngineWithLMHead, PrefixTreeEngine)]
    same, another = ModelClient(student), ModelClient(other)
    settings = losses()
    found: dict[str, Any] = {"loss": 0.0, "rows": 0, "asked": 0, "differing": 0, "gradient": 0.0, "cosine": 1.0}
    for seed in range(forests):
        mode, rows = settings[seed % len(settings)], random_rows(seed)
        loss = loss_of(config := teaching(**mode), loss_agg_mode=MEANS[seed % 2])
        size = len(rows) if seed % 2 else 1
        flags: dict[str, Any] = {"micro_batch_size_per_gpu": size, "calculate_entropy": False}
        if DISTILLATION_SETTINGS_REGISTRY[mode["loss_mode"]].use_topk:
            flags |= {"distillation_use_topk": True, "distillation_only": not mode["use_policy_gradient"]}
        worker, before = worker_of(config, same), len(same.asked)
        columns = await ask(worker, rows)
        found["rows"] += len(rows)
        found["asked"] += len(same.asked) - before
        for (prompt, response, _), ours in zip(rows, columns, strict=True):
            verls = row_output(prompt, response)
            await VERLS_WORKER._compute_teacher_logprobs(worker, verls, prompt, response, False, {})
            found["differing"] += not all(torch.equal(ours[name], verls.extra_fields[name]) for name in _COLUMNS)
        for engine in engines:
            output, _ = backward(engine, with_columns(make_batch(rows, seed, **flags), columns), loss)
            found["loss"] = max(found["loss"], abs(sum(output["loss"])))
        taught = with_columns(make_batch(rows, seed, **flags), await ask(worker_of(config, another), rows))
        share, cosine = gradients_differ(*(backward(engine, taught, loss)[1] for engine in engines))
        found["gradient"], found["cosine"] = max(found["gradient"], share), min(found["cosine"], cosine)
    return {"forests": forests, "losses": min(forests, len(settings)), **found}


if __name__ == "__main__":
    described = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=described)
    parser.add_argument("--forests", type=int, default=100, help="number of conversations")
    number = parser.parse_args().forests
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        result = asyncio.run(run(number, Path(made)))
    for name, value in result.items():
        print(f"{name:>10}  {value}")
    print(json.dumps(result))
