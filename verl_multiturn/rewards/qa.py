"""The reward for questions with short answers: exact match or F1, normalised as in SQuAD (arXiv 1606.05250).

The answer is the text in `<answer>…</answer>`, as in Search-R1 (arXiv 2503.09516), whose reward is the exact match.

Two things differ from SQuAD, since a model could earn by them: the letter A is not an article where a letter or nothing
follows it, so that `A, B` is not `B`; and an answer without words is the same only as itself.
"""

from __future__ import annotations

import contextlib
import json
import re
import string
from collections import Counter
from typing import Any, Literal

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.answers import has_one
from verl_multiturn.rewards.score import RewardOptions, Score, Solution

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:an|the)\b")
# Before a word of two characters ("dog", "U.S.", "T-shirt"), or a number. The letter in "A, B", "Hepatitis A" and
# "U.S.A." is not an article.
_ARTICLE_A = re.compile(r"""(?<![^\s"'(])a(?=[.):]?\s+[^\w\s]*(?:\w[-.'’&]*\w|\d))""")
_MOST_CHARACTERS = 10_000
_MOST_TAGS = 10
"""Most opening, or closing, tags of answers in a text. A text with more gets a quarter of its score, as in verl's
version of Search-R1's reward."""


class QaOptions(RewardOptions):
    """Options of the reward `qa`."""

    metric: Literal["em", "f1"] = "em"
    """Metric that gives the score: exact match, or F1 of the words. `acc` is always the exact match."""


async def reward(solution: Solution, ground_truth: Any, options: QaOptions) -> Score:
    """Score an answer by the gold answer that it fits best.

    Args:
        solution: The conversation; the answer may be in any of its turns.
        ground_truth: A gold answer, a list of gold answers, or Search-R1's `{"target": …}` of either. The list and the
            target may be JSON text.
        options: Options of this reward.

    Raises:
        ConfigError: The ground truth has another form.
    """
    golds = _gold_answers(ground_truth, solution.data_source)
    formatted = has_one(solution.answer, "answer")
    said = "\n".join(solution.texts)
    answer = _last_answer(said)
    if not answer:
        return Score(format=float(formatted))
    if len(answer) > _MOST_CHARACTERS:
        return Score.of(False, formatted)
    right = any(same(answer, gold) for gold in golds)
    value = float(right) if options.metric == "em" else max(f1(answer, gold) for gold in golds)
    if max(said.count("<answer>"), said.count("</answer>")) > _MOST_TAGS:
        value /= 4
    return Score(value, float(right), float(formatted), answered=1.0)


def _last_answer(text: str) -> str | None:
    """Return the text in the last `<answer>…</answer>`, as Search-R1 reads it.

    It may be in any turn, within reasoning or after it. It begins at the first `<answer>` after the previous
    `</answer>`.
    """
    found, position = None, 0
    while (start := text.find("<answer>", position)) >= 0:
        end = text.find("</answer>", start)
        if end < 0:
            break
        found, position = text[start + len("<answer>") : end].strip(), end + len("</answer>")
    return found


def normalize(text: str) -> str:
    """Normalise a text as SQuAD does: lower case, no punctuation, no articles, single spaces; but letters stay."""
    words = _ARTICLE_A.sub(" ", text.lower()).translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split())


def same(answer: str, gold: str) -> bool:
    """Return whether two texts are the same, normalised; where nothing remains of the gold answer, as they are."""
    wanted = normalize(gold)
    return normalize(answer) == wanted if wanted else _as_it_stands(answer) == _as_it_stands(gold)


def f1(answer: str, gold: str) -> float:
    """Return F1, the harmonic mean of precision and recall of the normalised words.

    When one of the texts has no words, F1 is 1 if the other is the same text, else 0.
    """
    said, wanted = normalize(answer).split(), normalize(gold).split()
    if not said or not wanted:
        return float(same(answer, gold))
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


def _as_it_stands(text: str) -> str:
    return " ".join(text.lower().split())


def _gold_answers(ground_truth: Any, data_source: str) -> list[str]:
    if isinstance(ground_truth, str) and ground_truth.startswith(("[", "{")):
        with contextlib.suppress(ValueError):  # a text that is not JSON is an answer itself
            ground_truth = json.loads(ground_truth)
    golds = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    golds = [golds] if isinstance(golds, str) else golds
    if not isinstance(golds, list) or not golds or not all(isinstance(gold, str) for gold in golds):
        raise ConfigError(
            f"ground_truth of {data_source!r}: expected an answer or a list of them, or {{'target': …}} of either, "
            f"got {ground_truth!r}; mend the row"
        )
    return golds
