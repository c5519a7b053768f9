"""The one place that writes token ids, loss mask, log-probabilities, weight versions, turn ids and sources.

Invariants, enforced where a token is written:
- the six columns always have one length;
- a token is trainable exactly when the engine returned it for this request, and its log-probability and weight version
  came with it; sampled ids are stored as they came, never decoded and encoded again;
- a trajectory is append-only, and sealed at the end: a sealed trajectory refuses every append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from verl_multiturn.errors import TrajectoryError
from verl_multiturn.rollout.limits import StopReason

NO_VERSION = -1
"""The weight version of a token that was not sampled, or whose version is not known."""


class Source(IntEnum):
    """The origin of a token. Only `SAMPLED` tokens are trained."""

    PROMPT = 0
    SAMPLED = 1
    TEMPLATE = 2
    """Written by the chat template between a turn and the next message."""
    OBSERVATION = 3
    """Response of a tool or a user, with the template's text around it."""
    INJECTED = 4
    """An observation in the loop's own words: no call of the turn was executed."""
    EARLIER = 5
    """Sampled for this request, and trained in another row or not at all; here it is context."""


@dataclass
class Trajectory:
    """A token-level record of one conversation. All columns are aligned and have the length `len(self)`.

    `turn_ids` counts assistant turns from 0. A context token has the number of the turn that follows it, so the prompt
    has 0.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 for a token that is trained, 0 for any other."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each sampled token; 0.0 for any other."""
    versions: list[int] = field(default_factory=list)
    """Training step of the weights that sampled each token; `NO_VERSION` for any other."""
    turn_ids: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    prompt_length: int = 0
    """Tokens of the prompt."""
    turns: int = 0
    """Assistant turns so far."""
    stop_reason: StopReason | None = None
    """Reason why the conversation ended; None until the trajectory is sealed."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def response_length(self) -> int:
        """Return the number of tokens after the prompt, sampled or not."""
        return len(self.ids) - self.prompt_length

    def append_prompt(self, ids: Sequence[int]) -> None:
        """Write the first prompt.

        Raises:
            TrajectoryError: Something was written before, or `ids` is empty.
        """
        if self.ids:
            raise TrajectoryError(f"the prompt must come first and once; {len(self.ids)} tokens are already written")
        if not ids:
            raise TrajectoryError("the prompt has no token; check the chat template and the messages")
        self._append(ids, trained=0, logprobs=[0.0] * len(ids), versions=[NO_VERSION] * len(ids), source=Source.PROMPT)
        self.prompt_length = len(ids)

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Write the tokens that the engine returned for one assistant turn, and close the turn.

        Args:
            ids: Sampled token ids, `(tokens,)`.
            logprobs: Log-probability of each token, finite and at most 0 as float32.
            versions: Weight version of each token.

        Raises:
            TrajectoryError: There is no prompt yet, the trajectory is sealed, or the tokens have a `flaw`.
        """
        if not self.ids:
            raise TrajectoryError("sampled tokens need a prompt before them")
        if found := flaw(ids, logprobs, versions):
            raise TrajectoryError(found)
        self._append(ids, trained=1, logprobs=logprobs, versions=versions, source=Source.SAMPLED)
        self.turns += 1

    def append_context(self, ids: Sequence[int], source: Source) -> None:
        """Write tokens that are not trained.

        They are a separator of the template, an observation, the loop's own words, or a turn that another row trains.

        Raises:
            TrajectoryError: There is no assistant turn yet, of this row or an earlier one; the trajectory is sealed; or
                `source` is `PROMPT` or `SAMPLED`.
        """
        if source in (Source.PROMPT, Source.SAMPLED):
            raise TrajectoryError(f"context tokens are template, observation, injected or earlier, not {source!r}")
        if not self.ids or (len(self.ids) == self.prompt_length and source is not Source.EARLIER):
            raise TrajectoryError("context tokens need an assistant turn before them; put them into the prompt")
        self._append(ids, trained=0, logprobs=[0.0] * len(ids), versions=[NO_VERSION] * len(ids), source=source)

    def seal(self, stop_reason: StopReason) -> None:
        """End the trajectory. From now on it can only be read.

        Raises:
            TrajectoryError: The trajectory is already sealed.
        """
        if self.stop_reason is not None:
            raise TrajectoryError(f"already sealed with {self.stop_reason!r}")
        self.stop_reason = stop_reason

    def _append(
        self, ids: Sequence[int], trained: int, logprobs: Sequence[float], versions: Sequence[int], source: Source
    ) -> None:
        if self.stop_reason is not None:
            raise TrajectoryError(f"sealed with {self.stop_reason!r}: nothing can be appended")
        self.ids.extend(ids)
        self.mask.extend([trained] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.turn_ids.extend([self.turns] * len(ids))
        self.sources.extend([source] * len(ids))


def flaw(ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> str:
    """Return the reason for which sampled tokens cannot enter a trajectory; "" without one.

    Args:
        ids: Sampled token ids, `(tokens,)`.
        logprobs: Log-probability of each token, `(tokens,)`; finite and at most 0 as float32.
        versions: Weight version of each token, `(tokens,)`.
    """
    if not len(ids) == len(logprobs) == len(versions):
        return (
            f"one logprob and one version per sampled token: got {len(ids)} ids, {len(logprobs)} logprobs, "
            f"{len(versions)} versions"
        )
    # Checked as float32, which receipts and batches hold: there -1e39 is -inf, and 1e-60 is 0.
    with np.errstate(over="ignore"):
        kept = np.asarray(logprobs, np.float32)
    wrong = np.flatnonzero(~(np.isfinite(kept) & (kept <= 0)))
    if not wrong.size:
        return ""
    return f"logprob {logprobs[wrong[0]]!r} of sampled token {wrong[0]} is no log-probability"
