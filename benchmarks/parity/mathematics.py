r"""`math` beside Math-Verify itself, which runs here without our guard, clock and limits.

The pairs are those of Math-Verify's own tests, and algebra of ours; see `math_pairs.json`. Each stands in a box, as it
does in an answer."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.parity import Compared, score

PAIRS: dict[str, list[list[str]]] = json.loads(Path(__file__).with_name("math_pairs.json").read_text())


def math_verify_says(gold: str, text: str) -> float:
    """1.0 when plain Math-Verify calls the two equal."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no clock
    kinds = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())
    parsed = [math_verify.parse(each, kinds, parsing_timeout=None) for each in (gold, text)]
    return float(math_verify.verify(*parsed, timeout_seconds=None))


SEVERAL = "several boxes"
TEXTS = [
    (r"The roots are $\boxed{1}$ and $\boxed{2}$.", "1,2", SEVERAL),
    (r"It is $\boxed{1}$. No: it is $\boxed{2}$.", "2", ""),
    (r"First \boxed{3}, so \boxed{4}", "4", SEVERAL),
]


async def compare(quick: bool) -> AsyncIterator[Compared]:
    """Every pair, and what is read out of a text; `quick`: half of the algebra, where SymPy works hardest."""
    pairs = PAIRS["algebra"][:20] if quick else PAIRS["math_verify"] + PAIRS["algebra"]
    for gold, answer in pairs:
        said = math_verify_says(rf"\boxed{{{gold}}}", rf"\boxed{{{answer}}}")
        yield Compared("math", f"{gold}  |  {answer}", await _score(rf"\boxed{{{answer}}}", gold), said)
    for text, gold, stated in TEXTS:
        said = math_verify_says(rf"\boxed{{{gold}}}", text)
        yield Compared("math", f"{gold}  |  {text}", await _score(text, gold), said, stated)


async def _score(text: str, gold: str) -> float:
    return await score("math_dapo", [text], gold, math={"timeout_s": 60.0})
