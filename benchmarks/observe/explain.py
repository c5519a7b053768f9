"""Run `tests/long/observe/explain.py`; exit with 1 if a fault was not named first or a healthy run alarms."""

import argparse
import json
import sys
import time

from tests.long.observe import explain

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=explain.__doc__)
    parser.add_argument("--run", nargs="*", default=[], metavar="DIR", help="folders of real healthy runs")
    parser.add_argument("--only-runs", action="store_true", help="leave the synthetic runs out")
    options = parser.parse_args()
    began = time.monotonic()
    result = explain.run(options.run, options.only_runs)
    print(json.dumps(result | {"seconds": round(time.monotonic() - began, 1)}))
    sys.exit(not explain.holds(result))
