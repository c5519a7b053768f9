"""Are the traces of sampled conversations complete, and what do they cost of a step?

    python -m benchmarks.trace_cost [--batches 3]

The real agent-loop worker rolls batches out, with a scripted model and a slow tool (`oversample_world.py`): 16 prompts
with 8 samples each, over-sampled, in the world `coupled` of `benchmarks.oversample`, whose times are scaled so that a
batch takes some 7 s, as a step of the quickstart on two cores does. Steps of other recipes are longer.
`max_samples_per_step_per_worker` is 1, so that one prompt of each batch is traced with its 11 samples, 3 of which are
cut.

- `traces`: the written ones, and `expected`; `complete`: those with one span for each generation, call and turn that
  the script has for this conversation (of one that was cut, some at its end may lack); `others`: those of conversations
  that were not sampled. They are read back from the backend's files.
- `share`: CPU time of the traces of a batch, as a share of the CPU time that two cores have in it: by so much a step
  gets longer where nothing is idle. It is that of all threads but the event loop's, those of the backend among them,
  minus that of a batch without traces, plus `loop_ms` for each trace. The first opening of the backend's files does
  not count.
- `ms`: CPU time of one trace; `loop_ms`: its time on the event loop, where conversations could wait for it.

The backends are MLflow with an SQLite file, and Trackio; both are in requirements/traces.lock. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import os
import sqlite3
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
from verl_multiturn.observe.spans import TraceSpan
from verl_multiturn.rollout.groups.oversampling import samples_to_start
from verl_multiturn.rollout.life import Life, note
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.verl_bridge.loops.life import follow
from verl_multiturn.verl_bridge.names import AGENT_LOOP
from verl_multiturn.verl_bridge.traces.tracer import Tracer

BACKENDS = ("mlflow", "trackio")
SCALE = 0.33
CORES = 2
SHARE = 0.02
"""The largest share of a step that the traces of sampled conversations may cost."""
_ROOT, _TURN, _GENERATION, _TOOL = "agent_loop", "turn", "generation", "tool wait"


def _worker(world: World, folder: Path, backend: str | None) -> ScriptedWorker:
    trace = {"project_name": "cost", "experiment_name": backend, "backend": backend}
    settings = {"n": SAMPLES, "over_sample_rate": RATE, "trace": {**trace, "max_samples_per_step_per_worker": 1}}
    return ScriptedWorker(world, AutoTokenizer.from_pretrained(MODEL), folder, **settings)


async def _roll(world: World, folder: Path, backend: str | None, batches: range) -> tuple[float, float]:
    """Roll batches out until their traces are written.

    Returns:
        The seconds of a batch in the median, and the CPU seconds of all threads but the event loop's.
    """
    worker = _worker(world, folder, backend)
    others, seconds = time.process_time() - time.thread_time(), []
    for batch in batches:
        started = time.perf_counter()
        await worker.run_groups(range(batch * PROMPTS, (batch + 1) * PROMPTS), global_steps=batch)
        seconds.append(time.perf_counter() - started)
    if worker._tracer is not None:
        await worker._tracer.writer.aclose()
    return statistics.median(seconds), time.process_time() - time.thread_time() - others


async def _loop_s() -> float:
    """Return the CPU seconds that a traced conversation takes on the event loop."""
    tracer, count = Tracer([_Nowhere()], None, None, None), 200
    row = {"uid": "u", "session_id": 0, "index": 0, "global_steps": 1, "agent_name": AGENT_LOOP}
    tracer.choose(row, validate=False)
    started = time.thread_time()
    for _ in range(count):
        with follow(row, tracer):
            ended = Outcome.begun("r")
            ended.trajectory.stop_reason = StopReason.FINISHED
            note(ended)
    used = time.thread_time() - started
    await tracer.writer.aclose()
    return used / count


class _Nowhere:
    """A backend that drops its input."""

    name = "nowhere"

    def open(self) -> None:
        """Do nothing."""

    def write(self, life: Life, trace: TraceSpan) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


async def _played(backend: str, batches: int, folder: Path, world: World) -> dict[str, Any]:
    """Roll batches out with and without traces."""
    await _roll(world, folder, backend, range(1))  # imports the backend, and makes its files
    step_s, used = await _roll(world, folder, backend, range(1, batches + 1))
    _, without = await _roll(world, folder, None, range(1, 2))
    traces = samples_to_start(SAMPLES, RATE)
    loop_s = await _loop_s()
    of_batch = used / batches - without + traces * loop_s
    return {
        "share": round(of_batch / (CORES * step_s), 4),
        "ms": round(1000 * of_batch / traces, 2),
        "loop_ms": round(1000 * loop_s, 3),
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
        ]
    # Trackio's own functions read one run, and each worker is one.
    with contextlib.closing(sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "cost.db")) as file:
        rows = file.execute("SELECT metadata, spans FROM traces").fetchall()
    return [(json.loads(told), [span["name"] for span in json.loads(spans)]) for told, spans in rows]


def _checked(traces: list[tuple[dict[str, Any], list[str]]], batches: int, world: World) -> dict[str, int]:
    """Compare the traces with the script of the sampled conversations."""
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
        batches: Batches of each kind that are measured.
        seed: Seed of the world.
        scale: Factor of the world's times.

    Returns:
        By backend the module's figures, and `ok`: all of them are right.
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
