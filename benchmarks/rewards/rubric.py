"""Run `tests/long/rewards/rubric_judges.py`; exit with 1 if a score is another one, or a text earns that must not."""

import asyncio
import json
import logging
import sys

from tests.long.rewards.rubric_judges import __doc__ as described
from tests.long.rewards.rubric_judges import faults, judge_all, outage, summarize

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"expected no arguments, got {sys.argv[1:]}\n{described}")
    logging.getLogger("verl_multiturn").setLevel(logging.CRITICAL)  # these inputs cause warnings
    found = asyncio.run(judge_all())
    lines = faults(found)
    print(*lines, sep="\n", end="\n" if lines else "")
    behind = outage()
    print(json.dumps({**summarize(found, lines), **behind}))
    sys.exit(bool(lines or behind["outage_trained"] or not behind["judged_trained"]))
