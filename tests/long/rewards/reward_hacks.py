"""Wrong answers that try to earn, sent to every reward.

    python -m benchmarks.reward_hacks [REWARD ...] [--save FILE]

A hack is paid when it earns more than an honest wrong answer to the same task. Right answers are controls: they must
earn. A wrong answer that a library or an option is known to accept is a looseness, which must be a row of
`reward-functions.md`. The command ends with status 1 when a hack is paid, a right answer is not, or a looseness is not
stated or no longer so. The last line is one JSON object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.long.rewards.hacks import Tried, attack
from tests.long.rewards.hacks.large import float32
from tests.long.rewards.hacks.places import places
from tests.long.rewards.hacks.shapers import otc
from verl_multiturn.rewards import aclose
from verl_multiturn.rewards.router import REWARDS

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "reward-functions.md"
OTHERS: dict[str, Callable[[bool], AsyncIterator[Tried]]] = {"otc": otc, "float32": float32}
"""Parts that are not rewards of the router, but affect scores: the shaper, and the size of a reward."""
NAMES = [*REWARDS, *OTHERS]


async def try_all(names: list[str], quick: bool = False) -> list[Tried]:
    """Try the hacks of some rewards.

    Args:
        names: Names in `NAMES`.
        quick: Try one hack of every kind, and none that takes long.
    """
    tried: list[Tried] = []
    for name in names:
        if name in OTHERS:
            tried += [each async for each in OTHERS[name](quick)]
            continue
        with places(name) as found:
            try:
                tried += [each async for each in attack(name, found, quick)]
            finally:
                await aclose()
    return tried


def faults(tried: list[Tried], docs: str) -> list[str]:
    """Return a line for each hack that is paid, right answer that is not, and looseness that is not as stated.

    Args:
        tried: The attempts.
        docs: Text of `docs/reference/reward-functions.md`.
    """
    lines = []
    for each in tried:
        what = f"{each.reward}: {each.kind}: {each.case!r} earned {each.earned:g}, a wrong answer {each.honest:g}"
        if each.control:
            lines += [] if each.paid else [f"right and not paid: {what}"]
        elif not each.looseness:
            lines += [f"paid: {what}"] if each.paid else []
        elif not each.paid or f"| {each.looseness} | {each.of} |" not in docs:
            lines.append(f"the looseness {each.looseness!r} is {'not stated' if each.paid else 'none'}: {what}")
    return lines


def summarize(tried: list[Tried], lines: list[str]) -> dict[str, Any]:
    """Count for the last line of output."""
    hacks = [each for each in tried if not each.control and not each.looseness]
    kinds = {reward: len({each.kind for each in hacks if each.reward == reward}) for reward in NAMES}
    loose: dict[str, list[str]] = {}
    for each in tried:
        if each.looseness and each.paid and each.looseness not in loose.setdefault(each.of, []):
            loose[each.of].append(each.looseness)
    return {
        "tried": len(hacks),
        "paid": sum(each.paid for each in hacks),
        "kinds": {reward: count for reward, count in kinds.items() if count},
        "tried_by_reward": dict(Counter(each.reward for each in hacks)),
        "paid_by_reward": dict(Counter(each.reward for each in hacks if each.paid)),
        "right": sum(each.control for each in tried),
        "right_unpaid": sum(each.control and not each.paid for each in tried),
        "looseness": loose,
        "faults": len(lines),
    }
