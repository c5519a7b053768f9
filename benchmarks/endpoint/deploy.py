"""Run `tests/long/endpoint/deploy_load.py`; exit with 1 if something was found."""

import argparse
import json
import sys
import time

from tests.long.endpoint.deploy_load import KINDS, SWAPS, __doc__, control, measure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=SWAPS)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="show that the counter sees a wrong hash")
    options, started = parser.parse_args(), time.perf_counter()
    figures = (control if options.control else measure)(options.swaps, options.agents, options.seed)
    if options.control:
        failed = not figures["wrong_hash"]
    else:
        failed = any(figures[kind] for kind in KINDS) or figures["swaps"] < options.swaps
    print(json.dumps({**figures, "seconds": round(time.perf_counter() - started, 1), "seed": options.seed}))
    sys.exit(failed)
