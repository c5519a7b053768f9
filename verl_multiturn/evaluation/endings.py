"""What of an evaluation has ended, read from its folder of records: where a start goes on that a kill has ended.

Invariant: a conversation has ended when its record and its score are both on disk, and can be read. What a kill or a
damaged file took of either is requested again, and the half that stayed counts nowhere.
"""

from __future__ import annotations

from pathlib import Path

from verl_multiturn.evaluation.plan import SampleId
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import joined_rewards


def ended_in(records: Path) -> dict[SampleId, float]:
    """Return the score of each conversation that has ended, is valid and was judged.

    Args:
        records: The folder of records; it need not exist.
    """
    if not records.is_dir():
        return {}
    kept = recorded(records)
    return {
        SampleId(int(reward.uid), reward.number): reward.score
        for request_id, reward in joined_rewards(Records(records)).items()
        if request_id in kept and reward.score is not None and reward.uid.isdecimal()  # a stranger's may say anything
    }


def recorded(records: Path) -> set[str]:
    """Return the ids of the conversations whose records can be read."""
    return {record["request_id"] for record in Records(records).records()}
