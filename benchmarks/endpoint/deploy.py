"""Run `tests/long/endpoint/deploy_load.py`, or with `--engine` `deploy_engine.py`; exit with 1 at a finding."""

import argparse
import json
import sys
import time
from pathlib import Path

from tests.long.endpoint import deploy_load

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=deploy_load.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--swaps", type=int, default=deploy_load.SWAPS)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--control", action="store_true", help="show that the counter sees a wrong hash")
    how.add_argument("--engine", action="store_true", help="the command and a real SGLang on the CPU; minutes")
    parser.add_argument("--out", type=Path, help="with --engine: folder for models, records and logs")
    options, started = parser.parse_args(), time.perf_counter()
    words = options.swaps, options.agents, options.seed
    if options.engine:
        from tests.long.endpoint import deploy_engine

        figures = deploy_engine.measure(*words, out=options.out)
        kinds = deploy_engine.KINDS
    else:
        figures = (deploy_load.control if options.control else deploy_load.measure)(*words)
        kinds = deploy_load.KINDS
    if options.control:
        failed = not figures["wrong_hash"]
    else:
        failed = any(figures[kind] for kind in kinds) or figures["swaps"] < options.swaps
    print(json.dumps({**figures, "seconds": round(time.perf_counter() - started, 1), "seed": options.seed}))
    sys.exit(failed)
