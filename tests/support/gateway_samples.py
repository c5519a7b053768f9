"""The folder of a gateway's records for tests: sessions of several users, with rewards in their own lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.sample_records import sample_run_file, sample_session
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.write.line_file import append_lines
from verl_multiturn.records.write.records import RecordWriter

START = "20261126T101500_5f3a00"
BEGAN = 1_790_000_000.0


class GatewaySamples:
    """Writes a folder as a gateway does.

    Args:
        folder: The folder; it is created.
        start: The gateway's start.
    """

    def __init__(self, folder: Path, start: str = START) -> None:
        self.folder, self.start = folder, start
        folder.mkdir(parents=True, exist_ok=True)
        run = sample_run_file() | {"start": start, "settings": {"gateway": {}}}
        (folder / f"run-{start}.json").write_text(json.dumps(run))
        self.rotate()

    def rotate(self) -> None:
        """Begin new files."""
        self.writer = RecordWriter(self.folder, self.start)
        self.file = self.folder / f"{self.writer.stem}.sessions.jsonl"
        self.file.touch()

    def write(self, event: str, session_id: str, **entries: Any) -> None:
        """Write a line about a session."""
        append_lines(self.file, line_of({"event": event, "at": BEGAN, "session_id": session_id, **entries}))

    def begin(self, session_id: str, user: str | None = "ann", task: str = "t", number: int = 0, at: float = 0) -> None:
        """Begin a session."""
        key = hashlib.sha256(session_id.encode()).hexdigest()
        self.write("start", session_id, task_id=task, user=user, number=number, key=key, at=BEGAN + at)
        self.writer.begin({**_line(session_id, task, number), "at": BEGAN + at})

    def end(
        self, session_id: str, user: str | None = "ann", task: str = "t", number: int = 0, **changes: Any
    ) -> Mapping[str, Any]:
        """End a session; return its record."""
        record = sample_session(request_id=session_id, uid=task, number=number, loop="gateway", step=0)
        record["session"] |= {"task": task, "user": user, "reward": None, "by_id": False, "rewards": {}}
        for number_of, each in enumerate(record["generations"]):
            each |= {"reward": None, "completion": f"{session_id}c{number_of}"}
        record |= changes
        self.writer.keep(partial(dict, record), {**_line(session_id, task, number), "at": BEGAN + 5})
        names = [each["completion"] for each in record["generations"]]
        self.write("end", session_id, completions=names, why="ended", at=BEGAN + 5)
        return record

    def close(self) -> None:
        """Write what is held."""
        self.writer.close()


def _line(session_id: str, task: str, number: int) -> dict[str, Any]:
    return {"request_id": session_id, "uid": task, "number": number, "validation": False, "step": 0}
