"""`is_trainer`: whether this process is that of a trainer, in which the run's driver runs."""

from __future__ import annotations

import sys


def is_trainer() -> bool:
    """Return whether this process runs one of verl's `main_*` trainers."""
    return any("verl.trainer.main_" in part or "verl/trainer/main_" in part for part in sys.orig_argv)
