"""Pick the parts for `verl-multiturn show` from the documents that the viewer serves: a terminal has less room.

    run             starts, a line for each step and validation, fates, faults
    step            the trainer's line of it, its groups, and why rows were not trained
    group           its conversations side by side
    conversation    its fate, its record and the trainer's results for its rows

Data that a folder lacks is null: records may be there without joins, and joins without records.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_multiturn.observe.documents.folder import RunDocuments
from verl_multiturn.records.read.records import Records

_OF_STEP = ("event", "step", "start", "began", "ended", "phases", "join", "rows", "conversations", "score", "groups",
            "equal_groups", "trained_tokens", "untrained", "evicted", "filtered", "failed", "discarded",
            "rerolled")  # fmt: skip


class ShowDocuments:
    """A run's folder, as `verl-multiturn show` reads it.

    Args:
        folder: The folder, or a single file of records.

    Raises:
        ConfigError: It does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._documents = RunDocuments(Records(folder))
        self._documents.index.refresh()

    def run(self) -> dict[str, Any]:
        """Return the parts to show of the whole run. A step of which neither a line nor a join exists is omitted."""
        found = self._documents.run()
        entries = [each for each in found["steps"] if each["start"] is not None or each["basis"] == "trained"]
        return {
            "kind": "run",
            "folders": [str(folder) for folder in self._documents.records.folders],
            "starts": found["starts"],
            "steps": [{name: entry[name] for name in _OF_STEP} for entry in entries],
            "evaluations": found["evaluations"],
            "fates": found["fates"],
            "open": found["open"],
            "has_trainer": found["has_trainer"],
            "faults": self._documents.faults(),
        }

    def step(self, step: int) -> dict[str, Any]:
        """Return the parts to show of a step, and of the validation after it.

        Raises:
            ConfigError: Nothing is known of the step.
        """
        return {"kind": "step", **self._documents.step(step), "faults": self._documents.faults()}

    def group(self, uid: str) -> dict[str, Any]:
        """Return the parts to show of a group; the beginning of its uid is enough.

        Raises:
            ConfigError: There is no such group, or several.
        """
        return {"kind": "group", **self._documents.group(uid), "faults": self._documents.faults()}

    def conversation(self, request_id: str) -> dict[str, Any]:
        """Return the parts to show of a conversation; the beginning of its request id is enough.

        Raises:
            ConfigError: There is no such conversation, or several.
        """
        found = self._documents.conversation(request_id)
        joined = [
            {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
            for row in found["joined"]
        ]
        return {"kind": "conversation", **found, "joined": joined, "faults": self._documents.faults()}


def summed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last line of `verl-multiturn show`: the parts shown, of how many conversations, and the faults."""
    kind = document["kind"]
    if kind == "run":
        conversations = sum(sum(counted.values()) for counted in document["fates"].values())
    elif kind == "step":
        conversations = sum(part["conversations"] for part in document["parts"])
    else:
        conversations = len(document["conversations"]) if kind == "group" else 1
    return {"kind": kind, "conversations": conversations, "faults": len(document["faults"])}
