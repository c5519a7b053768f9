"""Records of finished conversations as JSONL, one file for each worker process.

Invariant: no conversation fails because its record could not be written. A kill or a full disk may leave a torn line.
It harms no other record: the next record begins on a new line, and readers skip the torn line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.describe import show
from verl_multiturn.rollout.outcome import Outcome, SessionReport
from verl_multiturn.rollout.trajectory import Trajectory

_LOG = logging.getLogger(__name__)


def record_of(outcome: Outcome, receipts: Receipts | Sequence[Receipts], **extra: Any) -> dict[str, Any]:
    """Return the record of a conversation: all token columns, the messages, the calls and the engine's receipts.

    The token columns of a conversation with one row are entries of the record itself. Those of several rows are in the
    list `rows`, an object with the same entries for each row. `records.schema_1` reads both.

    Args:
        outcome: the finished conversation.
        receipts: receipts of what the engine returned; one for each row where there are several.
        extra: further entries, such as `step`, `uid` and `temperature`.

    Returns:
        A dictionary for `json_line`.
    """
    each = [receipts] if isinstance(receipts, Receipts) else receipts
    columns = [columns_of(row.trajectory, own) for row, own in zip(outcome.rows, each, strict=True)]
    return {
        "request_id": outcome.request_id,
        "stop_reason": str(outcome.stop_reason),
        "valid": outcome.valid,
        **extra,
        **({} if outcome.session is None else {"session": session_of(outcome, outcome.session)}),
        "messages": outcome.messages,
        "calls": [
            {
                "tool": call.tool,
                "status": str(call.status),
                "text": call.text,
                "reward": call.reward,
                "metrics": call.metrics,
                "altered": call.altered,
                "seconds": round(call.seconds, 6),
            }
            for call in outcome.calls
        ],
        "tool_rewards": outcome.calc_rewards,
        "replies": [
            {
                "turn": turn.number,
                "text": turn.reply.text,
                "reward": turn.reply.reward,
                "state": turn.reply.state,
                "metrics": turn.reply.metrics,
            }
            for turn in outcome.turns
            if turn.reply is not None
        ],
        "score": outcome.score,
        "differences": [str(difference) for difference in outcome.differences],
        "error": outcome.error,
        "generate_s": round(outcome.generate_s, 6),
        "tools_s": round(outcome.tools_s, 6),
        "interaction_s": round(outcome.interaction_s, 6),
        **(columns[0] if len(columns) == 1 else {"rows": columns}),
    }


def session_of(outcome: Outcome, session: SessionReport) -> dict[str, Any]:
    """Return the entry of a record that only the session of an agent has; `completions` are in the order of sampling.

    The texts of all rows are in their token columns; the record's `messages` are those of the last row.
    """
    return {
        "roots": session.roots,
        "unenforced": session.unenforced,
        "reward": session.reward,
        "stuck": session.stuck,
        "by_id": session.by_id,
        "completions": [
            {
                "parent": turn.parent,
                "place": turn.place,
                "reward": turn.reward,
                "text": None if turn.said is None else turn.said.content,
            }
            for turn in outcome.turns
        ],
    }


def columns_of(trajectory: Trajectory, receipts: Receipts) -> dict[str, Any]:
    """Return the entries of a record that belong to one row of a conversation."""
    return {
        "prompt_length": trajectory.prompt_length,
        "ids": trajectory.ids,
        "mask": trajectory.mask,
        "logprobs": trajectory.logprobs,
        "versions": trajectory.versions,
        "turn_ids": trajectory.turn_ids,
        "sources": [int(source) for source in trajectory.sources],
        "receipts": receipts.to_json(),
    }


class RecordWriter:
    """Writer that appends records to `<folder>/<host>-<process id>.jsonl`.

    Args:
        folder: folder of the records; it is created where it does not exist.

    Raises:
        OSError: the folder or the file cannot be created.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._path = path / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._path.open("ab").close()  # fail now, at the start of the run, when the path is wrong
        self._torn = _ends_within_a_line(self._path)
        self._lost = 0

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; an error is logged, and the record is lost."""
        try:
            line = json_line(record).encode()
            with self._path.open("ab", buffering=0) as file:
                line = b"\n" * self._torn + line
                self._torn = True
                while line:
                    line = line[file.write(line) :]
            self._torn = False
        except (OSError, TypeError, ValueError, RecursionError) as error:
            self._lost += 1
            if self._lost == 1:
                _LOG.warning("records of conversations are lost: %s: %s; the run goes on", self._path, show(error))
        else:
            if self._lost:
                _LOG.warning("records are written again; %d were lost: %s", self._lost, self._path)
            self._lost = 0


def json_line(record: dict[str, Any]) -> str:
    """Return a record as one line of JSON.

    JSON has no NaN and no infinity: they become the texts `nan`, `inf` and `-inf`. A key that is not text becomes text,
    and a value of a type that JSON does not have becomes its `repr`, shortened.
    """
    try:
        return json.dumps(record, default=show, allow_nan=False) + "\n"
    except (TypeError, ValueError):
        return json.dumps(_with_named_numbers(record), default=show, allow_nan=False) + "\n"


def _with_named_numbers(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key if isinstance(key, str) else show(key): _with_named_numbers(item) for key, item in value.items()}
    return [_with_named_numbers(item) for item in value] if isinstance(value, list | tuple) else value


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
