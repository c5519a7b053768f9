"""Run `tests/long/task_sets/tau2.py`."""

import argparse
import asyncio
import json

from tests.long.task_sets import tau2

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=tau2.__doc__)
    parser.add_argument("--short", action="store_true", help="compare every eighth task alone")
    print(json.dumps(asyncio.run(tau2.measure(parser.parse_args().short))))
