"""Run `tests/long/training/dapo_filter.py`; exit with 1 if the filter took other groups than the count."""

import argparse
import json

from tests.long.training import dapo_filter

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=dapo_filter.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of each world")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    line = dapo_filter.run(given.steps, given.seed)
    print(json.dumps(line))
    if line["wrong"] or line["endless"] or line["raised"]:
        raise SystemExit("the filter took other groups than the count, or a step did not end")
