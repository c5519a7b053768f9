"""Measurements of `ask_first` on a conversation. The score comes from the user, by `interaction_reward`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from missing_number import asked_name, stated_answer  # verl loads this file by its path


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **kwargs: Any
) -> dict[str, float]:
    """Measure a conversation; the signature is the one that verl calls.

    Args:
        data_source: Name of the data set; not used.
        solution_str: The whole response as text; not used, because it contains the user's words, too.
        ground_truth: The right answer.
        extra_info: The row's fields, with the assistant's messages under `assistant_texts`.
        kwargs: Other arguments of verl; not used.

    Returns:
        `score`: 0.0, to which the user's rewards are added; `acc`: 1.0 for the right answer at the end; `asked`: 1.0 if
        the missing number was requested, or, where none is missing, anything at all; `answered`: 1.0 if there
        is an answer.
    """
    texts = extra_info["assistant_texts"]
    answer = stated_answer(texts[-1]) if texts else None
    names = [asked_name(text) for text in texts]
    missing = extra_info["missing"]
    asked = missing in names if missing else any(name is not None for name in names)
    return {
        "score": 0.0,
        "acc": float(answer == int(ground_truth)),
        "asked": float(asked),
        "answered": float(answer is not None),
    }
