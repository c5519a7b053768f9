"""Run `tests/long/training/filters.py`; exit with 1 if groups or gradients are wrong."""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.quickstart_runs import folder
from tests.long.training import filters

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=filters.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("simulated", "loss", "real")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--filters", nargs="+", choices=filters.FILTERS, help="of the real part; by default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one by default")
    given = parser.parse_args()
    line: dict[str, Any] = {}
    if "simulated" in given.parts:
        line |= filters.simulated(range(1 if given.short else 4), 16 if given.short else 40)
    if "loss" in given.parts:
        line["gradient"] = filters.gradients(2 if given.short else 40)
    if "real" in given.parts:
        out = folder(given.out, "filters")
        named = given.filters or (("difficulty",) if given.short else filters.FILTERS)
        seeds, steps = (given.seeds[:1], 3) if given.short else (given.seeds, given.steps)
        line |= filters.real(named, seeds, steps, out)
    print(json.dumps(line))
    if faults := filters.faults_of(line):
        raise SystemExit(f"groups or gradients are not what they should be: {faults}")
