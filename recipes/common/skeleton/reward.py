"""The reward: 1 if the last message of the assistant ends in the right number."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **kwargs: Any
) -> dict[str, float]:
    """Score a conversation; the signature is the one that verl calls.

    Args:
        data_source: Name of the data set; not used.
        solution_str: The whole response, with the answers of tools in it; not used.
        ground_truth: The right answer.
        extra_info: The row's fields, with the assistant's messages under `assistant_texts`, and a list of calls for
            each of its turns under `assistant_calls`.
        kwargs: Other arguments of verl; not used.

    Returns:
        `score`, from which the model learns. The other keys become metrics.
    """
    texts = extra_info["assistant_texts"]
    found = re.search(r"Answer: (-?\d+)\s*$", texts[-1] if texts else "")
    right = float(found is not None and found[1] == ground_truth)
    return {"score": right, "acc": right, "answered": float(found is not None)}
