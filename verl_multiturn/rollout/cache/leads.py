"""`Leads`: of first turns that begin alike, one is read by the server before the others are sent.

Siblings that are sent at once are all read from their first token, since none finds the others' in the cache. So the
first that comes leads: the others follow once the server has read its prompt, and find it in the cache.

    first turn  `go_ahead(…)`  ──▶  a `Lead`, at once                     ──▶  sent  ──▶  the server has read it
    siblings    `go_ahead(…)`  ──▶  wait until the lead's prompt is read  ──▶  sent

A prompt is known by its blocks of tokens, each together with all that comes before it. So prompts lead one another as
far as they are alike: those of a group, of agents with the same system text and tools, and of several groups.

Invariants:
- a turn waits at most the bound, for all its leads together;
- a lead that ends in any way, or whose prompt was not read, keeps no turn waiting;
- the memory of a prompt goes with the last conversation that shares it, and with the server's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from verl_multiturn.rollout.cache.blocks import keys
from verl_multiturn.rollout.life import Life

_BLOCK = 64
"""Tokens of a block: the fewest for which a turn waits until another one has read them."""


class Lead:
    """A turn whose prompt is the first with certain blocks."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        """Set when no turn needs to wait any more: the prompt is read, or never will be."""
        self.blocks: list[int] = []
        """The blocks that it is the first to have."""
        self.users = 0
        """Conversations that are alive and have one of its blocks."""
        self._ask: Callable[[], Awaitable[object]] | None = None
        self._has_followers = False
        self._asked: asyncio.Task[None] | None = None

    def sent(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Note that the turn is being sent.

        Args:
            ask: Returns when the server has read its prompt; called once, and only if a follower waits.
        """
        self._ask = ask
        self._look()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the prompt is read, or the turn is over, at most `timeout_s` seconds."""
        self._has_followers = True
        self._look()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.is_over.wait()

    def _look(self) -> None:
        if self._ask is not None and self._has_followers and self._asked is None and not self.is_over.is_set():
            self._asked = asyncio.ensure_future(self._read(self._ask))

    async def _read(self, ask: Callable[[], Awaitable[object]]) -> None:
        with suppress(Exception):  # of a server that has died, or that has no answer
            await ask()
        self.is_over.set()


class Leads:
    """The leads at one server.

    Args:
        bound_s: Seconds that a turn may wait for its leads.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._of_block: dict[int, Lead] = {}
        self._used: dict[Life, set[Lead]] = {}

    async def go_ahead(self, life: Life, ids: Sequence[int]) -> Lead:
        """Wait for the leads of a prompt that is to be sent; return its own lead, which has no blocks for a follower.

        Args:
            life: The conversation.
            ids: Its prompt.
        """
        loop = asyncio.get_running_loop()
        blocks, until = keys(ids, _BLOCK), loop.time() + self._bound_s
        while (unread := self._unread(blocks)) is not None and (left := until - loop.time()) > 0:
            with life.led():
                await unread.wait(left)
        own = Lead()
        for block in () if life.asks_no_more else blocks:
            found = self._of_block.setdefault(block, own)
            if found is own:
                own.blocks.append(block)
            self._use(found, life)
        return own

    def over(self, lead: Lead, was_read: bool) -> None:
        """Note the end of a lead's turn.

        Args:
            lead: The result of `go_ahead`.
            was_read: Whether the server has read its prompt.
        """
        if not was_read:
            self._forget(lead)
        lead.is_over.set()

    def clear(self, but: Lead | None = None) -> None:
        """Forget all prompts, because the server's cache was emptied.

        Args:
            but: The lead whose prompt was read since; None: there is none.
        """
        self._of_block = {} if but is None else dict.fromkeys(but.blocks, but)

    def leave(self, life: Life) -> None:
        """Forget a conversation, and the prompts that no other one has."""
        for lead in self._used.pop(life, ()):
            lead.users -= 1
            if not lead.users:
                self._forget(lead)

    def _unread(self, blocks: Sequence[int]) -> Lead | None:
        """Return the first lead on the way through a prompt that is not read yet; None without one."""
        for block in blocks:
            lead = self._of_block.get(block)
            if lead is None:
                return None
            if not lead.is_over.is_set():
                return lead
        return None

    def _use(self, lead: Lead, life: Life) -> None:
        if life not in self._used:
            self._used[life] = set()
            life.at_last.append(self.leave)
        if lead not in self._used[life]:
            self._used[life].add(lead)
            lead.users += 1

    def _forget(self, lead: Lead) -> None:
        for block in lead.blocks:
            if self._of_block.get(block) is lead:
                del self._of_block[block]
