"""`Holding`: the client's side of a server's cache: turns that wait because it is full.

    turn  `note`, `let_in`  ──▶  sent, at once where the cache suffices
                 │ its conversation is younger than those that fit (`need.py`)
                 ▼
              it waits until they fit: the oldest conversation first, nothing is aborted

The server gets at most two requests a second, as long as conversations come, go or wait. In between the client goes on
by itself from the last answer: its conversations grow into the room that it was given, and beyond that the youngest one
waits; the room of one that leaves goes to those that wait. Before the first answer nothing is sent, since many begin at
once.

A conversation needs its tokens and those of its next turn, which is taken to be as long as its last one. One that waits
needs room for some turns: else it would be evicted again at once, and be read as often. The common part of prompts, of
one group or of many, is there once, and counts once (`blocks.py`).

A conversation counts while it has a turn, and for a while afterwards: where tools take long, its tokens are read again,
which costs less than an engine that waits with it.

Invariants:
- nothing waits for a server that does not report its cache's use, that leaves, or that has died;
- nothing waits for a conversation that has no turn for longer than `AWAY_S`, whatever that waits for itself;
- without conversations no request is sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

from verl_multiturn.describe import describe
from verl_multiturn.rollout.cache.blocks import Blocks, Prompt
from verl_multiturn.rollout.cache.need import AWAY_S, REMINDED_S, CacheReport, Conversations
from verl_multiturn.rollout.life import Life, stopped

logger = logging.getLogger(__name__)

_EVERY_S = 0.5
"""Seconds between two questions, at least."""
# Seconds in which a server has to answer.
_ANSWER_S = 5.0
STAYS = 4
"""Turns for which one that waits has to have room."""
_NOTHING = CacheReport(math.nan, math.inf, math.inf)
"""The report in the place of a missing one: nothing waits for the server."""


@dataclass(eq=False)
class _HeldRequest:
    """The tokens of a request at a server."""

    first: Prompt
    """Its first prompt, or the first one after its history was made shorter."""
    length: int
    """Tokens of its last prompt."""
    tokens: int
    """Its tokens, the sampled ones included."""

    def own(self) -> int:
        """Return how many tokens came behind its first prompt; no other request shares them."""
        return max(0, self.tokens - self.first.tokens)


@dataclass
class _Stay:
    """The tokens of a conversation that goes on at a server."""

    requests: dict[str, _HeldRequest] = field(default_factory=dict)
    turns: set[str] = field(default_factory=set)
    """Requests that have a turn."""
    growth: int | None = None
    """Tokens by which a prompt was longer than the request's last one; None: none was yet."""
    since: float = 0.0
    """When its last turn ended."""
    inside: list[_HeldRequest] = field(default_factory=list)
    """Requests for whose first prompts room is kept; none where it waits or does not count."""
    taken: int = 0
    """Tokens of the room that are kept for it beside those prompts."""
    is_told: bool = False
    """Whether the last request to the server reported it."""

    def counts(self, now: float) -> bool:
        """Return whether the others have to leave room for it."""
        return bool(self.turns) or now - self.since <= AWAY_S

    def needed(self) -> list[_HeldRequest]:
        """Return the requests it comes back for: of an agent's requests without a turn, the longest.

        Of the others most are over, as those of a subagent or of a history that was made shorter.
        """
        idle = [each for name, each in self.requests.items() if name not in self.turns]
        longest = max(idle, key=lambda each: each.tokens, default=None)
        return [self.requests[name] for name in self.turns] + ([] if longest is None else [longest])


