"""The ended conversations of an evaluation, read from its folder of records: the next start after a kill goes on there.

Invariant: a conversation has ended when its record and its score are both on disk, and can be read. If a kill or a
damaged file took either, the conversation is requested again, and the remaining half is not counted.
"""

from __future__ import annotations

from pathlib import Path

from verl_multiturn.evaluation.plan import SampleId
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import joined_rewards


def ended_in(records: Path) -> dict[SampleId, float]:
    """Return the score of each conversation that has ended, is valid and was scored.

    Args:
        records: The folder of records; it need not exist.
    """
    if not records.is_dir():
        return {}
    kept = recorded(records)
    return {
        SampleId(int(reward.uid), reward.number): reward.score
        for request_id, reward in joined_rewards(Records(records)).items()
        if request_id in kept and reward.score is not None and reward.uid.isdecimal()  # a stranger's may have any value
    }


def recorded(records: Path) -> set[str]:
    """Return the ids of the conversations whose records can be read."""
    return {record["request_id"] for record in Records(records).records()}
