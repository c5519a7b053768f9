"""Records of schema 1, as this package wrote them until 0.1, for tests of what reads and verifies them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.rollout.outcome import Outcome, SessionReport
from verl_multiturn.rollout.trajectory import Trajectory


def record_of(outcome: Outcome, receipts: Receipts | Sequence[Receipts], **extra: Any) -> dict[str, Any]:
    """Return the record of a conversation: all token columns, the messages, the calls and the engine's receipts.

    The token columns of a conversation with one row are entries of the record itself. Those of several rows are in the
    list `rows`, an object with the same entries for each row. `records.schema_1` reads both.

    Args:
        outcome: The finished conversation.
        receipts: Receipts of what the engine returned; one for each row where there are several.
        extra: Further entries, such as `step`, `uid` and `temperature`.

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


def json_line(record: dict[str, Any]) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(record, allow_nan=False) + "\n"
