"""Run `tests/long/endpoint/gateway_load.py`; exit with 1 if something was found."""

import argparse
import json
import sys
import time

from tests.long.endpoint import gateway_load
from tests.long.endpoint.gateway_load import MOST_ADDED_MS, PARTS, control, faults_in, measure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=gateway_load.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--requests", type=int, default=gateway_load.REQUESTS, help="hostile ones")
    parser.add_argument("--sessions", type=int, default=gateway_load.SESSIONS, help="at once")
    parser.add_argument("--kills", type=int, default=gateway_load.KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="show that the figures see faults")
    options, started = parser.parse_args(), time.perf_counter()
    if options.control:
        seen = control(seed=options.seed)
        found, failed = {"seen": seen}, not all(seen.values())
    else:
        figures = measure(options.parts, options.requests, options.sessions, options.kills, options.seed)
        slow = figures.get("latency", {}).get("added_p50_ms", 0.0) > MOST_ADDED_MS
        found, failed = figures, slow or faults_in(figures) > 0
    print(json.dumps({**found, "seconds": round(time.perf_counter() - started, 1), "seed": options.seed}))
    sys.exit(failed)
