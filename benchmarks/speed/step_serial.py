"""Seconds for which a trainer's devices wait for our code between generation and update, with a large batch.

    python -m benchmarks.step_serial [--before CHECKOUT] [--rows 4096] [--steps 3] [--turns 2]

A real trainer class, without workers, takes a batch out of a real TransferQueue: rows of the agent loop with eight
turns each, from a scripted engine. It times the driver's work from the end of the old log-probs to verl's update,
without verl's own estimator, which runs in between. Work handed to others counts as long as the driver waits for it.
`--before` does the same with another checkout of this repository, in turns with this one.

Each process runs a step unmeasured, and then `--steps` more; the figures are medians. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONVERSATIONS, GROUP, TURNS = 32, 16, 8
_AT_ONCE = 256
_UNITS = 2
"""Storage units of TransferQueue; a run has eight."""


def rows_of(count: int) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return rows and their tags by name, as the agent loop and verl's worker make them, and verl's old log-probs.

    A few conversations are played; the others are copies with names and receipts of their own.
    """
    import dataclasses

    import numpy as np
    import torch

    from tests.integration.trainer_rows import Store, make_output
    from verl_multiturn.certificate.receipts import Receipts

    store = Store()
    for number in range(CONVERSATIONS):
        calls = [
            f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{number}+{turn}"}}}}\n'
            "</tool_call><|im_end|>"
            for turn in range(TURNS - 1)
        ]
        output = make_output("played", number, [*calls, f"{number}<|im_end|>"])
        output.reward_score, output.extra_fields["reward_extra_info"] = float(number % 2), {"acc": number % 2}
        store.add("played", number, output)
    played = list(store.rows.values())
    rows, tags = {}, {}
    for number in range(count):
        uid, session = f"u{number // GROUP}", number % GROUP
        source = played[number % len(played)]
        name = f"{uid}_{session}_0"
        blob = source["rollout_receipts"].numpy().tobytes()
        receipts = dataclasses.replace(Receipts.from_bytes(blob), uid=uid, session_id=session, request_id=name)
        stats = {**source["metrics"]["rollout"], "request_id": name}
        rows[name] = {
            **{key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in source.items()},
            "uid": uid,
            "session_id": session,
            "metrics": {**source["metrics"], "rollout": stats},
            "rollout_receipts": torch.from_numpy(np.frombuffer(receipts.to_bytes(), np.uint8).copy()),
            "entropy": source["response_mask"].float(),
        }
        del rows[name]["advantages"]  # verl computes them
        tags[name] = {"seq_len": len(source["input_ids"]), "min_global_steps": 3, "max_global_steps": 3}
    return rows, tags


def put(rows: dict[str, dict[str, Any]], tags: dict[str, dict[str, Any]]) -> None:
    """Write rows to TransferQueue, as verl's worker does."""
    import transfer_queue
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    names = list(rows)
    for start in range(0, len(names), _AT_ONCE):
        own = names[start : start + _AT_ONCE]
        transfer_queue.kv_batch_put(
            keys=own,
            partition_id="train",
            fields=list_of_dict_to_tensordict([rows[name] for name in own]),
            tags=[tags[name] for name in own],
        )


