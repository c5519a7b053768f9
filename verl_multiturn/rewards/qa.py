"""Questions with short answers: exact match and F1, normalised as in SQuAD (arXiv 1606.05250).

The answer stands in `<answer>…</answer>`, as in Search-R1 (arXiv 2503.09516), whose reward is the exact match.
"""

from __future__ import annotations

import contextlib
import json
import re
import string
from collections import Counter
from typing import Any, Literal

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.formats import has_one
from verl_multiturn.rewards.score import RewardOptions, Score, Solution

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MOST_CHARACTERS = 10_000
_MOST_TAGS = 10
"""A text with more of them is worth a quarter, as in verl's version of Search-R1's reward."""


class QaOptions(RewardOptions):
    metric: Literal["em", "f1"] = "em"
    """What the score is: exact match, or F1 of the words. `acc` is the exact match in any case."""


async def reward(solution: Solution, ground_truth: Any, options: QaOptions) -> Score:
    """The best over the gold answers.

    Args:
        ground_truth: an answer, a list of answers, or Search-R1's `{"target": …}` of either; JSON text of the last two.

    Raises:
        ConfigError: it is none of these.
    """
    golds = _gold_answers(ground_truth, solution.data_source)
    formatted = has_one(solution.answer, "answer")
    said = "\n".join(solution.texts)
    answer = _last_answer(said)
    if not answer:
        return Score(format=float(formatted))
    if len(answer) > _MOST_CHARACTERS:
        return Score.of(False, formatted)
    right = any(normalize(answer) == normalize(gold) for gold in golds)
    value = float(right) if options.metric == "em" else max(f1(answer, gold) for gold in golds)
    if max(said.count("<answer>"), said.count("</answer>")) > _MOST_TAGS:
        value /= 4
    return Score(value, float(right), float(formatted), answered=1.0)


def _last_answer(text: str) -> str | None:
    """The last `<answer>…</answer>` as Search-R1 reads it: in whatever turn, in a thought or after it, and from the
    first `<answer>` that nothing has closed yet."""
    found, position = None, 0
    while (start := text.find("<answer>", position)) >= 0:
        end = text.find("</answer>", start)
        if end < 0:
            break
        found, position = text[start + len("<answer>") : end].strip(), end + len("</answer>")
    return found


def normalize(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, gold: str) -> float:
    """The harmonic mean of precision and recall of the normalised words; of no words at all, whether both have none."""
    said, wanted = normalize(answer).split(), normalize(gold).split()
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


def _gold_answers(ground_truth: Any, data_source: str) -> list[str]:
    if isinstance(ground_truth, str) and ground_truth.startswith(("[", "{")):
        with contextlib.suppress(ValueError):  # then it is an answer
            ground_truth = json.loads(ground_truth)
    golds = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    golds = [golds] if isinstance(golds, str) else golds
    if not isinstance(golds, list) or not golds or not all(isinstance(gold, str) for gold in golds):
        raise ConfigError(
            f"ground_truth of {data_source!r}: expected an answer or a list of them, or {{'target': …}} of either, "
            f"got {ground_truth!r}"
        )
    return golds
