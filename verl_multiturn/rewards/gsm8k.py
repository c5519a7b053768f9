"""The reward for grade-school mathematics, as in GSM8K (arXiv 2110.14168): a number after `####`, as in `#### 42`."""

from __future__ import annotations

import re
from typing import Any, Literal

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.score import RewardOptions, Score, Solution
from verl_multiturn.tools.gsm8k import first_number, parse_answer

# A number may have a sign, a dollar sign, separators, a percent sign and a full stop around its digits.
_NUMBER = re.compile("[-$\N{MINUS SIGN}]*[0-9.,]+%?[.]?")
# One of them alone: `41.,42` and `1.1,42` are two.
_ONE_NUMBER = re.compile(r"[-$\N{MINUS SIGN}]*(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)%?[.,]?")


class Gsm8kOptions(RewardOptions):
    """Options of the reward `gsm8k`."""

    method: Literal["strict", "flexible"] = "strict"
    """Number that counts. strict: the number right after the last `####`. flexible: the last number of the answer, or
    of the text after the last `####` if there is one; there the first number must be the same."""


async def reward(solution: Solution, ground_truth: Any, options: Gsm8kOptions) -> Score:
    """Compare the answer's number with the ground truth's by value: 42, 42.0 and $42 are the same.

    Args:
        solution: The conversation; the number is in its answer.
        ground_truth: A number, or a text that ends with one.
        options: Options of this reward.

    Raises:
        ConfigError: The ground truth has no number.
    """
    gold = parse_answer(str(ground_truth))
    if gold is None:
        raise ConfigError(
            f"ground_truth of {solution.data_source!r}: expected a number, got {ground_truth!r}; mend the row"
        )
    _, marked, after = solution.answer.rpartition("####")
    words = after.split(maxsplit=1)
    stated = bool(marked and words and _NUMBER.fullmatch(words[0]))
    text = solution.answer if options.method == "flexible" else words[0] if stated else ""
    answer = parse_answer(text)
    if options.method == "flexible":
        is_one = not marked or first_number(after) == answer  # `#### 6 5` are two answers
    else:
        is_one = _ONE_NUMBER.fullmatch(text) is not None
    if first_number(text) is None:
        return Score(format=float(stated))
    return Score.of(is_one and answer == gold, stated)
