"""Run `tests/long/task_sets/bfcl.py`."""

import argparse
import json

from tests.long.task_sets import bfcl

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=bfcl.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="every 20th dialogue")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(bfcl.run(20 if options.short else 1, options.seed)))
