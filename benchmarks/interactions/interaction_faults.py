"""Run `tests/long/interactions/interaction_faults.py`."""

import argparse
import asyncio
import json
import logging

from tests.long.interactions import interaction_faults

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=interaction_faults.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every fault is logged
    print(json.dumps(asyncio.run(interaction_faults.measure(options.conversations, options.seed))))
