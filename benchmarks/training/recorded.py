"""Run `tests/long/training/recorded.py`; exit with 1 if something does not hold."""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.quickstart_runs import folder
from tests.long.training import recorded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=recorded.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a quickstart with records")
    parser.add_argument("--out", type=Path, help="folder for the runs; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=("step", "changed"), default=("step", "changed"))
    args = parser.parse_args()
    found = recorded.run(args.parts, args.run, folder(args.out, "recorded"), args.seed)
    print(json.dumps(found))
    sys.exit(not found["ok"])
