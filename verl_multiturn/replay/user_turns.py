"""`note_user_turns`: the turns of a trained user in a replay. They are parts of the interaction's recorded answers.

With `--live` the interaction runs again, and asks the replay's engine for them itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.chat.parsing.turns import AssistantTurn
from verl_multiturn.config import USER
from verl_multiturn.records.rows import columns
from verl_multiturn.records.verify.record import receipts_of_generations
from verl_multiturn.rollout.engines.protocol import Generation
from verl_multiturn.rollout.trajectory import Source
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.rollout.user_rows import UserRows


def note_user_turns(rows: UserRows, record: Mapping[str, Any], numbers: Sequence[int]) -> None:
    """Note turns of the user as the record has them.

    Args:
        rows: Those of the replayed conversation.
        record: The record.
        numbers: Numbers of the generations.

    Raises:
        CertificateError: The tokens of the record cannot be read.
    """
    if not numbers:
        return
    receipts = receipts_of_generations(record)
    for number in numbers:
        raw, receipt = record["generations"][number], receipts[number]
        turn = Turn(number, parent=raw["parent"], role=USER, place=raw["cause"] or "invalid", finish=raw["finish"])
        if raw["text"] is not None:
            turn.said = AssistantTurn(raw["text"])
        made = Generation(
            receipt.ids.tolist(),
            receipt.logprobs.tolist(),
            receipt.versions.tolist(),
            raw["finish"],
            raw["cached_tokens"],
        )
        ids: Sequence[int] = ()
        template, text = 0, None
        if raw["row"] is not None:
            held = columns(record["rows"][raw["row"]])
            ids, text = held["ids"][: raw["start"]], raw["text"]
            if raw["parent"] is not None:
                before = record["generations"][raw["parent"]]
                template = held["sources"][before["start"] + before["tokens"] : raw["start"]].count(Source.TEMPLATE)
        rows.note_recorded(turn, receipt, made, ids, template, text)
