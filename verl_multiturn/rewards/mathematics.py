r"""Mathematics: the last `\boxed{…}` against the ground truth, by `math_verify` (huggingface/Math-Verify), and, when
asked for, as the same text but for signs like `°` and `%`."""

from __future__ import annotations

import re
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.formats import last_boxed
from verl_multiturn.rewards.score import Score, Solution
from verl_multiturn.rewards.verifiers import VerifierOptions, verify

_MOST_CHARACTERS = 1_000
"""Of an answer; a longer one is wrong."""

_NO_VALUE = re.compile(r"\s|\\[ ,;!]|\\?\$|\\?%|°|\^\{?\s*(?:\\circ|\\degree)\s*\}?|\\degree(?![a-zA-Z])")


class MathOptions(VerifierOptions):
    ignore_signs: bool = False
    """Whether an answer is right, too, that is the same text but for degrees, percent, dollar signs and a full stop, as
    in ToRL's normaliser: `5.`, `90°` and `10%` are 5, 90 and 10. Math-Verify calls most of these different."""


async def reward(solution: Solution, ground_truth: Any, options: MathOptions) -> Score:
    """Whether the two are the same number, formula, set or text.

    Args:
        ground_truth: the answer, in a box or without.

    Raises:
        ConfigError: it is neither text nor a number, or empty.
        TimeoutError, WorkerError: see `verify`; also when the ground truth cannot be read.
    """
    gold = str(ground_truth).strip() if isinstance(ground_truth, str | int | float) else ""
    gold = last_boxed(gold) or gold
    if not gold:
        raise ConfigError(f"ground_truth of {solution.data_source!r}: expected an answer, got {ground_truth!r}")
    answer = last_boxed(solution.answer)
    if not answer:
        return Score()
    if len(answer) > _MOST_CHARACTERS:
        return Score.of(False)
    if options.ignore_signs and bare(answer) == bare(gold):
        return Score.of(True)
    value = await verify("math_verify", {"gold": gold, "answer": answer}, options)
    return Score.of(value == 1.0)


def bare(text: str) -> str:
    """A text without what says nothing about its value: blanks, a dollar sign, degrees, percent, a full stop.

    ToRL's normaliser, like those of MATH and of Qwen2.5-Math, takes them off both sides: `5.`, `90°` and `10%` are 5,
    90 and 10. Math-Verify does so with some of them.
    """
    text = _NO_VALUE.sub("", text)
    return text.rstrip(".") or text
