"""Run `tests/long/endpoint/endpoint_attacks.py`; exit with 1 if a door did not hold."""

import argparse
import json
import logging
import sys
import time

from rich.console import Console

from tests.long.endpoint.endpoint_attacks import DOORS, __doc__, is_right, measure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doors", nargs="*", default=DOORS, choices=DOORS)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # agents fail on purpose
    started = time.perf_counter()
    found = measure(options.doors, Console(width=200))
    print(json.dumps({**found, "seconds": round(time.perf_counter() - started, 1)}))
    sys.exit(not is_right(found))
