"""Run `tests/long/task_sets/swe_packages.py`; exit with 1 if a verdict is not as it should be."""

import argparse
import json
import sys

from tests.long.task_sets import swe_packages

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=swe_packages.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", default="toolz")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = swe_packages.measure(options.package, options.count, options.seed)
    print(json.dumps(found))
    sys.exit(not swe_packages.holds(found))