class Holding:
    """A client's view of one server's cache.

    Args:
        ask: Reports all conversations to the server, and returns its report on its cache; None: it has none. After a
            `TimeoutError` the request is repeated, after another error never.
        clock: Seconds that pass, as `time.monotonic`.
    """

    def __init__(
        self, ask: Callable[[Conversations], Awaitable[CacheReport | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.use = math.nan
        """The use in the server's last report."""
        self._ask = ask
        self._clock = clock
        self._youngest, self._room = math.inf, math.inf
        self._is_known = False
        """Whether the server has answered since conversations are there, or is not to be waited for."""
        self._changed = 0
        """Tokens that admitted conversations need beyond those of the last request to the server."""
        self._usual = 0
        """Growth of a conversation that has none of its own yet: that of the last prompt that grew."""
        self._stays: dict[Life, _Stay] = {}
        self._blocks = Blocks()
        """Those of the first prompts for which room is kept."""
        self._held: dict[asyncio.Future[None], Life] = {}
        self._asking: asyncio.Task[None] | None = None
        self._is_new = False
        """Whether something has changed that the server does not know."""
        self._is_silent = False

    def note(self, life: Life, request_id: str, prompt: Sequence[int], sampled: int = 0) -> None:
        """Note the tokens of a request that has a turn: those of its prompt, and those sampled behind it."""
        if life.asks_no_more:  # nothing would forget it again
            return
        stay = self._stays.get(life)
        if stay is None:
            stay = self._stays[life] = _Stay()
            life.at_last.append(self.leave)
        request = stay.requests.get(request_id)
        if request is None or len(prompt) < request.length:
            request = stay.requests[request_id] = _HeldRequest(self._blocks.prompt(prompt), len(prompt), 0)
        elif len(prompt) > request.length:
            self._usual = stay.growth = len(prompt) - request.length
        request.length, request.tokens = len(prompt), len(prompt) + sampled
        stay.turns.add(request_id)
        self._is_new = True
        if life.began <= self._youngest:
            self._take(self._put_in(life))

    def rest(self, life: Life, request_id: str) -> None:
        """Note the end of a request's turn."""
        if (stay := self._stays.get(life)) is not None:
            stay.turns.discard(request_id)
            stay.since = self._clock()

    def drop(self, life: Life, request_id: str) -> None:
        """Forget a request that goes on at another server."""
        if (stay := self._stays.get(life)) is not None:
            stay.turns.discard(request_id)
            if len(stay.requests) > 1 or request_id not in stay.requests:
                stay.requests.pop(request_id, None)
                self._is_new = True
            else:
                self.leave(life)

    async def let_in(self, life: Life) -> None:
        """Wait until the conversation's next turn may be sent."""
        self._look()
        while not self._is_known or life.began > self._youngest:
            waiting = asyncio.get_running_loop().create_future()
            self._held[waiting] = life
            self._look()
            try:
                with life.held() if self._is_known else stopped():
                    await waiting
            finally:
                del self._held[waiting]

    def leave(self, life: Life) -> None:
        """Forget a conversation that is over, or that goes on at another server."""
        if life not in self._stays:
            return
        freed = self._take_out(self._stays.pop(life))
        self._is_new = True
        if freed:
            self._take(-freed)
            self._hand_on()

    def told(self) -> Conversations:
        """Return the conversations for the server: the common part of prompts counts once, at the oldest."""
        told: list[tuple[float, int]] = []
        seen: set[int] = set()
        now = self._clock()
        for life, stay in sorted(self._stays.items(), key=lambda each: each[0].began):
            stay.is_told = stay.counts(now)
            if stay.is_told:
                tokens = self._own(life)
                for each in stay.needed():
                    known = each.first.known(seen)
                    seen.update(each.first.keys[known:])
                    tokens += each.first.beyond(known)
                told.append((life.began, tokens))
            if stay.is_told and life.began <= self._youngest:
                self._put_in(life)
            else:
                self._take_out(stay)
        return told

    def _own(self, life: Life) -> int:
        """Return how many tokens a conversation needs behind its first prompts, with those of its next turns."""
        stay = self._stays[life]
        growth = self._usual if stay.growth is None else stay.growth
        more = growth * (STAYS if life.began > self._youngest else 1)
        return sum(each.own() for each in stay.needed()) + more

    def _needs(self, life: Life) -> int:
        """Return how many tokens one that waits needs beside those for which room is kept."""
        firsts = [each.first for each in self._stays[life].needed()]
        return sum(first.beyond(first.known(self._blocks)) for first in firsts) + self._own(life)

    def _put_in(self, life: Life) -> int:
        """Keep the room that a conversation needs now, and return how many tokens more that is than before."""
        stay = self._stays[life]
        before, stay.inside = stay.inside, stay.needed()
        more = sum(self._blocks.add(each.first) for each in stay.inside if each not in before)
        more -= sum(self._blocks.remove(each.first) for each in before if each not in stay.inside)
        more, stay.taken = more - stay.taken, self._own(life)
        return more + stay.taken

    def _take_out(self, stay: _Stay) -> int:
        """Keep no room for a conversation, and return how many tokens that frees."""
        freed = stay.taken + sum(self._blocks.remove(each.first) for each in stay.inside)
        stay.inside, stay.taken = [], 0
        return freed

    def _take(self, tokens: int) -> None:
        """Take so many tokens of the room."""
        self._changed += tokens
        self._room -= tokens
        self._tighten()

    def _tighten(self) -> None:
        """Let the youngest that were let in wait from their next turns on where they do not fit; never the oldest."""
        if self._room >= 0:
            return
        now = self._clock()
        inside = [each for each, stay in self._stays.items() if each.began <= self._youngest and stay.counts(now)]
        inside.sort(key=lambda each: each.began)
        while self._room < 0 and len(inside) > 1:
            self._room += self._take_out(self._stays[inside.pop()])
            self._youngest = inside[-1].began

    def _hand_on(self) -> None:
        """Admit conversations that fit into the freed room."""
        for life in sorted(set(self._held.values()), key=lambda each: each.began):
            if life in self._stays and self._needs(life) > self._room:
                break
            self._youngest = max(self._youngest, life.began)
            if life in self._stays:
                self._take(self._put_in(life))
        self._release()

    def _release(self, every: bool = False) -> None:
        """Wake the turns that may be sent, or every one, to look again; the oldest conversation first."""
        for waiting, life in sorted(self._held.items(), key=lambda held: held[1].began):
            if self._is_known and (every or life.began <= self._youngest) and not waiting.done():
                waiting.set_result(None)

    def _look(self) -> None:
        """Send the server a request soon, unless one is under way."""
        if self._asking is None and not self._is_silent:
            # Not in the context of the conversation that happens to come first: it would be kept as long.
            self._asking = asyncio.get_running_loop().create_task(self._keep_asking(), context=Context())

    def _settle(self) -> None:
        """Keep room for those that the answer lets in; it knows only those of the request."""
        now = self._clock()
        for life, stay in self._stays.items():
            if life.began > self._youngest:
                self._take_out(stay)
            elif not stay.inside and (stay.is_told or stay.counts(now)):
                more = self._put_in(life)
                self._changed += 0 if stay.is_told else more

    async def _keep_asking(self) -> None:
        asked = -math.inf
        try:
            while self._is_new or self._held or self._stays:
                if not self._is_new and not self._held and self._clock() < asked + REMINDED_S:
                    await asyncio.sleep(_EVERY_S)
                    continue
                self._is_new, self._changed, asked = False, 0, self._clock()
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        told = await self._ask(self.told())
                    self._is_silent = told is None
                    self.use, self._youngest, self._room = told or _NOTHING
                except TimeoutError:
                    self.use, self._youngest, self._room = _NOTHING
                except (Exception, asyncio.CancelledError) as error:  # one that has died, or is not ours
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise
                    logger.warning(
                        "a server does not say its cache's use, and nothing waits for it: %s", describe(error)
                    )
                    self.use, self._youngest, self._room = _NOTHING
                    self._is_silent = True
                was_known, self._is_known = self._is_known, True
                self._settle()
                self._room -= self._changed  # which the answer does not know yet
                self._tighten()
                self._release(every=not was_known)  # those that wait on do so for want of room
                if self._is_silent:
                    return
                await asyncio.sleep(_EVERY_S)
        finally:
            self._asking = None
            self._is_known = self._is_silent
            self._youngest = self._room = math.inf
