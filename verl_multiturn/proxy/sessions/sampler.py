"""`Sampler`: the generations of one session, from the engine into its forest."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_multiturn.calls.timeline import during
from verl_multiturn.certificate.receipts import Receipt
from verl_multiturn.describe import message_of
from verl_multiturn.errors import EngineError
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion, FinishReason, RefusedError
from verl_multiturn.proxy.sessions.forest import Forest
from verl_multiturn.proxy.sessions.nodes import CompletionNode, Lane, PromptNode, SampledGeneration
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.turn_reading import CallIds, as_message
from verl_multiturn.rollout.engines.protocol import Ask, CacheUse, Generation
from verl_multiturn.rollout.engines.sample import sample
from verl_multiturn.rollout.engines.stop_texts import STOP_REGEX

logger = logging.getLogger(__name__)

ENGINE_AWAY = "engine_away"
"""Code of the refusal while the engine fails in a session that outlives this."""
_AWAY_S = 5
"""Seconds after which its client may repeat the request."""
_ATTEMPTS = 2


class Sampler:
    """A maker of completions, each in a lane of the engine.

    A lane is a request id, under which the engine generates one completion at a time and keeps its cache. A root begins
    a lane; a continuation goes on in its parent's lane, or in a new one where that generates already.

    Args:
        name: Name of the session.
        run: State that all sessions share.
        forest: Where the completions go.
        sampling: Sampling parameters, under the engine's own names.
    """

    def __init__(self, name: str, run: ProxyRun, forest: Forest, sampling: Mapping[str, Any]) -> None:
        self.failed = ""
        """Error of the engine when it failed for good; "" while it did not."""
        self.seconds = 0.0
        """Time that completions waited for the engine, summed."""
        self.cache = CacheUse()
        """How much of the completions' prompts the engine had in its cache."""
        self._name = name
        self._run = run
        self._forest = forest
        self._sampling = dict(sampling)
        self.call_ids = CallIds()
        self._inflight = asyncio.Semaphore(run.max_inflight)
        self._lanes: list[Lane] = []

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the ledger's generations, in its order, and forget them in the engine."""
        of_lanes = {lane.name: self._run.engine.take(lane.name) for lane in self._lanes}
        return [of_lanes[entry.lane.name][entry.index] for entry in self._forest.ledger]

    async def sample(self, prompt: PromptNode, request: ChatRequest) -> CompletionNode:
        """Sample a completion, as soon as fewer than `max_inflight` are being sampled.

        Raises:
            RefusedError: The engine failed twice.
        """
        async with self._inflight:
            lane = self._free_lane(prompt)
            lane.busy = True
            try:
                for attempt in range(_ATTEMPTS):
                    try:
                        return await self._attempt(lane, prompt, request)
                    except EngineError as error:
                        said = message_of(error)
                        logger.warning("session %s: the engine failed (attempt %d): %s", self._name, attempt + 1, said)
            finally:
                lane.busy = False
        if self._run.outlives_engine:
            raise RefusedError(503, ENGINE_AWAY, f"the engine is away ({said}); repeat the request later", _AWAY_S)
        self.failed = self.failed or said
        raise engine_failed(said)

    def _free_lane(self, prompt: PromptNode) -> Lane:
        """Return the lane of the prompt's conversation, or a new one if that generates already."""
        lane = prompt.parent.lane if prompt.parent is not None else prompt.lane
        if lane is None or lane.busy:
            lane = Lane(f"{self._name}.{len(self._lanes)}", len(self._lanes))
            self._lanes.append(lane)
        if prompt.parent is None and prompt.lane is None:
            prompt.lane = lane
        return lane

    async def _attempt(self, lane: Lane, prompt: PromptNode, request: ChatRequest) -> CompletionNode:
        """Call the engine once, and put its completions into the forest."""
        run = self._run
        budget = run.limits.turn_budget(prompt.length - prompt.root.length)
        if request.max_tokens is not None:
            budget = max(1, min(budget, request.max_tokens))
        ids = prompt.ids
        ask = Ask(lane.name, ids, self._sampling_of(request), budget, prompt.images, role=prompt.role)
        started = time.perf_counter()
        try:
            with during("generation") as span:
                sampled = await sample(run.engine, ask)
                span.turn = number = len(self._forest.ledger)
        finally:
            seconds = time.perf_counter() - started
            self.seconds += seconds
        made = sampled.generation
        entry = SampledGeneration(lane, lane.generations, prompt.parent, given=prompt.messages, seconds=seconds)
        entry.finish, entry.cached, entry.role = made.finish, made.cached, prompt.role
        lane.generations += 1
        self._forest.ledger.append(entry)
        if sampled.cancelled is not None:
            entry.cause = "undelivered"
        generation = sampled.whole()
        before = prompt.parent
        known = 0 if before is None else before.prompt.length + len(before.generation.ids) - 1
        self.cache.add(ask, generation, known)
        entry.cause = "undelivered"
        read, stop = await run.reader.read(generation.ids, ids, request)
        calls = self.call_ids.named(read.readable)
        turn = replace(read, calls=calls)
        completion = Completion(
            secrets.token_hex(12),
            turn.content,
            turn.reasoning,
            calls,
            _finish(generation, bool(calls), stop),
            stop,
            len(ids),
            len(generation.ids),
            role=prompt.role,
        )
        message = as_message(turn.content, calls, turn.reasoning)
        echoes = [message]
        if stop is not None:
            echoes.append({**message, "content": turn.content + stop})
        node = CompletionNode(number, prompt, generation, lane, turn, completion, message)
        entry.node = node
        self._forest.add(node, echoes)
        return node

    def _sampling_of(self, request: ChatRequest) -> dict[str, Any]:
        if not request.stop:
            return self._sampling
        return {
            **self._sampling,
            STOP_REGEX: [*self._sampling.get(STOP_REGEX, ()), *(re.escape(stop) for stop in request.stop if stop)],
        }


def _finish(generation: Generation, calls: bool, stop: str | None) -> FinishReason:
    if generation.finish == "length" and stop is None:
        return "length"
    return "tool_calls" if calls else "stop"


def engine_failed(said: str) -> RefusedError:
    """Return the answer to requests of a session in which the engine failed."""
    return RefusedError(400, "engine_failed", f"the engine failed in this session ({said}); end it")
