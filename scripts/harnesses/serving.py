"""One session behind a real server, on a scripted engine, and the account of it when it is over."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.chat.template import Template
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.session import AgentSession, Delivery
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome, SessionReport

LIMITS = Limits(prompt_length=65_536, response_length=65_536)
PING_S = 2.0
_UID = "u"


class WatchedSession(AgentSession):
    """A session that remembers why it refused requests."""

    refused: Sequence[str] = ()

    def begin(self, request: ChatRequest) -> Delivery:
        """Begin to answer a request, as `AgentSession` does."""
        delivery = super().begin(request)
        if delivery.task is not None:
            delivery.task.add_done_callback(self._ended_with)
        return delivery

    def _ended_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), RefusedError):
            self.refused = [*self.refused, f"{error.code}: {error.message}"]


@dataclass(frozen=True)
class Turn:
    """A generation of the scripted engine."""

    prompt: str
    """The engine's prompt, as text."""
    text: str
    """The policy's answer."""


@dataclass(frozen=True)
class Served:
    """A session that answers at an address."""

    session: WatchedSession
    root: str
    """Address without a path, such as `http://127.0.0.1:4711`."""
    key: str
    turns: list[Turn] = field(default_factory=list)
    """The engine's generations, in order."""

    async def account(self) -> Account:
        """End the session, and return its outcome."""
        session = self.session
        session.end()
        await session.closed()
        outcome = session.outcome(StopReason.FINISHED)
        outcome.session = SessionReport(
            len(session.forest.roots), dict(session.unenforced), requests=session.journal.requests()
        )
        # Written and read, as a record is that `verl-multiturn verify` gets.
        life = Life(outcome.request_id, _UID, outcome=outcome, generations=session.receipts())
        record = json.loads(line_of(record_of(life)))
        violations = [str(violation) for violation in verify_record(record).violations]
        return Account(outcome, len(session.forest.roots), violations, dict(session.unenforced), session.refused)


@dataclass(frozen=True)
class Account:
    """The outcome of a session."""

    outcome: Outcome
    roots: int
    violations: Sequence[str]
    unenforced: dict[str, int]
    refused: Sequence[str]

    @property
    def counts(self) -> dict[str, Any]:
        """Return the session's numbers."""
        places = self.outcome.places
        return {
            "roots": self.roots,
            "rows": len({place for place in places if isinstance(place, int)}),
            "completions": len(places),
            "trained": sum(isinstance(place, int) for place in places),
            "untrained": dict(Counter(place for place in places if isinstance(place, str))),
            "unenforced": self.unenforced,
            "refused": len(self.refused),
            "violations": len(self.violations),
        }


@asynccontextmanager
async def serve(template: Template, say: Callable[[str], str]) -> AsyncIterator[Served]:
    """Serve one session until the end of the block.

    Args:
        template: The model's template.
        say: The model's answer: the text of its turn, without the end token, for the text of its prompt.
    """
    tokenizer, ends = template.tokenizer, template.end_ids
    turns: list[Turn] = []

    def generate(lane: str, ids: Sequence[int], turn: int) -> list[int]:
        prompt = tokenizer.decode(list(ids))
        turns.append(Turn(prompt, say(prompt)))
        return [*tokenizer.encode(turns[-1].text, add_special_tokens=False), tokenizer.eos_token_id]

    engine = ReceiptingEngine(StopTexts(ScriptedEngine(generate), tokenizer))
    renderer = PromptRenderer(template.codec, ends)
    reader = TurnReader(template.parser, tokenizer, ends, [THINK])
    run = ProxyRun(engine, renderer, reader, LIMITS, fill_id=tokenizer.eos_token_id)
    session = WatchedSession("session", run, {})
    try:
        async with ProxyServer(ping_s=PING_S) as server:
            access = server.open(session)
            yield Served(session, access.anthropic_base_url, access.api_key, turns)
            await server.close_session(access)
    finally:
        renderer.close()
