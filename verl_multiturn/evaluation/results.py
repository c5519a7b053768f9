"""`read_results`: what an `eval` left in its folder, as typed results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Results:
    """What an evaluation's folder holds."""


def read_results(folder: Path) -> Results:
    """Return what an evaluation left in its folder."""
    raise NotImplementedError
