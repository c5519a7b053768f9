"""Records that go through the disk: written as a run writes them, and read as its readers do."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.records.encode import Ended, record_of
from verl_multiturn.records.reader import Records
from verl_multiturn.records.writer import RecordWriter

START = "20261126T101500-5f3a"


def from_disk(ended: Ended) -> dict[str, Any]:
    """Return the record of a conversation that was written and is read."""
    with tempfile.TemporaryDirectory() as folder:
        keep(Path(folder), {ended.outcome.request_id: ended})
        records = Records(folder)
        (record,) = records.records()
        assert records.faults == []
    return record


def keep(folder: Path, conversations: Mapping[str, Ended], start: str = START) -> None:
    """Write the records of conversations, by their request ids, into a folder."""
    writer = RecordWriter(folder, start)
    for request_id, ended in conversations.items():
        line = {"request_id": request_id, "uid": ended.uid, "number": ended.number, "step": ended.step, "at": 1.0}
        writer.begin(line)
        writer.keep(lambda ended=ended: record_of(ended), line)  # type: ignore[misc]
    writer.close()
