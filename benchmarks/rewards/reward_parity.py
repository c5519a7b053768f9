"""Run `tests/long/rewards/reward_parity.py`; exit with 1 if a difference is not stated."""

import asyncio
import json
import sys

from tests.long.rewards.reward_parity import DOCS, REWARDS, compare_all, lines_of, summarize


def main() -> int:
    """Compare the chosen rewards, print the differences and the figures, and return the exit status."""
    docs = DOCS.read_text(encoding="utf-8")
    names = sys.argv[1:] or list(REWARDS)
    if unknown := [name for name in names if name not in REWARDS]:
        print(f"{unknown[0]!r} is no reward with an original; name some of {', '.join(REWARDS)}", file=sys.stderr)
        return 2
    compared = asyncio.run(compare_all(names))
    summary = summarize(compared, docs)
    print(*lines_of(compared, docs), json.dumps(summary), sep="\n")
    return 1 if summary["differences_unstated"] else 0


if __name__ == "__main__":
    sys.exit(main())
