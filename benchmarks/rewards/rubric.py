"""Run `tests/long/rewards/rubric_judges.py`; exit with 1 if a score is another one, or a text earns that must not."""

import asyncio
import json
import logging
import sys

from tests.long.rewards.rubric_judges import __doc__ as described
from tests.long.rewards.rubric_judges import faults, hack_texts, judge_all, outage, summarize
from tests.long.rewards.rubric_siblings import rank_all

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"expected no arguments, got {sys.argv[1:]}\n{described}")
    logging.getLogger("verl_multiturn").setLevel(logging.CRITICAL)  # these inputs cause warnings
    found = asyncio.run(judge_all())
    siblings = asyncio.run(rank_all(hack_texts()))
    lines = [*faults(found), *siblings.pop("faults")]
    print(*lines, sep="\n", end="\n" if lines else "")
    behind = outage()
    print(json.dumps({**summarize(found, lines), **siblings, **behind}))
    wrong = (
        behind["outage_trained"] or siblings["outage_ranked"] or siblings["orders_all_disagreeing"] < siblings["orders"]
    )
    sys.exit(bool(lines or wrong or not behind["judged_trained"]))
