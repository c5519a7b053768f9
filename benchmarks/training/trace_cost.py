"""Are the traces of sampled conversations complete, and what do they cost of a step?

    python -m benchmarks.trace_cost [--batches 3]

The real agent-loop worker rolls batches out, with a scripted model and a slow tool (`oversample_world.py`): 16 prompts
with 8 samples each, over-sampled, in the world `coupled` of `benchmarks.oversample`, whose times are scaled so that a
batch takes some 8 s, as a step of the quickstart on two cores does. So a step is as short as one of ours ever is.
Batches without traces and with them take turns. With them, `max_samples_per_step_per_worker` is 1, so that one prompt
of each batch is traced with its 11 samples, 3 of which are cut; and then all 16 prompts.

- `traces`: what was written, and `expected`; `complete`: those with one span for each generation, call and turn that
  the script has for this conversation (of one that was cut, some at its end may lack); `others`: those of conversations
  that were not sampled. They are read back from the backend's files.
- `share`: CPU time of the whole process for a batch with traces minus that of one without, in medians, as a share of
  the CPU time that two cores have in a batch: by so much a step gets longer where nothing is idle. It counts the
  backend's own threads, and the first opening of its files does not count.
- `share_all`: the same with all conversations traced, which is verl's default; `ms`: CPU time of one trace.

The backends are MLflow with an SQLite file, and Trackio; both are in requirements/traces.lock. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoTokenizer

from benchmarks.oversample import PROMPTS, RATE, SAMPLES, World
from benchmarks.oversample_world import Sample, ScriptedWorker
from tests.support.rollout_config import MODEL
from verl_multiturn.rollout.oversampling import samples_to_start

BACKENDS = ("mlflow", "trackio")
SCALE = 0.2
CORES = 2
SHARE = 0.02
"""The largest share of a step that the traces of sampled conversations may cost."""
_ROOT, _TURN, _GENERATION, _TOOL = "agent_loop", "turn", "generation", "tool wait"


async def _roll(worker: ScriptedWorker, batch: int) -> tuple[float, float]:
    """Roll a batch out; return the seconds that it took, and those of CPU of all threads."""
    gc.collect()
    cpu, started = time.process_time(), time.perf_counter()
    await worker.run_groups(range(batch * PROMPTS, (batch + 1) * PROMPTS), global_steps=batch)
    seconds = time.perf_counter() - started
    if (tracer := worker._tracer) is not None:
        while tracer.writer.waiting:  # noqa: ASYNC110 - what is left for the thread is part of the batch's cost
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # and so is what the backend does in threads of its own
    return seconds, time.process_time() - cpu


def _worker(world: World, tokenizer: Any, folder: Path, backend: str | None, most: int | None) -> ScriptedWorker:
    trace = {"project_name": "cost", "experiment_name": f"{backend}-{most}", "backend": backend}
    settings = {"n": SAMPLES, "over_sample_rate": RATE, "trace": {**trace, "max_samples_per_step_per_worker": most}}
    return ScriptedWorker(world, tokenizer, folder, **settings)


async def _played(backend: str, batches: int, folder: Path, world: World) -> dict[str, Any]:
    """Roll batches out without traces, with those of one prompt, and with all."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    workers = {
        "none": _worker(world, tokenizer, folder, None, None),
        "one": _worker(world, tokenizer, folder, backend, 1),
        "all": _worker(world, tokenizer, folder, backend, None),
    }
    for worker in workers.values():  # builds what conversations share, and opens the backend
        await _roll(worker, 0)
    cpu: dict[str, list[float]] = {name: [] for name in workers}
    seconds: list[float] = []
    for batch in range(1, batches + 1):
        for name, worker in workers.items():
            took, used = await _roll(worker, batch)
            cpu[name].append(used)
            seconds.append(took)
    for name in ("one", "all"):
        tracer = workers[name]._tracer
        assert tracer is not None
        await tracer.writer.aclose()
    medians = {name: statistics.median(used) for name, used in cpu.items()}
    step_s = statistics.median(seconds)
    everything = PROMPTS * samples_to_start(SAMPLES, RATE)
    return {
        "share": round((medians["one"] - medians["none"]) / (CORES * step_s), 4),
        "share_all": round((medians["all"] - medians["none"]) / (CORES * step_s), 4),
        "ms": round(1000 * (medians["all"] - medians["none"]) / everything, 2),
        "step_s": round(step_s, 2),
        **_checked(_read(backend), batches + 1, world),
    }


def _read(backend: str) -> list[tuple[dict[str, Any], list[str]]]:
    """Read the traces of the worker `one` back: the attributes of each, and the names of its spans."""
    if backend == "mlflow":
        mlflow = importlib.import_module("mlflow")
        found = mlflow.search_traces(return_type="list", max_results=10_000)
        return [
            (root.attributes, [span.name for span in trace.data.spans])
            for trace in found
            for root in [next(span for span in trace.data.spans if span.parent_id is None)]
            if root.attributes["experiment_name"] == f"{backend}-1"
        ]
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    traces = storage.get_traces("cost", f"{backend}-1")
    return [(trace["metadata"], [span["name"] for span in trace["spans"]]) for trace in traces]


def _checked(traces: list[tuple[dict[str, Any], list[str]]], batches: int, world: World) -> dict[str, int]:
    """Compare the traces with what the script has for the sampled conversations."""
    started = samples_to_start(SAMPLES, RATE)
    sampled = {(batch * PROMPTS, number) for batch in range(batches) for number in range(started)}
    told = Counter((attributes["sample_index"], attributes["rollout_n"]) for attributes, _ in traces)
    return {
        "expected": len(sampled),
        "traces": len(traces),
        "complete": sum(_is_complete(attributes, names, world) for attributes, names in traces),
        "others": sum(count for sample, count in told.items() if sample not in sampled),
        "twice": sum(count - 1 for count in told.values()),
    }


def _is_complete(attributes: dict[str, Any], names: list[str], world: World) -> bool:
    sample: Sample = (attributes["sample_index"], attributes["rollout_n"])
    calls = world.calls(sample)
    counts = Counter(name.split()[0] if name.startswith(_TURN) else name for name in names)
    if attributes["status"] == "cut":
        return counts[_ROOT] == 1 and counts[_TURN] == counts[_GENERATION] <= calls + 1
    return counts == {_ROOT: 1, _TURN: calls + 1, _GENERATION: calls + 1, _TOOL: calls}


@contextmanager
def _elsewhere(folder: Path) -> Iterator[None]:
    """Let the backends write into a folder while the context lasts."""
    here = Path.cwd()
    addresses = {"TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    with mock.patch.dict(os.environ, addresses):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def measure(batches: int = 3, seed: int = 0, scale: float = SCALE) -> dict[str, Any]:
    """Measure every backend, in this process.

    Args:
        batches: batches of each kind that are measured.
        seed: seed of the world.
        scale: factor of the world's times.

    Returns:
        By backend what the module describes, and `ok`: all of that holds.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, _elsewhere(Path(name)):
        for backend in BACKENDS:
            world = World(True, seed, scale)
            found[backend] = asyncio.run(_played(backend, batches, Path(name), world))
    return {**found, "ok": all(map(_holds, found.values()))}


def _holds(found: dict[str, Any]) -> bool:
    whole = found["expected"] == found["traces"] == found["complete"]
    return bool(whole and not found["others"] and not found["twice"] and found["share"] <= SHARE)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=3, help="batches of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=SCALE, help="factor of the world's times")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print(json.dumps(measure(options.batches, options.seed, options.scale)))


if __name__ == "__main__":
    main()
