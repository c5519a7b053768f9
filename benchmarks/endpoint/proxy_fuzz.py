"""Run `tests/long/endpoint/proxy_fuzz.py`; exit with 1 if something was found."""

import argparse
import json
import logging
import sys
import time

from rich.console import Console

from tests.long.endpoint.proxy_fuzz import CONTROLLED, KINDS, REQUESTS, __doc__, control, family_of, measure
from tests.support.families import names

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--families", nargs="*", default=names(), choices=names())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="show that the counters see faults")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # the engine fails on purpose
    console, started = Console(width=140), time.perf_counter()
    if options.control:
        figures = control(family_of("quickstart"), CONTROLLED, options.seed, console)
        failed = figures["seen"] < figures["faults"]
    else:
        figures = measure([family_of(name) for name in options.families], options.requests, options.seed, console)
        failed = any(figures[kind] for kind in KINDS) or figures["requests"] < options.requests
    print(json.dumps({**figures, "seconds": round(time.perf_counter() - started, 1), "seed": options.seed}))
    sys.exit(failed)
