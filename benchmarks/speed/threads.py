"""From which size on does a model on a CPU gain by more than one thread of OpenMP?

    python -m benchmarks.threads [--sizes 128 256 512 1024] [--busy]

Each setting runs in a process of its own: one thread; all cores with `OMP_WAIT_POLICY=passive`, so that threads sleep
while they wait; all cores with GNU's default, where they spin. Models of four layers with random weights decode a token
for 32 requests behind 220 tokens each (`decode`), and take a step of training on 1,400 tokens (`update`). `--busy`
keeps every core busy with another process meanwhile.

The last line is one JSON object: by size, wall and CPU milliseconds of each setting, and `gain`, the wall time of one
thread over that of all cores that sleep, of decoding and of an update.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

SIZES = (128, 256, 512, 1024)
REQUESTS, BEFORE, TRAINED = 32, 220, 1400
SETTINGS: dict[str, dict[str, str]] = {
    "one": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    "passive": {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "passive"},
    "spinning": {"OMP_NUM_THREADS": str(os.cpu_count())},
}


def measure(run: Callable[[], Any], least_s: float = 1.5) -> dict[str, float]:
    """Return the median wall and the least CPU milliseconds of several runs, after one that is not measured."""
    run()
    walls, cpus = [], []
    end = time.perf_counter() + least_s
    while len(walls) < 3 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"wall_ms": round(1000 * sorted(walls)[len(walls) // 2], 1), "cpu_ms": round(1000 * min(cpus), 1)}


def work(size: int) -> dict[str, dict[str, float]]:
    """Return the times of decoding and an update of a model in this process."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=4,
        num_attention_heads=size // 32, num_key_value_heads=max(1, size // 64),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    before = torch.randint(2048, (REQUESTS, BEFORE))
    with torch.no_grad():
        cache = model(before, past_key_values=DynamicCache(), use_cache=True).past_key_values
    token, row = torch.randint(2048, (REQUESTS, 1)), torch.randint(2048, (1, TRAINED))

    def decode() -> None:
        with torch.no_grad():
            model(token, past_key_values=cache, use_cache=True)
        cache.crop(BEFORE)

    def update() -> None:
        model(row, labels=row).loss.backward()
        model.zero_grad()

    return {"decode": measure(decode), "update": measure(update)}


def compare(sizes: list[int], busy: bool) -> dict[str, Any]:
    """Return the figures of each size, each setting in a process of its own."""
    found: dict[str, Any] = {}
    plain = {name: each for name, each in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1 if busy else 0):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        for size in sizes:
            each: dict[str, Any] = {}
            for name, variables in SETTINGS.items():
                code = f"import json; from benchmarks.threads import work; print(json.dumps(work({size})))"
                command = [sys.executable, "-W", "ignore", "-c", code]
                output = subprocess.check_output(command, env={**plain, **variables}, text=True)
                each[name] = json.loads(output.splitlines()[-1])
            gain = {
                part: round(each["one"][part]["wall_ms"] / each["passive"][part]["wall_ms"], 2)
                for part in ("decode", "update")
            }
            found[str(size)] = {**each, "gain": gain}
            print(size, gain, flush=True)
    return found


def main() -> None:
    """Compare the settings, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="hidden sizes, multiples of 64")
    parser.add_argument("--busy", action="store_true", help="beside a busy loop for each core")
    arguments = parser.parse_args()
    found = compare(list(arguments.sizes), arguments.busy)
    print(json.dumps({"cores": os.cpu_count(), "busy": arguments.busy, **found}))


if __name__ == "__main__":
    main()
