"""The quickstart's reward: 1 when the assistant's last message gives the right number, by reasoning_gym's verifier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from task import extract_answer, score_answer  # verl loads this file by its path


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **kwargs: Any
) -> dict[str, float]:
    """verl's reward signature. `solution_str` has the tools' output in it, so the assistant's own words are scored."""
    texts = extra_info["assistant_texts"]
    answer = extract_answer(texts[-1]) if texts else None
    score = score_answer(answer, ground_truth)
    return {"score": score, "acc": score, "answered": float(answer is not None)}
