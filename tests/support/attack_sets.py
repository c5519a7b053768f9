"""`AttackSet`: further attacks on verdicts, with the tasks on which they are carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.workspace_attacks import Work


@dataclass(frozen=True)
class AttackSet:
    """Attacks with tasks of their own.

    Attributes:
        verdict: The kind of their tasks' verdicts.
        tasks: The tasks, as rows have them, by name; `check_task` finds their twins.
        honest: An honest repair of each task.
        attacks: The task of each attack, and a model's actions.
    """

    verdict: str
    tasks: Mapping[str, Mapping[str, Any]]
    honest: Mapping[str, Work]
    attacks: Mapping[str, tuple[str, Work]]
