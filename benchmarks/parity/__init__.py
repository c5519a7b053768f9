"""The cases of `benchmarks.reward_parity`: for each reward what ours says, beside the original's own code where it is
installed (verl's, Math-Verify's, reasoning_gym's), and elsewhere beside a reimplementation of its published rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.rewards import compute_score


@dataclass(frozen=True)
class Compared:
    """One case.

    Attributes:
        reward: its name in `docs/rewards.md`.
        case: what was scored, in short.
        ours, theirs: the two scores.
        stated: of a difference that `docs/rewards.md` states: the first cell of its row there; else empty.
    """

    reward: str
    case: str
    ours: float
    theirs: float
    stated: str = ""

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.theirs) < 1e-6


async def score(
    data_source: str,
    texts: Sequence[str],
    ground_truth: Any,
    calls: Sequence[Sequence[tuple[str, str]]] = (),
    **options: Any,
) -> float:
    """Our score of a conversation, as verl's reward worker asks for it. A verifier that failed or ran out of time is
    told apart from a wrong answer: it gives -9."""
    extra_info = {
        "assistant_texts": list(texts),
        "assistant_calls": [[{"name": name, "arguments": arguments} for name, arguments in turn] for turn in calls],
        "call_statuses": [],
    }
    found = await compute_score(data_source, "", ground_truth, extra_info, **options)
    return -9.0 if found["failed"] or found["timed_out"] else found["score"]
