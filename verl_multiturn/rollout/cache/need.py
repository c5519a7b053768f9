"""`CacheNeed`: how much of a server's cache the conversations need that go on there, and which of them have to wait.

Each client reports its conversations in every request, and the answer has the use and the youngest one that fits:

    client  (when it began, its tokens) of each conversation  ──▶  server, which knows those of all clients
    client  holds the turns of later ones                     ◀──  `CacheReport`: use, youngest, room

A conversation counts as long as it has turns, also in the seconds between them: it comes back for its tokens, and for
those of its next turn. The engine's own figure of its use counts the running requests alone, and calls a cache free
from which each turn throws another conversation out.

Invariants:
- the oldest conversation is always let in, so that all are in the end;
- a client that is silent for half a minute has died, and its conversations count no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from verl_multiturn.errors import ConfigError

Conversations = Sequence[tuple[float, int]]
"""When each conversation of a client began (`time.time`), and its tokens, without those that siblings have reported."""

AWAY_S = 10.0
"""Seconds after its last turn for which a conversation counts; a longer wait is a slow call."""
REMINDED_S = 5.0
"""Seconds after which a client repeats its report."""
# Seconds of silence after which a client counts as dead.
_LATE_S = 30.0


class CacheReport(NamedTuple):
    """A server's report on its cache."""

    use: float
    """Tokens that all conversations need that count, as a share of the cache: above 1 they do not fit."""
    youngest: float
    """When the youngest conversation began that is let in; infinity: all are."""
    room: float
    """How many tokens more those of the client may need until its next request: an equal share of the free room. Others
    that ask meanwhile are given a share of it, too."""


class CacheNeed:
    """The reports of one server's clients.

    Args:
        tokens: How many tokens the cache holds.
        clock: Seconds that pass, as `time.monotonic`.
    """

    def __init__(self, tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock
        self._told: dict[str, tuple[float, Conversations]] = {}
        """Time of each client's last report, and its conversations."""

    def tell(self, client: str, conversations: Conversations, full: float) -> CacheReport:
        """Take a client's conversations, and return the report for it.

        Args:
            client: Its name.
            conversations: All that count; none: the client is forgotten.
            full: Share of the cache above which the younger conversations wait.
        """
        now = self._clock()
        self._told[client] = now, conversations
        self._told = {name: (at, its) for name, (at, its) in self._told.items() if its and now - at <= _LATE_S}
        every = sorted(one for _, its in self._told.values() for one in its)
        needed = sum(tokens for _, tokens in every)
        youngest, left = _youngest(every, full * self._tokens) if needed else (math.inf, full * self._tokens)
        return CacheReport(needed / self._tokens, youngest, left / max(1, len(self._told)))


def require_room(tokens: int, rollout: Any) -> None:
    """Refuse a cache in which not even one conversation fits.

    Args:
        tokens: How many tokens the cache holds.
        rollout: The rollout's configuration.

    Raises:
        ConfigError: A conversation may be longer.
    """
    longest = rollout.prompt_length + rollout.response_length
    if tokens < min(longest, rollout.max_model_len or longest):
        raise ConfigError(
            f"a generation server's cache holds {tokens} tokens, and a conversation may have {longest} "
            f"(data.max_prompt_length={rollout.prompt_length} with data.max_response_length="
            f"{rollout.response_length}); raise actor_rollout_ref.rollout.gpu_memory_utilization or engine_kwargs."
            "sglang.max_total_tokens, or shorten the conversations"
        )


def _youngest(oldest_first: Conversations, room: float) -> tuple[float, float]:
    """Return when the last conversation began that fits with all older ones, and the room beyond; infinity: all fit."""
    youngest = oldest_first[0][0]
    for began, tokens in oldest_first:
        if tokens > room:
            return youngest, room if began > youngest else 0.0
        room -= tokens
        youngest = began
    return math.inf, room
