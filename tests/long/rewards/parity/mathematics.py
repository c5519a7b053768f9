r"""`math` beside Math-Verify itself, which runs here without our guard, clock and limits.

The pairs are those of Math-Verify's own tests, and algebra of ours; see `math_pairs.json`. Each is in a box, as in an
answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from tests.long.rewards.parity import Compared, of_verl, score

PAIRS: dict[str, list[list[str]]] = json.loads(Path(__file__).with_name("math_pairs.json").read_text())


def math_verify_says(gold: str, text: str) -> float:
    """Return 1.0 when plain Math-Verify calls the two equal, else 0.0."""
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
    (r"\boxed{6 \\ 5}", "5", "lines below each other"),
    (r"\boxed{\ne 5}", "5", "lines below each other"),
]


VALUE, LONG = "equal, and written otherwise", "a long text after the answer"
# ToRL's normalizer removes signs before it compares texts.
TORL = [("5.", "5"), ("90°", "90"), (r"10\%", "10"), ("10", r"10\%"), (r"90^\circ", "90"), (r"\$5", "5"), ("5.1", "5")]
# ReTool's reward is verl's `math_dapo.py`, which compares the text of the box.
RETOOL = [
    (r"so \boxed{42}", "42", ""),
    (r"so \boxed{41}", "42", ""),
    (r"\boxed{41} or \boxed{42}", "42", ""),
    ("so 42", "42", ""),
    (r"so \boxed{42", "42", ""),
    (r"so \boxed{41 \boxed{42}}", "42", "a box within a box"),
    (r"so \boxed{\frac{84}{2}}", "42", VALUE),
    (r"so \boxed{042}", "42", VALUE),
    (r"so \boxed{42}" + " as was to be shown" * 10, "42", LONG),
]


def torl_says(answer: str, gold: str) -> float:
    """Score an answer by ToRL's rule.

    The answer is right (1.0) when both texts are the same without degrees, percent and dollar signs, blanks and a full
    stop at the end, or when Math-Verify calls them equal.
    """
    signs = ("^{\\circ}", "^\\circ", "°", "\\%", "%", "\\$", "$", " ")
    stripped = []
    for text in (answer, gold):
        for sign in signs:
            text = text.replace(sign, "")
        stripped.append(text.removesuffix("."))
    return float(stripped[0] == stripped[1]) or math_verify_says(rf"\boxed{{{gold}}}", rf"\boxed{{{answer}}}")


async def compare(quick: bool) -> AsyncIterator[Compared]:
    """Compare every pair, and the texts that test how an answer is read out of a text.

    Args:
        quick: Compare half of the algebra alone instead of all pairs; SymPy works hardest there.
    """
    pairs = PAIRS["algebra"][:20] if quick else PAIRS["math_verify"] + PAIRS["algebra"]
    for gold, answer in pairs:
        said = math_verify_says(rf"\boxed{{{gold}}}", rf"\boxed{{{answer}}}")
        yield Compared("math", f"{gold}  |  {answer}", await _score(rf"\boxed{{{answer}}}", gold), said)
    for text, gold, stated in TEXTS:
        said = math_verify_says(rf"\boxed{{{gold}}}", text)
        yield Compared("math", f"{gold}  |  {text}", await _score(text, gold), said, stated)
    for answer, gold in TORL:
        yield Compared(
            "math", f"ToRL: {answer}", await _score(rf"\boxed{{{answer}}}", gold, True), torl_says(answer, gold)
        )
    retool = of_verl("math_dapo.py")
    for text, gold, stated in RETOOL:
        right = float(retool.compute_score(text, gold, strict_box_verify=True)["acc"])
        yield Compared("math", f"ReTool: {text[:40]}", await _score(text, gold), right, stated)


async def _score(text: str, gold: str, ignore_signs: bool = False) -> float:
    return await score("math_dapo", [text], gold, math={"timeout_s": 60.0, "ignore_signs": ignore_signs})
