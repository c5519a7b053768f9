"""Is training with common prefixes computed once exact, and what does it save?

    python -m benchmarks.prefix_tree [--forests 200] [--run FOLDER] [--window FOLDER] [--only exact|speed]

Both engines run in this process, on one thread: verl's FSDP2 engine, and ours (`verl_bridge/prefix_tree/`). They get
the same batch, with verl's own losses.

**Exact**: for each of three model families, random forests in float32. Log-probs, entropies and gradients are compared.
Each forest has another loss of `benchmarks.masked_gradient`, with another aggregation, but for `clip_cov`, which drops
tokens by lot; every second one computes its activations again.

**Speed**: the CPU seconds of an update and of a forward pass, verl's over ours, and the memory above the model's.
`--run` is the folder of a quickstart with records, whose last trained step is taken; without one, rows of the same
shape are made. So `--window`, with a run whose conversations have a row for each turn.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from tests.long.tokens.masked_gradient import AGGREGATIONS, Term, agg_loss, terms
from tests.support.training_engine import (
    as_rows,
    backward,
    farthest,
    forward,
    gradients_differ,
    make_batch,
    make_engine,
    make_loss,
    make_model,
    random_rows,
)
from verl_multiturn.records.read.records import read_records
from verl_multiturn.verl_bridge.prefix_tree.engine import StrictPrefixTreeEngine
from verl_multiturn.verl_bridge.prefix_tree.forest import grow

FAMILIES = ("qwen2", "qwen3", "llama")
QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "model"
LARGER = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8,
          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip
"""Sizes of a model of some 12 million parameters."""
_DRAWS = "clip_cov"
"""A loss that drops tokens by lot, among those whose log-probs lie beyond a limit. So the last bit of one decides
which, and two exact computations differ; our engine leaves it to verl's."""
Rows = list[tuple[list[int], list[int], list[int]]]


def as_loss(term: Term, aggregation: str) -> Callable[..., Any]:
    """Return a term of `masked_gradient` as a loss of verl's engines."""

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        names = ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
        padded = data.select(*names).to_padded_tensor()
        batch = {"mask": padded["response_mask"], "old_log_prob": padded["old_log_probs"], **padded}
        if term.inputs == ("logits",):  # the entropy, which the engine has computed
            entropy = no_padding_2_padding(model_output["entropy"], data)
            return agg_loss(entropy, batch["mask"].bool(), aggregation), {}
        return term.loss(batch, log_probs, aggregation), {}

    return loss


def exact(forests: int, folder: Path) -> dict[str, Any]:
    """Compare both engines on random forests; return the largest differences, and the losses that were tried."""
    losses = [(name, term) for name, term in terms().items() if name != _DRAWS]
    worst = {"log_probs": 0.0, "entropy": 0.0, "gradient": 0.0, "cosine": 1.0}
    tried: set[str] = set()
    for family in FAMILIES:
        model = make_model(folder / family, family)
        pairs = [
            [make_engine(kind, model, checkpointing=again) for kind in (FSDPEngineWithLMHead, StrictPrefixTreeEngine)]
            for again in (False, True)
        ]
        for seed in range(forests):
            name, term = losses[seed % len(losses)]
            aggregation = AGGREGATIONS[seed % len(AGGREGATIONS)]
            batch = make_batch(random_rows(seed), seed, temperature=(1.0, 0.7)[seed % 2])
            plain, ours = pairs[seed % 2]
            columns = [forward(engine, batch) for engine in (plain, ours)]
            for column in ("log_probs", "entropy"):
                worst[column] = max(worst[column], farthest(*(each[column] for each in columns)))
            move_near(batch, columns[0]["log_probs"])
            loss = as_loss(term, aggregation)
            share, cosine = gradients_differ(*(backward(engine, batch, loss)[1] for engine in (plain, ours)))
            worst["gradient"], worst["cosine"] = max(worst["gradient"], share), min(worst["cosine"], cosine)
            tried.add(f"{name}/{aggregation}")
    return {"forests": forests * len(FAMILIES), "losses": len(tried), **worst}


def move_near(batch: Any, log_probs: torch.Tensor) -> None:
    """Move the made log-probs of other policies near the own ones, with their noise: some losses divide by ratios."""
    own = response_from_nested(log_probs, batch["response_mask"]).values()
    for name in ("old_log_probs", "ref_log_prob"):
        made = batch[name]
        batch[name] = torch.nested.nested_tensor_from_jagged(own + made.values() + 4.5, made.offsets())


def recorded(folder: Path) -> Rows:
    """Return the rows of the last step that a run's records have whole."""
    steps: dict[int, Rows] = {}
    for record in read_records(folder / "records"):
        if record["validation"] or not record["valid"]:
            continue
        for row in record["rows"]:
            mask = [run[1] for run in row["runs"] for _ in range(run[0])]
            cut = row["prompt_length"]
            steps.setdefault(record["step"], []).append((row["ids"][:cut], row["ids"][cut:], mask[cut:]))
    most = max(len(rows) for rows in steps.values())
    return next(rows for _, rows in sorted(steps.items(), reverse=True) if len(rows) == most)


