"""Run `tests/long/rewards/reward_hacks.py`; exit with 1 if a wrong answer earns, or a right one does not."""

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path

from tests.long.rewards.reward_hacks import DOCS, NAMES, __doc__, faults, summarize, try_all

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rewards", nargs="*", metavar="REWARD", help=f"one of {', '.join(NAMES)}; default: all")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the faults and the last line into this file")
    options = parser.parse_args()
    if unknown := sorted(set(options.rewards) - set(NAMES)):
        parser.error(f"no rewards: {unknown}; known are {NAMES}")
    logging.getLogger("verl_multiturn").setLevel(logging.CRITICAL)  # these inputs cause warnings
    tried = asyncio.run(try_all(options.rewards or NAMES))
    lines = faults(tried, DOCS.read_text(encoding="utf-8"))
    summary = summarize(tried, lines)
    print(*lines, sep="\n", end="\n" if lines else "")
    if options.save:
        saved = json.dumps({"summary": summary, "faults": lines}, indent=1, ensure_ascii=False)
        options.save.write_text(saved + "\n", encoding="utf-8")
    print(json.dumps(summary))
    sys.exit(bool(lines))
