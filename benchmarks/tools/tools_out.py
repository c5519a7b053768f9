"""Run `tests/long/tools/tools_out.py`."""

import argparse
import asyncio
import json
import logging

from tests.long.tools import tools_out

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=tools_out.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=5000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-program", action="store_true", help="leave the agent program out")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a client that is gone is logged
    given = options.schemas, options.sessions, options.seed, not options.without_program
    print(json.dumps(asyncio.run(tools_out.measure(*given))))
