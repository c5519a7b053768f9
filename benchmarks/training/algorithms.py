"""Run `tests/long/training/algorithms.py`, on a quickstart of 100 steps or on finished runs."""

import argparse
import json
from pathlib import Path

from benchmarks.quickstart_runs import folder, start
from tests.long.training import algorithms

STEPS = 100


def finished_run(out: Path | None) -> Path:
    """Make a run of the quickstart, and return its folder.

    Args:
        out: As in `quickstart_runs.folder`.
    """
    run = folder(out, "algorithms")
    with start("sync", STEPS, 0, run) as training:
        if training.wait():
            raise SystemExit(f"{run}: the quickstart ended with {training.returncode}; its log is train.log")
    return run


if __name__ == "__main__":
    described = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=algorithms.__doc__, formatter_class=described)
    parser.add_argument("--run", type=Path, nargs="+", default=[], help="folders of finished quickstarts with records")
    parser.add_argument("--out", type=Path, help="folder of the run that is made; a temporary one by default")
    parser.add_argument("--short", action="store_true", help="leave the quickstart out, and take 100 groups")
    given = parser.parse_args()
    runs = given.run or ([] if given.short else [finished_run(given.out)])
    print(json.dumps(algorithms.figures(runs, 100 if given.short else algorithms.GROUPS)))
