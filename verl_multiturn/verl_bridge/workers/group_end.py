"""`GroupEnd`: the end of a group, which a worker reports and the trainer's replay buffer reads."""

from __future__ import annotations

from typing import NamedTuple


class GroupEnd(NamedTuple):
    """The end of a group, in seconds of `time.time`."""

    conversation: float
    """End of its last conversation."""
    rows: float
    """Time at which the last of its rows was rewarded and in TransferQueue."""
    raised: int = 0
    """Number of its conversations that raised, because of a mistake of an author."""
    error: str = ""
    """What the first of them raised, and where; "": none has raised."""
    mistake: str = ""
    """Mistake of the reward function, for which the run ends; its siblings may still run. "": none."""
