"""Records that go through the disk: written as a run writes them, and read as its readers do."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.records.read.records import Records
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.rollout.life import Life

START = "20261126T101500-5f3a"


def from_disk(life: Life) -> dict[str, Any]:
    """Return the record of a conversation that was written and is read."""
    with tempfile.TemporaryDirectory() as folder:
        keep(Path(folder), {life.id: life})
        records = Records(folder)
        (record,) = records.records()
        assert records.faults == []
    return record


def keep(folder: Path, conversations: Mapping[str, Life], start: str = START) -> None:
    """Write the records of conversations, by their request ids, into a folder."""
    writer = RecordWriter(folder, start)
    for request_id, life in conversations.items():
        line = {"request_id": request_id, "uid": life.group, "number": life.number, "step": life.step, "at": 1.0}
        writer.begin(line)
        writer.keep(lambda life=life: record_of(life), line)  # type: ignore[misc]
    writer.close()
