"""The reward for tasks of reasoning_gym (arXiv 2505.24760), given by each data set's own verifier."""

from __future__ import annotations

import json
import re
from typing import Any

from verl_multiturn.chat.model_text import last_tag
from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.score import Score, Solution
from verl_multiturn.rewards.verifiers import VerifierOptions, verify

_PREFIX = "reasoning_gym/"
_MARK = "answer:"
_MOST_CHARACTERS = 20_000
"""Most characters of an answer; a longer one is wrong."""

_READS_A_PART = frozenset(
    {
        "gsm_symbolic", "intermediate_integration", "kakurasu", "knights_knaves", "polynomial_multiplication",
        "quantum_lock", "simple_integration", "sokoban", "survo",
    }
)  # fmt: skip
"""Data sets whose verifier passes over the words around an answer, so that `not X` and `X or Y` would be X."""
_OTHERWISE = re.compile(
    r"\b(?:not|no|never|neither|nor|none|wrong|false|incorrect|untrue|minus|negative|or|either)\b|n['’]t\b",
    re.IGNORECASE,
)
"""Words that make another answer of the one beside them."""
_NEGATIVE = re.compile(r"[^\d]*-\s*\$?\s*\d")


class GymOptions(VerifierOptions):
    """Options of the reward `reasoning_gym`."""

    partial_credit: bool = False
    """True: an answer that is not right scores the verifier's number. False: it scores 0."""


async def reward(solution: Solution, ground_truth: Any, options: GymOptions) -> Score:
    """Score an answer with the verifier of its data set.

    The answer is the text in the last `<answer>…</answer>`, else the text after the last `Answer:`. The data set is the
    one that the entry names, else the NAME in the `data_source` `reasoning_gym/NAME`.

    Args:
        solution: The conversation.
        ground_truth: An entry of the data set, `{"answer": …, "metadata": …}`, or JSON text of it. Any other text is
            the right answer, for data sets whose verifier needs no more.
        options: Options of this reward.

    Raises:
        ConfigError: The ground truth has no answer, or there is no such data set or package.
        TimeoutError, WorkerError, TruthError, OutageError: See `verify`.
    """
    entry = _entry(ground_truth)
    metadata = entry.setdefault("metadata", {})
    dataset = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    dataset = dataset or solution.data_source.removeprefix(_PREFIX)
    if "answer" not in entry:
        raise ConfigError(
            f"ground_truth of {solution.data_source!r}: expected an 'answer', got {ground_truth!r}; mend the row"
        )
    answer = _answer(solution.answer)
    if not answer:
        return Score()
    if len(answer) > _MOST_CHARACTERS:
        return Score.of(False)
    if not _can_be_right(dataset, answer, entry["answer"]):
        return Score.of(False)
    request = {"dataset": dataset, "entry": entry, "answer": answer}
    gold = entry["answer"]  # some data sets have none, since many answers are right
    control = {**request, "answer": gold} if isinstance(gold, str) and gold else None
    value = await verify("reasoning_gym", request, control, options)
    right = value >= 1.0
    return Score(value if options.partial_credit else float(right), float(right), format=1.0, answered=1.0)


def _can_be_right(dataset: str, answer: str, gold: Any) -> bool:
    """Return whether an answer may be right at all, where a data set's own verifier would take it for another one."""
    if dataset == "game_of_life_halting":  # it asks for Python's `bool` of two texts, which is true of any
        return answer.strip(" .`*'\"").lower() == str(gold).strip().lower()
    if dataset not in _READS_A_PART:
        return True
    if dataset == "gsm_symbolic" and _NEGATIVE.match(answer.replace("\N{MINUS SIGN}", "-")):
        return str(gold).startswith("-")  # it does not read the sign
    return _OTHERWISE.search(answer) is None or _OTHERWISE.search(str(gold)) is not None


def _answer(text: str) -> str | None:
    tagged = last_tag(text, "answer")
    if tagged is not None:
        return tagged
    at = text.lower().rfind(_MARK)
    return None if at < 0 else text[at + len(_MARK) :].strip()


def _entry(ground_truth: Any) -> dict[str, Any]:
    if isinstance(ground_truth, dict):
        return dict(ground_truth)
    text = str(ground_truth)
    try:
        entry = json.loads(text)
    except ValueError:
        entry = None
    return entry if isinstance(entry, dict) else {"answer": text}
