"""Contradictions in a run's folder whose files can all be read: a sentence each, the same for all readers.

A conversation whose end is there and whose begin is not counts; lines were lost, or somebody wrote some. Of two ends at
one place at most one has a record. Where a line and the trainer's join have two scores, the join's counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

_CLOSE = 1e-4
"""Relative difference of two scores; the trainer holds them as float32 for each token."""


def are_close(score: float, other: float) -> bool:
    """Return whether the score of a line and the one of a join may be the same."""
    return math.isclose(score, other, rel_tol=_CLOSE, abs_tol=_CLOSE)


def unbegun_fault(path: Path, request_ids: Sequence[str]) -> str:
    """Return the sentence about ends of conversations that never began.

    Args:
        path: The file of lines.
        request_ids: Their request ids.
    """
    return f"{path}: {len(request_ids)} ends have no begin, that of request {request_ids[0]!r} first; they count"


def place_fault(path: Path, request_ids: Sequence[str]) -> str:
    """Return the sentence about ends whose record is, by another line, that of another conversation.

    Args:
        path: The file of lines.
        request_ids: Their request ids.
    """
    what = "ends name a record that another line names, too"
    return f"{path}: {len(request_ids)} {what}, that of request {request_ids[0]!r} first; they count"


def score_fault(folder: Path, request_ids: Sequence[str]) -> str:
    """Return the sentence about scores that a line and a join have differently.

    Args:
        folder: The folder of records.
        request_ids: Their request ids.
    """
    many = f"{len(request_ids)} conversations have" if len(request_ids) > 1 else "a conversation has"
    what = "another score in their lines than in the trainer's joins"
    return f"{folder}: {many} {what}, that of request {request_ids[0]!r} first; the joins' scores are taken"
