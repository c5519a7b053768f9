"""`join_sessions`: the join of a gateway's sessions, so that readers of joins need nothing of their own.

The reward lines stay the truth (`read.sessions`): a reward that comes after the join was written counts all the same.
A gateway has no trainer: the join has the step 0, `join/step-000000-<start>.parquet`, and is written anew as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.records.read import joins
from verl_multiturn.records.read.fates import start_of
from verl_multiturn.records.read.joins import JoinedRow
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.sessions import LiveSession

COLLECTED = "collected"
"""The cause `untrained` of each row (`schema.UNTRAINED`)."""


def join_sessions(folder: Path, start: str) -> int:
    """Write the join of a start's sessions that have a record and whose files nobody writes any more.

    A gateway calls it in a thread after it has begun new files.

    Args:
        folder: Folder of the records.
        start: The gateway's start, `RunFile.start`.

    Returns:
        The number of its rows; 0: none was written.

    Raises:
        OSError: It cannot be written. The old one stays.
    """
    records = Records(folder)
    sessions, held = records.sessions(), records.held()
    rows: list[JoinedRow] = []
    for file in records.files:
        if start_of(file.stem, [start]) != start or file.stem in held or not file.is_packed:
            continue
        for placed in records.placed(file):
            session = sessions.get(placed.record["request_id"])
            if session is not None:
                rows += _rows(placed.record, session)
    if rows:
        joins.write(folder, joins.name_of(False, 0, start), joins.table_of(rows))
    return len(rows)


def _rows(record: Mapping[str, Any], session: LiveSession) -> Iterator[JoinedRow]:
    """Yield the rows of a session: a generation's reward is in the row that holds it, the rest in the last one."""
    earned, last = session.earned, len(record["rows"]) - 1
    scores = None
    if earned is not None:
        scores = [0.0] * len(record["rows"])
        scores[last] += earned.whole
        for number, reward in earned.generations.items():
            held = number < len(record["generations"]) and record["generations"][number]["row"]
            scores[held if isinstance(held, int) and not isinstance(held, bool) else last] += reward
    roles = {each["row"]: each["role"] for each in record["generations"]}
    for number in range(len(record["rows"])):
        yield JoinedRow(
            record["request_id"],
            record["uid"],
            record["number"],
            number,
            False,
            0,
            role=roles.get(number),
            score=None if scores is None else scores[number],
            parts=None if earned is None or number != last else earned.parts_text,
            untrained=COLLECTED,
        )
