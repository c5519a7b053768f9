"""`RecordedSession`: the requests of a recorded session, in their order, through today's forest.

    the record's events ─→ request ─→ AgentSession ⇄ the recorded generations
                        ├─ its client got the answer, or had gone
                        └─ how many generations there were by then

A record keeps of a request that goes on from a completion the messages after it. So those before it are as today's
session has them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.errors import EngineError
from verl_multiturn.proxy.agents.end import AgentEnd, AgentResult, EndKind
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError
from verl_multiturn.proxy.sessions.journal import COUNT, JournalEntry
from verl_multiturn.proxy.sessions.nodes import PromptNode
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.sampler import ENGINE_AWAY
from verl_multiturn.proxy.sessions.session import AgentSession, Delivery
from verl_multiturn.proxy.sessions.turn_reading import CallIds
from verl_multiturn.replay.calls import DivergedError, ReplayDifference
from verl_multiturn.replay.engine import RecordedGeneration, generations_of, with_images, within
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.limits import StopReason

_SETTLE_S = 60.0
_SPINS = 50
"""Turns of the event loop after which a thread is waited for that renders a prompt."""


@dataclass
class _RecordedIds(CallIds):
    """The ids that calls had."""

    recorded: list[str] = field(default_factory=list)
    """Those of the generation that is read now."""

    def named(self, calls: Sequence[Any]) -> list[ToolCall]:
        """Return the calls with their recorded ids, as far as there are any."""
        if len(calls) != len(self.recorded):
            return super().named(calls)
        return [replace(call, id=id_) for id_, call in zip(self.recorded, calls, strict=True)]


class _GatedSession(AgentSession):
    """A session in which requests whose prompts are there wait until they may take samples, as they did."""

    def __init__(self, name: str, run: ProxyRun, sampling: Mapping[str, Any]) -> None:
        super().__init__(name, run, sampling)
        self._gates: dict[int, asyncio.Future[None]] = {}
        self._held: set[int] = set()

    def gate(self, request: ChatRequest) -> None:
        """Let a request wait, before it begins."""
        self._gates[id(request)] = asyncio.get_running_loop().create_future()

    def release(self, request: ChatRequest) -> None:
        """Let a request go on."""
        gate = self._gates.get(id(request))
        if gate is not None and not gate.done():
            gate.set_result(None)
            self._held.discard(id(request))

    def is_waiting(self, request: ChatRequest) -> bool:
        """Return whether a request waits for its samples."""
        return id(request) in self._held

    async def _prompt(self, request: ChatRequest) -> PromptNode:
        prompt = await super()._prompt(request)
        gate = self._gates.get(id(request))
        if gate is not None and not gate.done():
            self._held.add(id(request))
            await gate
        return prompt


class RecordedSession:
    """A session that is replayed, and the `RecordedEngine` of its turns.

    Args:
        record: Its record.
        run: The state that sessions share.
        is_changed: As in `RecordedTurns`.
    """

    def __init__(self, record: Mapping[str, Any], run: ProxyRun, is_changed: bool = False) -> None:
        requests = record["session"]["requests"]
        if any(request["refused"] == ENGINE_AWAY for request in requests):  # a gateway's session, which went on
            run = replace(run, outlives_engine=True)
        self._record, self._run = record, run
        self._is_changed = is_changed
        self._generations = generations_of(record)
        self._given = 0
        self._pending: list[tuple[Ask, asyncio.Future[Generation]]] = []
        self._ids = _RecordedIds()
        self._deliveries: dict[int, Delivery] = {}
        self._relayed: dict[int, JournalEntry] = {}
        self.session = _GatedSession(str(record["request_id"]), run, record["sampling"])
        self.session.name_calls_by(self._ids)

    async def answer(self, ask: Ask) -> Generation:
        """Wait until the generation is due that answers a question."""
        made: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        asked = (ask, made)
        self._pending.append(asked)
        try:
            return await made
        finally:
            if asked in self._pending:
                self._pending.remove(asked)

    async def play(self) -> None:
        """Send all requests, until the agent's end.

        Raises:
            DivergedError: The session asks for an unrecorded generation, or does not ask for a recorded one.
        """
        part = self._record["session"]
        requests, events = part["requests"], part["events"]
        begun = {number for kind, number, _ in events if kind == "request"}
        for number, request in enumerate(requests):
            if number not in begun:  # it could not be read
                self.session.journal.refuse(request["protocol"], request["refused"] or "")
        for kind, number, generations in events:
            await self._sample(generations)
            if kind == "request":
                later = {what for what, which, _ in events if which == number}
                await self._begin(number, requests[number], is_gated=bool(later & {"samples", "left"}))
            elif kind == "samples":
                await self._release(number)
            else:
                if requests[number]["refused"] == ENGINE_AWAY:
                    await self._lose(number)
                self._told(number, kind == "delivered")
                await self._release(number)
        await self._sample(len(self._generations))
        await self._fail()

    async def close(self) -> None:
        """End the session, however far it came."""
        self.session.returned()
        await self.session.closed()

    def end(self) -> AgentEnd:
        """Return how the recorded agent ended, with the rewards that it gave."""
        part, nodes = self._record["session"], self.session.forest.completions.values()
        earned = {node.completion.id: self._record["generations"][node.number]["reward"] for node in nodes}
        rewards = {name: float(reward) for name, reward in earned.items() if reward is not None}
        kind: EndKind = part["end"] or "returned"
        whole = None if kind != "returned" or part["reward"] is None else float(part["reward"])
        by_role = {role: float(reward) for role, reward in part.get("rewards", {}).items()}
        return AgentEnd(kind, AgentResult(whole, rewards, part["by_id"], by_role), part["problem"])

    async def _release(self, number: int) -> None:
        """Let a request take its samples."""
        if (delivery := self._deliveries.get(number)) is not None:
            self.session.release(delivery.request)
            await self._settle()

    async def _begin(self, number: int, request: Mapping[str, Any], is_gated: bool) -> None:
        if request["refused"] is not None and not request["messages"] and not request["generations"]:
            # The session was over, so its messages were not looked at.
            self.session.journal.refuse(request["protocol"], request["refused"])
            return
        asked = self._request(number, request)
        if opponent := request.get("opponent"):  # its answers are no generations
            noted = self._relayed[number] = self.session.journal.begin(asked, request["protocol"])
            noted.messages, noted.opponent, noted.said = asked.messages, opponent, request["said"]
            return
        if request["protocol"] == COUNT:
            with contextlib.suppress(RefusedError):
                await self.session.count_tokens(asked)
            return
        if is_gated:
            self.session.gate(asked)
        self._deliveries[number] = self.session.begin(asked)
        await self._settle()

    def _request(self, number: int, raw: Mapping[str, Any]) -> ChatRequest:
        messages: list[Message] = [*with_images(raw["messages"])]
        if raw["shared"]:
            node = self.session.forest.ledger[raw["parent"]].node
            before = [] if node is None else [*node.prompt.conversation, node.said]
            if len(before) != raw["shared"]:
                where = f"session.requests[{number}].parent"
                raise DivergedError(ReplayDifference(raw["parent"], where, None, raw["shared"], len(before)))
            messages = [*before, *messages]
        tools, wishes = raw["tools"], raw["wishes"]
        if isinstance(tools, int):
            tools = self._record["session"]["requests"][tools]["tools"]
        return ChatRequest(
            messages,
            tools or (),
            n=wishes.get("n", 1),
            stop=wishes.get("stop", ()),
            max_tokens=wishes.get("max_tokens"),
            reads_calls=wishes.get("tool_choice") != "none",
            unenforced=wishes.get("unenforced", ()),
            model=raw.get("role") or "",
            protocol=raw["protocol"],
        )

    def _told(self, number: int, got: bool) -> None:
        """Inform the session of an answer's fate."""
        if (noted := self._relayed.get(number)) is not None:
            self.session.journal.told(noted, got)
        delivery = self._deliveries.get(number)
        if delivery is None:
            return
        if not got:
            delivery.undelivered()
            return
        task = delivery.task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            raise DivergedError(ReplayDifference(None, f"session.requests[{number}].delivered", None, True, False))
        delivery.delivered()

    async def _sample(self, count: int) -> None:
        """Let the engine return its generations until there are so many."""
        while self._given < count:
            recorded = self._generations[self._given]
            made, asked = self._matching(recorded)
            self._given += 1
            self._ids.recorded = list(self._record["generations"][recorded.number].get("call_ids") or ())
            asked.set_result(made)
            await self._settle()

    def _matching(self, recorded: RecordedGeneration) -> tuple[Generation, asyncio.Future[Generation]]:
        """Return a recorded generation, and who waits for it."""
        first: ReplayDifference | None = None
        lane = f"{self.session.id}.{self._record['generations'][recorded.number].get('lane')}"
        # The same may be requested twice at once; then the lanes decide which of the two this is.
        for ask, asked in sorted(self._pending, key=lambda each: each[0].request_id != lane):
            difference = recorded.difference(ask)
            if difference is None:
                return recorded.made, asked
            if self._is_changed and difference.field == "generations.max_tokens":
                return within(recorded.made, ask, difference), asked
            first = first or difference
        raise DivergedError(
            first or ReplayDifference(recorded.number, "generations", None, "it was asked for", "nobody asks")
        )

    async def _lose(self, number: int) -> None:
        """Let the engine fail at what a request still asks for: it was away."""
        delivery = self._deliveries.get(number)
        while delivery is not None and delivery.task is not None and not delivery.task.done():
            prompt = delivery.prompt
            lost = [each for each in self._pending if prompt is not None and list(each[0].ids) == list(prompt.ids)]
            if not lost:
                return
            self._pending.remove(lost[0])
            lost[0][1].set_exception(EngineError("it was away"))
            await self._settle()

    async def _fail(self) -> None:
        """Let the engine fail where it failed for good."""
        while self._pending and self._record["stop_reason"] == StopReason.ENGINE_ERROR:
            _, asked = self._pending.pop(0)
            asked.set_exception(EngineError(self._record["error"]))
            await self._settle()

    async def _settle(self) -> None:
        """Let the session do everything that it can do before the engine's next answer."""
        until, spins = asyncio.get_running_loop().time() + _SETTLE_S, 0
        while spins < 3 or not self._is_settled():
            await asyncio.sleep(0 if spins < _SPINS else 0.001)
            spins += 1
            if asyncio.get_running_loop().time() > until:
                raise DivergedError(
                    ReplayDifference(None, "session", None, "it went on", f"it stands still for {_SETTLE_S} s")
                )

    def _is_settled(self) -> bool:
        open_samples = set()
        for delivery in self._deliveries.values():
            if delivery.task is None or delivery.task.done() or self.session.is_waiting(delivery.request):
                continue
            if delivery.gone and not delivery.samples:
                continue
            open_samples |= {sample.task for sample in delivery.samples if not sample.task.done()}
            if not delivery.samples or all(sample.task.done() for sample in delivery.samples):
                return False
        return len(self._pending) >= min(len(open_samples), self._run.max_inflight)
