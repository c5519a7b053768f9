r"""The reward for mathematics, which compares the last `\boxed{…}` with the ground truth.

`math_verify` (huggingface/Math-Verify) compares them. On request, they are first compared as texts without signs like
`°` and `%`.
"""

from __future__ import annotations

import re
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.answers import last_boxed
from verl_multiturn.rewards.score import Score, Solution
from verl_multiturn.rewards.verifiers import VerifierOptions, verify

_MOST_CHARACTERS = 1_000
"""Most characters of an answer; a longer one is wrong."""

_NO_VALUE = re.compile(r"\s|\\[ ,;!]|\\?\$|\\?%|°|\^\{?\s*(?:\\circ|\\degree)\s*\}?|\\degree(?![a-zA-Z])")

_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)
# A line break outside of a matrix puts two answers below each other, and "not equal" is the opposite of an answer.
_OTHER = re.compile(
    r"\\\\(?![a-zA-Z])|\\(?:cr|linebreak|newline|par|tabularnewline|lnot|neg?|neq|not)(?![a-zA-Z])|≠|¬|!="
)


class MathOptions(VerifierOptions):
    """Options of the reward `math`."""

    ignore_signs: bool = False
    """True: an answer is also right when it is the same text without certain signs.

    These are degrees, percent and dollar signs and a full stop, as in ToRL's normaliser: `5.`, `90°` and `10%` are 5,
    90 and 10. Math-Verify calls most of these different.
    """


async def reward(solution: Solution, ground_truth: Any, options: MathOptions) -> Score:
    r"""Score whether the last `\boxed{…}` is the same number, formula, set or text as the ground truth.

    Args:
        solution: The conversation; the box is in its answer.
        ground_truth: The right answer, in a box or without.
        options: Options of this reward.

    Raises:
        ConfigError: The ground truth is empty, or neither text nor a number; or the package is not installed.
        TimeoutError, WorkerError, TruthError, OutageError: See `verify`.
    """
    gold = str(ground_truth).strip() if isinstance(ground_truth, str | int | float) else ""
    gold = last_boxed(gold) or gold
    if not gold:
        raise ConfigError(
            f"ground_truth of {solution.data_source!r}: expected an answer, got {ground_truth!r}; mend the row"
        )
    answer = last_boxed(solution.answer)
    if not answer:
        return Score()
    if len(answer) > _MOST_CHARACTERS:
        return Score.of(False)
    if options.ignore_signs and bare(answer) == bare(gold):
        return Score.of(True)
    if is_other(answer) and not is_other(gold):
        return Score.of(False)
    value = await verify("math_verify", {"gold": gold, "answer": answer}, {"gold": gold, "answer": gold}, options)
    return Score.of(value == 1.0)


def is_other(text: str) -> bool:
    r"""Return whether a text gives several values, or denies one: `6 \\ 5`, `\ne 5`.

    Math-Verify reads the last number of such a text. A line break within a matrix or cases is none.
    """
    return _OTHER.search(_ENVIRONMENT.sub("", text)) is not None


def bare(text: str) -> str:
    """Return a text without blanks, dollar signs, degrees, percent signs and a final full stop.

    ToRL's normaliser, like those of MATH and of Qwen2.5-Math, removes them from answer and ground truth: `5.`, `90°`
    and `10%` become 5, 90 and 10. Math-Verify removes some of them. A text of such signs alone stays: it is the answer.
    """
    rest = _NO_VALUE.sub("", text)
    return rest.rstrip(".") or rest or text
