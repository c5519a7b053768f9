"""Finished conversations as JSONL, one file per worker process.

Invariant: no conversation fails because its record could not be written. A line that was torn, by a kill or a full
disk, stays alone: the next record begins on a line of its own, and readers go on past the torn one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.rollout.conversation import Outcome
from verl_multiturn.rollout.receipts import Receipts

_LOG = logging.getLogger(__name__)


def record_of(outcome: Outcome, receipts: Receipts, **extra: Any) -> dict[str, Any]:
    """A JSON-ready record of a conversation: every token column, the messages, the calls, and what the engine said."""
    trajectory = outcome.trajectory
    return {
        "request_id": outcome.request_id,
        "stop_reason": str(outcome.stop_reason),
        "valid": outcome.valid,
        **extra,
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
        "tool_rewards": outcome.tool_rewards,
        "differences": [str(difference) for difference in outcome.differences],
        "error": outcome.error,
        "generate_s": round(outcome.generate_s, 6),
        "tools_s": round(outcome.tools_s, 6),
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
    """Appends records to `<folder>/<host>-<process id>.jsonl`; each line is written whole."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._path = path / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._path.open("ab").close()  # now, while it is a mistake of the settings
        self._torn = _ends_within_a_line(self._path)
        self._lost = 0

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; what keeps it from being written is logged."""
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
    """Return a record as one line of JSON; NaN becomes its name, a key that is no text its `repr`."""
    try:
        return json.dumps(record, default=show, allow_nan=False) + "\n"
    except (TypeError, ValueError):
        return json.dumps(_with_named_numbers(record), default=show, allow_nan=False) + "\n"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Return the records of a file one by one; a torn line is logged and left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            record = parse_line(line)
            if record is None:
                _LOG.warning("%s:%d: a torn line is left out", path, number)
            else:
                yield record


def parse_line(line: str) -> Any:
    """Return what a line of JSON holds; None for one that was not written to its end."""
    try:
        return json.loads(line)
    except ValueError:
        return None


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
