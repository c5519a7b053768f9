"""Run `tests/long/endpoint/proxy_fuzz.py`; exit with 1 if something was found."""

import argparse
import json
import logging
import sys
import time

from rich.console import Console

from tests.long.endpoint import proxy_fuzz as fuzz
from tests.support.families import names

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=fuzz.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, help=f"default: {fuzz.REQUESTS:,}; with --only {fuzz.REQUESTS_OF_ONE}")
    parser.add_argument("--families", nargs="*", default=names(), choices=names())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="show that the counters see faults")
    parser.add_argument("--only", metavar="FAMILY-NUMBER", help="a session, as a finding names it")
    options = parser.parse_args()
    name, _, number = (options.only or "").rpartition("-")
    if options.only and not (name in names() and number.isdigit()):
        parser.error(f"--only {options.only!r} is no session of a family of {names()}; write it as a finding names it")
    requests = options.requests or (fuzz.REQUESTS_OF_ONE if options.only else fuzz.REQUESTS)
    logging.disable(logging.ERROR)  # the engine fails on purpose
    console, started = Console(width=140), time.perf_counter()
    if options.control:
        figures = fuzz.control(fuzz.family_of("quickstart"), fuzz.CONTROLLED, options.seed, console)
        failed = figures["seen"] < figures["faults"]
    else:
        chosen = [fuzz.family_of(each) for each in ([name] if options.only else options.families)]
        only = int(number) if options.only else None
        figures = fuzz.measure(chosen, requests, options.seed, console, with_ends=only is None, only=only)
        failed = any(figures[kind] for kind in fuzz.KINDS) or figures["requests"] < requests
    print(json.dumps({**figures, "seconds": round(time.perf_counter() - started, 1), "seed": options.seed}))
    sys.exit(failed)