def made_step() -> Rows:
    """Make rows in the shape of a quickstart's step: 16 groups of 8, the same system message and tool before all."""
    draw = random.Random(0)

    def ids(number: int) -> list[int]:
        return [draw.randrange(5, 500) for _ in range(number)]

    before, rows = ids(165), []
    for _ in range(16):
        prompt, call = [*before, *ids(30)], ids(8)
        for _ in range(8):
            response = [*(call if draw.random() < 0.7 else ids(8)), *ids(draw.randrange(4, 30))]
            rows.append((prompt, response, [1] * len(response)))
    return rows


def made_window() -> Rows:
    """Make rows in the shape of conversations whose rows show the task and the last step: a row for each turn."""
    draw = random.Random(0)

    def ids(number: int) -> list[int]:
        return [draw.randrange(5, 500) for _ in range(number)]

    rows = []
    before = ids(500)
    for _ in range(4):
        task, step = ids(60), []
        for _ in range(6):
            action = ids(12)
            rows.append(([*before, *task, *step], action, [1] * len(action)))
            step = [*action, *ids(40)]
    return rows


def seconds(run: Callable[[], Any], times: int = 3) -> float:
    """Return the CPU seconds of the fastest of several runs, after one that is not measured."""
    found = []
    for _ in range(times + 1):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found[1:])


def peak_mb(run: Callable[[], Any]) -> float:
    """Return by how much the process's memory grows while something runs, in MB."""
    gc.collect()
    with suppress(OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def compare(rows: Rows, model: Path, micro: int | None = None, with_memory: bool = False) -> dict[str, float]:
    """Return the costs of both engines for a batch, verl's over ours.

    Args:
        rows: The rows.
        model: Folder of the model.
        micro: Rows of a micro-batch; None: all of them.
        with_memory: Whether the memory of an update is measured, too.
    """
    batch = make_batch(rows, micro_batch_size_per_gpu=micro or len(rows), calculate_entropy=False)
    loss, engines = make_loss(), [make_engine(kind, model) for kind in (FSDPEngineWithLMHead, StrictPrefixTreeEngine)]
    before = sum(len(prompt) + len(response) for prompt, response, _ in rows)
    tokens = len(grow([torch.tensor([*prompt, *response]).numpy() for prompt, response, _ in rows]).ids)
    found: dict[str, float] = {"tokens": before, "forest_tokens": tokens}
    for name, run in (
        ("update", lambda engine: backward(engine, batch, loss)),
        ("forward", lambda e: forward(e, batch)),
    ):
        times = [seconds(lambda engine=engine, run=run: run(engine)) for engine in engines]  # type: ignore[misc]
        found |= {f"{name}_s": round(times[0], 3), f"tree_{name}_s": round(times[1], 3)}
        found[name] = round(times[0] / times[1], 2)
    if with_memory:
        peaks = [peak_mb(lambda engine=engine: backward(engine, batch, loss)) for engine in engines]  # type: ignore[misc]
        found |= {"mb": round(peaks[0]), "tree_mb": round(peaks[1]), "memory": round(peaks[1] / peaks[0], 2)}
    return found


def group_rows() -> Rows:
    """Return a group of 8 rows, with a prompt of 1,000 tokens and responses of 200."""
    draw = random.Random(0)
    prompt = [draw.randrange(8192) for _ in range(1000)]
    return as_rows(*([*prompt, *(draw.randrange(8192) for _ in range(200))] for _ in range(8)), prompt=1000)


def strange_rows() -> Rows:
    """Return rows of one length without a common prefix."""
    draw = random.Random(0)
    return as_rows(*([i, *(draw.randrange(8192) for _ in range(299))] for i in range(8)), prompt=100)


def measures(run: Path | None, window: Path | None, folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each measure by its name."""
    yield "quickstart", compare(recorded(run) if run else made_step(), QUICKSTART, micro=64)
    yield "window", compare(recorded(window) if window else made_window(), QUICKSTART)
    larger = make_model(folder / "larger", "qwen2", **LARGER)
    yield "group", compare(group_rows(), larger, with_memory=True)
    strange = compare(strange_rows(), larger)
    yield "strange", {**strange, "slower": round(1 / strange["update"], 2)}


def main() -> None:
    """Run the requested parts, and print a table and the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_tree")
    parser.add_argument("--forests", type=int, default=200, help="random forests for each family")
    parser.add_argument("--run", type=Path, help="folder of a quickstart with records")
    parser.add_argument("--window", type=Path, help="folder of a run with a row for each turn, and records")
    parser.add_argument("--only", choices=("exact", "speed"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "speed":
            found["exact"] = exact(arguments.forests, Path(folder))
            print(found["exact"])
        if arguments.only != "exact":
            table = Table("rows", "tokens", "in forests", "update, s", "forward, s", "update", "forward", "memory")
            for name, each in measures(arguments.run, arguments.window, Path(folder)):
                found[name] = each
                print(name, each, flush=True)
                pairs = [f"{each[key]} → {each[f'tree_{key}']}" for key in ("update_s", "forward_s")]
                times = [f"{each[key]} ×" for key in ("update", "forward")]
                table.add_row(
                    name, str(each["tokens"]), str(each["forest_tokens"]), *pairs, *times, str(each.get("memory", ""))
                )
            Console(width=110).print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
