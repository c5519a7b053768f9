"""Sessions of agents, recorded and made again on one machine: recorded programs, and agents that chance drives."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.agent_sessions import call_text
from tests.harness_requests import recorded
from tests.support.on_disk import from_disk
from tests.support.session_play import PlayedChat, _Agent, _Engine
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.template import Template
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult
from verl_multiturn.proxy.endpoint import session_end
from verl_multiturn.proxy.protocols import PROTOCOLS
from verl_multiturn.proxy.protocols.requests import ChatRequest
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.session import AgentSession
from verl_multiturn.records.read.records import read_back
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.replay.calls import DivergedError, ReplayDifference
from verl_multiturn.replay.comparison import differences
from verl_multiturn.replay.engine import ReplayEngine
from verl_multiturn.replay.sessions import RecordedSession
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.outcome import Outcome

Record = dict[str, Any]
MakeRun = Callable[[Any], ProxyRun]


def with_engine(run: ProxyRun, engine: Any, template: Template) -> ProxyRun:
    """Return the parts that sessions share, with another engine."""
    return replace(run, engine=ReceiptingEngine(StopTexts(engine, template.tokenizer)))


async def recorded_session(session: AgentSession, run: ProxyRun, end: AgentEnd) -> Record:
    """End a session and return its record, read from disk."""
    session.returned()
    await session.closed()
    receipts = session.receipts()
    outcome = await session_end(session, end, run)
    return from_disk(Life(outcome.request_id, outcome=outcome, generations=receipts, sampling={"temperature": 1.0}))


async def replayed(record: Record, run: ProxyRun, stage: ReplayEngine) -> list[ReplayDifference]:
    """Make a session again; return where it differs from its record.

    Args:
        record: Its record.
        run: Parts that sessions share, with `stage` as its engine.
        stage: The stage.
    """
    session = RecordedSession(record, run)
    stage.begin(record, Outcome.begun(session.session.id), session)
    try:
        await session.play()
    except DivergedError as diverged:
        await session.close()
        return [diverged.difference]
    await session.close()
    receipts = session.session.receipts()
    outcome = await session_end(session.session, session.end(), run)
    return differences(record, read_back(record_of(Life(outcome.request_id, outcome=outcome, generations=receipts))))


async def program(name: str, run: ProxyRun, template: Template, chance: random.Random) -> Record:
    """Record a session in which an agent program repeats its requests; some answers get lost, and are requested again.

    Args:
        name: Name of the recording.
        run: Parts that sessions share; its engine is replaced.
        template: The model's template.
        chance: Decides which answers get lost.
    """
    requests = [PROTOCOLS[path].read(body) for path, body in recorded(name)]
    texts = [_turn_after(request, requests[place + 1 :]) for place, request in enumerate(requests)]
    said = iter([each for text in texts for each in (text, text)])
    end = template.tokenizer.eos_token_id

    def say(lane: str, ids: Sequence[int], turn: int) -> list[int]:
        return [*template.tokenizer.encode(next(said), add_special_tokens=False), end]

    run = with_engine(run, ScriptedEngine(say, version=3), template)
    session = AgentSession(name, run, {"temperature": 1.0})
    ids: dict[str, str] = {}
    for request, text in zip(requests, texts, strict=True):
        asked = _with_ids(request, ids)
        while chance.random() < 0.3:
            lost = session.begin(asked)
            await asyncio.sleep(0)
            lost.undelivered()
        delivery = await session.complete(asked)
        delivery.delivered()
        ids |= _named(text, delivery.completions[0].calls)
    rewards = dict.fromkeys(list(session.forest.completions)[:1], 0.25)
    return await recorded_session(session, run, AgentEnd("returned", AgentResult(1.0, rewards)))


async def lost_answer(name: str, run: ProxyRun, template: Template) -> Record:
    """Record a session whose one answer is lost, and is not requested again.

    Args:
        name: Name of the recording that has the request.
        run: Parts that sessions share; its engine is replaced.
        template: The model's template.
    """
    path, body = recorded(name)[0]
    said = [*template.tokenizer.encode("The answer is 5.", add_special_tokens=False), template.tokenizer.eos_token_id]
    run = with_engine(run, ScriptedEngine([said], version=3), template)
    session = AgentSession("lost", run, {"temperature": 1.0})
    (await session.complete(PROTOCOLS[path].read(body))).undelivered()
    return await recorded_session(session, run, AgentEnd("raised", problem="raised"))


_CALLED: dict[str, list[str]] = {}


def _turn_after(request: ChatRequest, later: Sequence[ChatRequest]) -> str:
    """Return the model's answer to a request, as the next request of the same conversation has it."""
    length = len(request.messages)
    for other in later:
        if len(other.messages) > length and other.messages[:length] == request.messages:
            turn = other.messages[length]
            if turn["role"] == "assistant":
                calls = [call["function"] for call in turn.get("tool_calls", ())]
                parts = [call_text(call["name"], json.loads(call["arguments"])) for call in calls]
                text = "\n".join(part for part in [turn["content"], *parts] if part)
                _CALLED[text] = [call["id"] for call in turn.get("tool_calls", ())]
                return text
    return "The answer is 5."


def _named(text: str, calls: Sequence[Any]) -> dict[str, str]:
    given = _CALLED.get(text, [])
    return dict(zip(given, (call.id for call in calls), strict=False))


def _with_ids(request: ChatRequest, ids: dict[str, str]) -> ChatRequest:
    text = json.dumps(list(request.messages))
    for theirs, ours in ids.items():
        text = text.replace(json.dumps(theirs), json.dumps(ours))
    return replace(request, messages=json.loads(text))


async def drawn(chat: PlayedChat, run: ProxyRun, template: Template, seed: str, requests: int = 12) -> Record:
    """Record a session of an agent with random actions, in a random order."""
    chance = random.Random(seed)
    run = with_engine(run, _Engine(chat, chance), template)
    if not chat.roles:
        chat.roles.append(run.renderer._form)
    agent = _Agent(chat, run, chance)
    asked = 0
    while asked < requests:
        at_once = chance.choice([1, 1, 2, 4])
        await asyncio.gather(*(agent.ask() for _ in range(at_once)))
        asked += at_once
    kind: Any = chance.choice(["returned", "raised", "timed_out"])
    return await recorded_session(agent.session, run, AgentEnd(kind, problem="" if kind == "returned" else kind))
