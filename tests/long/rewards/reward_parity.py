"""Comparison of every reward with the original that it replaces.

    python -m benchmarks.reward_parity [REWARD ...]

Every difference is printed. A difference is stated when its case names a row of the table of differences in
`reward-functions.md`. An unstated difference, or a statement without a difference, ends the command with status 1.
The last line is one JSON object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tests.long.rewards.parity import Compared, judged, mathematics, programs, sql, texts
from verl_multiturn.rewards import aclose

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "reward-functions.md"
Compare = Callable[[bool], AsyncIterator[Compared]]
REWARDS: dict[str, Compare] = {
    "gsm8k": texts.gsm8k,
    "math": mathematics.compare,
    "qa": texts.qa,
    "judge": judged.compare,
    "sql": sql.compare,
    "code": programs.compare,
    "tool_n1": texts.tool_n1,
    "otc": texts.otc,
    "reasoning_gym": texts.reasoning_gym,
}


async def compare_all(names: list[str], quick: bool = False) -> list[Compared]:
    """Run the cases of some rewards.

    Args:
        names: Keys of `REWARDS`.
        quick: Run fewer cases of the slow rewards.
    """
    try:
        return [compared for name in names async for compared in REWARDS[name](quick)]
    finally:
        await aclose()


def verdict(case: Compared, docs: str) -> str:
    """Return `agreed`, `stated` or `unstated`.

    A statement without a difference is as bad as a difference without a statement: both are `unstated`.

    Args:
        case: The compared scores.
        docs: Text of `docs/reference/reward-functions.md`.
    """
    if not case.stated:
        return "agreed" if case.agrees else "unstated"
    return "stated" if f"| {case.stated} |" in docs and not case.agrees else "unstated"


def tell(case: Compared) -> str:
    """Describe a case in one line."""
    return f"{case.reward}: {case.case!r}: ours {case.ours:g}, the original {case.theirs:g}, stated {case.stated!r}"


def unstated(compared: list[Compared]) -> list[str]:
    """Return one line for each unstated case."""
    docs = DOCS.read_text(encoding="utf-8")
    return [tell(case) for case in compared if verdict(case, docs) == "unstated"]


def summarize(compared: list[Compared], docs: str) -> dict[str, int]:
    """Count the verdicts for the last line of output."""
    count = Counter(verdict(case, docs) for case in compared)
    return {
        "cases": len(compared),
        "agreed": count["agreed"],
        "differences_stated": count["stated"],
        "differences_unstated": count["unstated"],
    }


def lines_of(compared: list[Compared], docs: str) -> list[str]:
    """Return a line for each reward, then one for each case that differs."""
    names = dict.fromkeys(case.reward for case in compared)
    own = {name: [case.agrees for case in compared if case.reward == name] for name in names}
    lines = [f"{name}: {len(cases)} cases, {sum(cases)} agree" for name, cases in own.items()]
    return lines + [f"{word:9} {tell(case)}" for case in compared if (word := verdict(case, docs)) != "agreed"]
