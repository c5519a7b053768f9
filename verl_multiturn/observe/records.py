"""Finished conversations as JSONL, one file per worker process."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.rollout.conversation import Outcome
from verl_multiturn.rollout.receipts import Receipts


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
    """Appends records to `<folder>/<host>-<process id>.jsonl`; each line is written whole and flushed."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / f"{socket.gethostname()}-{os.getpid()}.jsonl").open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, default=show) + "\n")
        self._file.flush()
