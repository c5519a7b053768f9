"""The quickstart's reward minus 0.1 for each call, as where searches cost: for `benchmarks.outage`.

verl loads this file by its path, in the reward workers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart"))

from task import extract_answer, score_answer  # the recipe's own module, found by the line above

COST = 0.1
"""Cost of a call."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **kwargs: Any
) -> dict[str, float]:
    """Score a conversation of our loop, or of verl's, which hands over the decoded response alone.

    Args:
        data_source: Name of the data set; not used.
        solution_str: The whole response as text.
        ground_truth: The right answer.
        extra_info: The row's fields, with those that our loop adds.
        kwargs: Other arguments of verl; not used.
    """
    texts = extra_info.get("assistant_texts")
    if texts is None:
        last, calls = solution_str.rpartition("assistant\n")[2], solution_str.count("<tool_call>")
    else:
        last, calls = (texts[-1] if texts else ""), sum(len(turn) for turn in extra_info["assistant_calls"])
    answer = extract_answer(last)
    right = score_answer(answer, ground_truth)
    return {"score": right - COST * calls, "acc": right, "called": float(calls > 0)}
