"""The quickstart's reward: 1 if the assistant's last message gives the right number, by reasoning_gym's verifier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from task import extract_answer, score_answer  # verl loads this file by its path


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **kwargs: Any
) -> dict[str, float]:
    """Score a conversation; the signature is the one that verl calls.

    `solution_str` is not used, because it contains the tools' output, too. The last of the assistant's own messages is
    scored instead.

    Args:
        data_source: Name of the data set; not used.
        solution_str: The whole response as text; not used.
        ground_truth: The right answer.
        extra_info: The row's fields, with the assistant's messages under `assistant_texts`.
        kwargs: Other arguments of verl; not used.

    Returns:
        `score` and `acc`, both 1.0 or 0.0, and `answered`: 1.0 if the message gives any answer.
    """
    texts = extra_info["assistant_texts"]
    answer = extract_answer(texts[-1]) if texts else None
    score = score_answer(answer, ground_truth)
    return {"score": score, "acc": score, "answered": float(answer is not None)}
