"""Run `tests/long/training/algorithms.py`."""

import argparse
import json
from pathlib import Path

from tests.long.training import algorithms

if __name__ == "__main__":
    described = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=algorithms.__doc__, formatter_class=described)
    parser.add_argument("--run", type=Path, nargs="+", default=(), help="folders of finished quickstarts with records")
    parser.add_argument("--groups", type=int, default=algorithms.GROUPS, help="random groups for each estimator")
    given = parser.parse_args()
    print(json.dumps(algorithms.figures(given.run, given.groups)))
