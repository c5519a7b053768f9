"""`Turn`: one generation of the engine, and its results, from the tokens to the reward.

A conversation makes a turn when the engine has answered, and fills it in as the turn is read and answered. A session
makes its turns at its end: each generation is one, also one that no client got.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import AssistantTurn
from verl_multiturn.interactions.running.replies import CheckedReply
from verl_multiturn.tools.running.results import CallResult


@dataclass
class Turn:
    """One generation of a conversation, or of a session."""

    number: int
    """Number of the generation, counted from 0 in the whole conversation."""
    reward: float | None = None
    """Reward of the turn alone, beside those of its calls and of its reply: that of an agent for a completion."""
    state: str | None = None
    """Digest of the state in which the model acted; None for a summary, and where the environment gave none."""
    parent: int | None = None
    """Number of the turn that it continues; None where it begins anew."""
    after: int = 0
    """How many turns come after it in its row; in a session, in the longest row that holds it."""
    role: str | None = None
    """Name of the speaker, one of `proxy.roles` or of `train`; None where there are none."""
    place: int | str = 0
    """Index of the row that it is in; or why it is in none (`certificate.receipts.CAUSES`)."""
    start: int = 0
    """Position of its first token in the row's response."""
    end: int = 0
    """Position after its last token; `start` where the row holds none of its tokens."""
    said: AssistantTurn | None = None
    """Its text and calls; None where it was cut off before it was read, or where no client got it."""
    summary: bool = False
    """Whether it is a summary that was requested of the model."""
    calls: list[CallResult] = field(default_factory=list)
    """Results of its calls, in order."""
    reply: CheckedReply | None = None
    """The interaction's answer. That to the last turn may not have been shown to the model."""
    lane: int | None = None
    """Number of the engine's lane in which a session sampled it; for records alone."""
    completion: str | None = None
    """Id of the completion that a session made of it; None where it became none. For records alone."""
    given: Sequence[Message] = ()
    """Messages that a session's agent sent for it, after those of its parent; empty in a conversation."""
    at: float = field(default_factory=time.time, compare=False)
    """Time (`time.time`) at which the engine had answered; for traces alone."""
    seconds: float = 0.0
    """Seconds for which the engine was waited for."""
    finish: str = ""
    """Why the generation ended, in the engine's word (`rollout.engines.protocol.Finish`); for records alone."""
    cached: int | None = None
    """Tokens of the prompt that the engine had in its prefix cache; None where it reports none. For records alone."""

    @property
    def sampled(self) -> bool:
        """Return whether its row holds its tokens."""
        return self.end > self.start

    @property
    def earned(self) -> float | None:
        """Return the sum of the rewards of its calls, its reply and its own; None without any."""
        rewards = [call.reward for call in self.calls if call.reward]
        if self.reply is not None and self.reply.reward is not None:
            rewards.append(self.reply.reward)
        if self.reward is not None:
            rewards.append(self.reward)
        return sum(rewards, 0.0) if rewards else None

    def to_plain(self) -> dict[str, Any]:
        """Return the facts of the turn for an estimator of advantages, in plain types: `of_plain` reads it."""
        return {
            "turn": self.number,
            "parent": self.parent,
            "start": self.start,
            "end": self.end,
            "reward": self.earned,
            "state": self.state,
            "after": self.after,
            "role": self.role,
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Turn:
        """Return the turn that `to_plain` wrote; all that it earned is its own `reward`."""
        return cls(plain["turn"], **{key: value for key, value in plain.items() if key != "turn"})
