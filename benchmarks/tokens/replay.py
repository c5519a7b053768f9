"""Run `tests/long/tokens/replay.py`."""

import argparse
import asyncio
import json
import logging

from tests.long.tokens import replay
from tests.long.tokens.honest import FAMILIES

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=replay.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4, help="conversations of each situation and family")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="model families")
    args = parser.parse_args()
    logging.disable(logging.ERROR)  # failures of engines and tools are logged, and belong to the conversations
    print(json.dumps(asyncio.run(replay.run(args.families, args.count))))
