"""Comparison of a gateway's records with its sessions' lines, which were written before clients were answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.certificate.check import Violation
from verl_multiturn.describe import show
from verl_multiturn.records.read.files import SESSIONS
from verl_multiturn.records.read.sessions import LiveSession, SessionIndex


class SessionCheck:
    """The sessions' lines of a folder of records.

    Args:
        folder: The folder; of a single file nothing is known, since its rewards may lie in other files.
    """

    def __init__(self, folder: Path) -> None:
        self._index = SessionIndex(*([folder] if folder.is_dir() else []))
        self._index.refresh()
        self._folder = folder
        self._seen: set[str] = set()

    @property
    def faults(self) -> list[str]:
        """Return the lines that cannot be read: a sentence each."""
        return list(self._index.faults)

    @property
    def torn(self) -> list[Path]:
        """Return the files whose last line was not written to its end."""
        return [path for path in self._index.files if self._index.read_to(path) < path.stat().st_size]

    def violations(self, record: Mapping[str, Any]) -> list[Violation]:
        """Return how a record differs from the lines of its session; [] where no gateway wrote it.

        Args:
            record: The record, in the form of its schema.
        """
        name, own = record["request_id"], record["session"]
        self._seen.add(name)
        session = self._index.sessions.get(name)
        if own is None or own["task"] is None or not self._index.files:
            return []
        if session is None or not session.file:
            return [Violation(name, None, None, f"no line of a *{SESSIONS} says that its session began")]
        return [Violation(name, None, None, what) for what in _differences(record, session)]

    def alone(self) -> Iterator[tuple[str, str]]:
        """Yield the ids of sessions that lack something, and what; called when all records were seen."""
        for name, session in self._index.sessions.items():
            if not session.file:
                yield name, "it has lines, and none says that it began"
            elif session.ended is not None and not session.is_dropped and name not in self._seen:
                yield name, "by its line it ended, and there is no record of it"


def _differences(record: Mapping[str, Any], session: LiveSession) -> Iterator[str]:
    own, many = record["session"], len(record["generations"])
    said = (("task", session.task), ("user", session.user))
    for what, mine, line in (
        *((name, own[name], value) for name, value in said),
        ("uid", record["uid"], session.task),
        ("number", record["number"], session.number),
    ):
        if mine != line:
            yield f"its {what} is {show(mine, 60)}, by the line of its session's start {show(line, 60)}"
    completions = [each["completion"] or "" for each in record["generations"]]
    if session.ended is not None and session.completions != completions:
        yield (
            f"its completions are {show(completions, 100)}, by the line of its session's end "
            f"{show(session.completions, 100)}"
        )
    rewarded = [line.generation for line in session.rewards if line.generation is not None]
    if rewarded and max(rewarded) >= many:
        yield f"a line rewards generation {max(rewarded)}; it has {many}"
