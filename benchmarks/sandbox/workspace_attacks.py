"""Run `tests/long/sandbox/workspace_attacks.py`; exit with 1 if something does not hold."""

import argparse
import asyncio
import json
import sys

from tests.long.sandbox import workspace_attacks as attacks
from tests.support.workspace_attacks import VERDICTS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(attacks.__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=attacks.NAMES)  # and no honest repair
    parser.add_argument("--verdict", nargs="+", default=list(VERDICTS), choices=list(VERDICTS))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--told", action="store_true")
    options = parser.parse_args()
    if options.told:
        figures = attacks.values(options.short)
    else:
        figures = asyncio.run(attacks.run(options.only, options.verdict, options.short))
    print(json.dumps(figures), flush=True)
    sys.exit(not figures["holds"])
