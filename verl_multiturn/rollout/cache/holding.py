"""`Holding`: the client's side of a server's cache: turns that wait because it is full.

    turn  `note`, `let_in`  ──▶  sent, at once where the cache suffices
                 │ its conversation is younger than those that fit (`need.py`)
                 ▼
              it waits until they fit: the oldest conversation first, nothing is aborted

The server is asked when turns come and while turns wait, at most twice a second. In between its last answer holds, and
what a conversation leaves goes to those that wait in the same client.

Invariants:
- nothing waits for a server that does not say its cache's use, or that has died;
- without turns nobody asks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from verl_multiturn.describe import describe
from verl_multiturn.rollout.cache.need import Conversations, Told
from verl_multiturn.rollout.cache.residents import Resident
from verl_multiturn.rollout.engine import common_length

logger = logging.getLogger(__name__)

_EVERY_S = 0.5
"""Seconds between two questions, at least."""
# Seconds in which a server has to answer.
_ANSWER_S = 5.0


class _Group:
    """The conversations of a group at a server."""

    def __init__(self, first: Sequence[int]) -> None:
        self.first = first
        """The first prompt of the first one that came."""
        self.shared: dict[Resident, int] = {}
        """How many tokens of its first prompt each shares with that."""


class Holding:
    """What a client knows of one server's cache.

    Args:
        ask: Tells the server all conversations, and returns what it says of its cache; None: it says nothing.
    """

    def __init__(self, ask: Callable[[Conversations], Awaitable[Told | None]]) -> None:
        self.use = math.nan
        """What the server last said."""
        self._ask = ask
        self._youngest = math.inf
        self._tokens: dict[Resident, dict[str, int]] = {}
        """Tokens of each request of a conversation that goes on."""
        self._groups: dict[str, _Group] = {}
        self._held: dict[asyncio.Future[None], Resident] = {}
        self._freed = 0
        """Tokens of conversations that were let in and have ended since the last answer."""
        self._asking: asyncio.Task[None] | None = None
        self._is_new = False
        """Whether something has changed that the server does not know."""
        self._is_silent = False

    def note(self, resident: Resident, request_id: str, prompt: Sequence[int], sampled: int = 0) -> None:
        """Note the tokens of a request: those of its prompt, and what was sampled behind it."""
        requests = self._tokens.get(resident)
        if requests is None:
            requests = self._tokens[resident] = {}
            resident.ends.append(self.leave)
            group = self._groups.setdefault(resident.group, _Group(prompt))
            group.shared[resident] = common_length(group.first, prompt)
        requests[request_id] = len(prompt) + sampled
        self._is_new = True

    def drop(self, resident: Resident, request_id: str) -> None:
        """Forget a request that goes on at another server."""
        self._tokens.get(resident, {}).pop(request_id, None)

    async def let_in(self, resident: Resident) -> None:
        """Wait until the conversation's next turn may be sent."""
        self._look()
        while resident.began > self._youngest:
            waiting = asyncio.get_running_loop().create_future()
            self._held[waiting] = resident
            self._look()
            try:
                with resident.held():
                    await waiting
            finally:
                del self._held[waiting]

    def leave(self, resident: Resident) -> None:
        """Forget a conversation that is over."""
        if (requests := self._tokens.pop(resident, None)) is None:
            return
        group = self._groups[resident.group].shared
        shared = group.pop(resident)
        if not group:
            del self._groups[resident.group]
        self._is_new = True
        if resident.began <= self._youngest:
            self._freed += max(0, sum(requests.values()) - (shared if group else 0))
            self._hand_on()
        if not self._tokens:  # others may wait for the room
            self._look()

    def told(self) -> Conversations:
        """Return what the server has to know: a prompt that siblings share counts once."""
        told: list[tuple[float, int]] = []
        groups: set[str] = set()
        for resident in sorted(self._tokens, key=lambda each: each.began):
            shared = self._groups[resident.group].shared[resident] if resident.group in groups else 0
            groups.add(resident.group)
            told.append((resident.began, max(0, sum(self._tokens[resident].values()) - shared)))
        return told

    def _hand_on(self) -> None:
        """Let conversations in that fit into what others have left."""
        for resident in sorted(set(self._held.values()), key=lambda each: each.began):
            if (needed := sum(self._tokens.get(resident, {}).values())) > self._freed:
                break
            self._freed -= needed
            self._youngest = max(self._youngest, resident.began)
        self._release()

    def _release(self) -> None:
        """Wake the turns that may be sent, the oldest conversation first."""
        for waiting, resident in sorted(self._held.items(), key=lambda held: held[1].began):
            if resident.began <= self._youngest and not waiting.done():
                waiting.set_result(None)

    def _look(self) -> None:
        """Ask the server soon, unless it is being asked."""
        if self._asking is None and not self._is_silent:
            self._asking = asyncio.ensure_future(self._keep_asking())

    async def _keep_asking(self) -> None:
        try:
            while self._is_new or self._held:
                self._is_new = False
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        told = await self._ask(self.told())
                    self._is_silent = told is None
                    self.use, self._youngest = told or (math.nan, math.inf)
                except TimeoutError:
                    self._youngest = math.inf
                except Exception as error:  # one that has died, or is not ours
                    logger.warning(
                        "a server does not say its cache's use, and nothing waits for it: %s", describe(error)
                    )
                    self._youngest, self._is_silent = math.inf, True
                self._freed = 0
                self._release()
                if self._is_silent:
                    return
                await asyncio.sleep(_EVERY_S)
        finally:
            self._asking = None
