"""Run `tests/long/task_sets/eval_sets.py`."""

import argparse
import json
from pathlib import Path

from tests.long.task_sets import eval_sets

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=eval_sets.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=Path, metavar="DIR", help="fetched sets, each in a folder with its benchmark's name"
    )
    parser.add_argument("--short", action="store_true", help="play no tasks")
    options = parser.parse_args()
    print(json.dumps(eval_sets.run(options.rows, options.short)))