def measure(count: int, steps: int) -> dict[str, Any]:
    """Return the figures of this process's checkout.

    Args:
        count: Number of rows.
        steps: Number of measured steps.
    """
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    ray.init(num_cpus=_UNITS + 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    units = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": _UNITS}}
    transfer_queue.init(OmegaConf.create({"backend": units}))
    from tests.integration.trainer_rows import make_trainer

    rows, tags = rows_of(count)
    put(rows, tags)
    with tempfile.TemporaryDirectory(prefix="step-serial-") as folder:
        changes = {
            "actor_rollout_ref__rollout__custom__multiturn__record_dir": folder,
            "actor_rollout_ref__rollout__n": GROUP,
            "actor_rollout_ref__actor__ppo_mini_batch_size": max(1, count // GROUP // 4),
        }
        trainer = make_trainer(**changes)
        times = Times(type(trainer).__mro__[2])
        if hasattr(trainer._verifier, "start"):
            trainer._verifier.start(count)
        batch = transfer_queue.KVBatchMeta(keys=list(rows), tags=list(tags.values()), partition_id="train")
        found = [times.step(trainer, batch) for _ in range(steps + 1)][1:]
        if trainer._joining is not None:
            trainer._joining._writer.close()
        written = sorted(Path(folder).glob("join/*.parquet"))
    ray.shutdown()
    assert written, "the step's rows were not recorded"
    medians = {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}
    tokens = sum(len(row["input_ids"]) for row in rows.values()) / count
    return {**medians, "tokens_a_row": round(tokens)}


class Times:
    """Clocks around a step of a trainer.

    Args:
        base: The class below our hooks, in the place of verl's.
    """

    def __init__(self, base: Any) -> None:
        self._verls = self._verls_cpu = 0.0
        self._began = self._began_cpu = self._updated = self._updated_cpu = 0.0
        estimate = base._compute_advantage

        def compute(trainer: Any, *arguments: Any) -> Any:
            began, cpu = time.perf_counter(), time.process_time()
            try:
                return estimate(trainer, *arguments)
            finally:
                self._verls += time.perf_counter() - began
                self._verls_cpu += time.process_time() - cpu

        def step(trainer: Any, metrics: Any, timing_raw: Any) -> Any:
            (batch,) = trainer.batches
            trainer._compute_old_log_prob(batch, metrics)
            self._began, self._began_cpu = time.perf_counter(), time.process_time()
            trainer._compute_advantage(batch, metrics)
            trainer._update_actor(batch, metrics)
            return batch

        def update(trainer: Any, batch: Any, metrics: Any) -> Any:
            self._updated, self._updated_cpu = time.perf_counter(), time.process_time()
            return batch

        base._compute_advantage, base._update_actor = compute, update
        base.step = step
        base._compute_old_log_prob = lambda trainer, batch, metrics: batch

    def step(self, trainer: Any, batch: Any) -> dict[str, float]:
        """Run a step, and return its seconds: wall, and CPU of the driver with all its threads."""
        self._verls = self._verls_cpu = 0.0
        trainer.batches, metrics = [batch], {}
        trainer.step(metrics, {})
        ended = time.perf_counter()
        began, cpu = self._began, self._began_cpu
        certificate = metrics["rollout/certificate/seconds"]
        serial = self._updated - began - self._verls
        return {
            "serial_s": serial,
            "serial_cpu_s": self._updated_cpu - cpu - self._verls_cpu,
            "certificate_s": certificate,
            "others_s": serial - certificate,
            "verls_s": self._verls,
            "end_s": ended - self._updated,
        }


def of_checkout(path: Path, rows: int, steps: int) -> dict[str, Any]:
    """Return the figures of a checkout, from a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--alone", "--rows", str(rows), "--steps", str(steps)]
    threads = str(len(os.sched_getaffinity(0)))  # TransferQueue warns of more, a line for each call
    environment = {"VERL_PLATFORM": "cpu", "TQ_NUM_THREADS": threads, **os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{path}: status {done.returncode}: {done.stderr[-3000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("package").startswith(str(path)), "the checkout's own code was not the one that ran"
    return told


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each process")
    parser.add_argument("--turns", type=int, default=1, help="how often the checkouts take turns")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        import verl_multiturn

        found = measure(options.rows, options.steps)
        print(json.dumps({**found, "package": verl_multiturn.__file__}))
        return
    checkouts = {"after": Path(__file__).resolve().parents[2]}
    if options.before is not None:
        checkouts = {"before": options.before.resolve(), **checkouts}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for _ in range(options.turns):
        for name, path in checkouts.items():
            found[name].append(of_checkout(path, options.rows, options.steps))
            print(f"{name:7} {found[name][-1]}", flush=True)
    told: dict[str, Any] = {"rows": options.rows, "turns_a_row": TURNS, "cores": len(os.sched_getaffinity(0))}
    for name, each in found.items():
        told[name] = {key: round(statistics.median(one[key] for one in each), 3) for key in each[0]}
    if "before" in told:
        for key, figure in (("ratio", "serial_s"), ("ratio_cpu", "serial_cpu_s")):
            told[key] = round(told["after"][figure] / told["before"][figure], 3)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
