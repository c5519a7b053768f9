"""`Caches`: a client's bookkeeping so that no server reads the same tokens again.

    attempt  `before(…)`   it waits while the server's cache is full, and for the turns that lead it
             `sent(…)`     its followers may ask the server when its prompt is read
             `ended(…)`    they need not wait any more

`rollout/cache/` has the rules. Only the turns of a conversation that lives (`rollout/life.py`) in a group
are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ray.exceptions import ActorUnavailableError

from verl_multiturn.config import CacheSettings
from verl_multiturn.describe import describe
from verl_multiturn.rollout.cache.holding import Holding
from verl_multiturn.rollout.cache.leads import Lead, Leads
from verl_multiturn.rollout.cache.need import CacheReport, Conversations
from verl_multiturn.rollout.life import Life, current
from verl_multiturn.verl_bridge.servers.admission import PAUSED

HELD = "held_s"
"""Field of an output: seconds for which the generation waited for room in its server's cache."""
LED = "led_s"
"""Field of an output: seconds for which it waited for generations that lead it."""
USE = "cache_use"
"""Field of an output: its server's report on its cache's use; missing without a report."""
LEADS = "leads"
"""Sampling parameter of a generation that leads: its server notes when it has read the prompt."""


@dataclass
class _CacheServer:
    """The client's knowledge of a server."""

    handle: Any
    holding: Holding | None
    """None: nothing waits for its cache."""
    leads: Leads
    version: Any = None
    """Version of the weights that sampled last."""


@dataclass
class _ServerTurn:
    """A generation that goes on."""

    life: Life
    waited: tuple[float, float]
    """`held_s` and `led_s` of the conversation when it began."""
    server: _CacheServer | None = None
    lead: Lead | None = None
    prompt: Sequence[int] = ()
    is_cold: bool = False
    """Whether the server has to read its prompt from the beginning, since a pause has emptied the cache."""


class Caches:
    """The servers' caches, as far as one client knows them.

    Args:
        settings: Our settings.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._servers: dict[str, _CacheServer] = {}
        self._turns: dict[str, _ServerTurn] = {}
        self._name = ""

    async def before(
        self, request_id: str, server_id: str, handle: Any, prompt: Sequence[int], params: dict[str, Any], led: bool
    ) -> None:
        """Wait until an attempt may be sent.

        Args:
            request_id: Name of its request.
            server_id: Its server.
            handle: That server's handle.
            prompt: The ids that the server has to read.
            params: Its sampling parameters; they get `LEADS` where others may wait for it.
            led: Whether siblings go to the same server, so that one leads.
        """
        life = current()
        if life is None or not life.group or life.asks_no_more:
            return
        turn = self._turns.setdefault(request_id, _ServerTurn(life, (life.held_s, life.led_s)))
        server = self._server(server_id, handle)
        turn.server, turn.prompt, turn.lead = server, prompt, None
        is_first = life.servers.get(request_id) != server_id
        if server.holding is not None:
            before = self._servers.get(life.servers.get(request_id, ""))
            if is_first and before is not None and before.holding is not None:
                before.holding.drop(life, request_id)
            server.holding.note(life, request_id, prompt)
            await server.holding.let_in(life)
        life.servers[request_id] = server_id
        if led and (is_first or turn.is_cold) and self._settings.lead_ms:
            turn.is_cold = False
            turn.lead = await server.leads.go_ahead(life, prompt)
            if turn.lead.blocks:
                params[LEADS] = True

    def sent(self, request_id: str, attempt: str) -> None:
        """Note that an attempt is being sent under this id."""
        turn = self._turns.get(request_id)
        if turn is not None and turn.lead is not None and turn.server is not None:
            handle = turn.server.handle
            turn.lead.sent(lambda: handle.prefilled.remote(attempt, self._bound_s))

    def ended(self, request_id: str, output: Any) -> None:
        """Note the end of an attempt.

        Args:
            request_id: Name of its request.
            output: verl's output; None where it failed or was never sent.
        """
        turn = self._turns.get(request_id)
        if turn is None or turn.server is None:
            return
        server, lead, tokens = turn.server, turn.lead, [] if output is None else output.token_ids
        if lead is not None:
            server.leads.over(lead, was_read=bool(tokens))
            turn.lead = None
        if tokens and server.holding is not None:
            server.holding.note(turn.life, request_id, turn.prompt, len(tokens))
        if output is None:
            return
        turn.is_cold = bool(output.extra_fields.get(PAUSED))
        version = output.extra_fields.get("global_steps")
        if turn.is_cold:
            server.leads.clear()
        elif server.version not in (None, version):  # new weights have emptied the cache
            server.leads.clear(but=lead if tokens else None)
        server.version = version

    def told(self, request_id: str) -> Mapping[str, float]:
        """Return an output's figures on the caches, and forget the generation."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return {}
        holding, use = None if turn.server is None else turn.server.holding, math.nan
        if holding is not None:
            holding.rest(turn.life, request_id)
            use = holding.use
        held_s, led_s = turn.waited
        waited = {HELD: turn.life.held_s - held_s, LED: turn.life.led_s - led_s}
        return {**waited, **({} if math.isnan(use) else {USE: use})}

    @property
    def _bound_s(self) -> float:
        return self._settings.lead_ms / 1000

    def _server(self, server_id: str, handle: Any) -> _CacheServer:
        server = self._servers.get(server_id)
        if server is None or server.handle != handle:  # a new one may have the address of one that has died
            full = self._settings.full
            holding = None if full is None else Holding(self._asking(handle, full))
            server = self._servers[server_id] = _CacheServer(handle, holding, Leads(self._bound_s))
        return server

    def _asking(self, handle: Any, full: float) -> Callable[[Conversations], Awaitable[CacheReport | None]]:
        self._name = self._name or uuid4().hex  # in the worker: the trainer's client is copied into each

        async def ask(conversations: Conversations) -> CacheReport | None:
            try:
                told: CacheReport | None = await handle.cache_need.remote(self._name, conversations, full)
            except ActorUnavailableError as error:  # it may be there again in a moment
                raise TimeoutError(describe(error)) from None
            return told

        return ask
