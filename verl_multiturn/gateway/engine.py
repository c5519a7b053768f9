"""`DeployedEngine`: SGLang over HTTP, whose weights change while it serves.

    agent ─▶ session ─▶ DeployedEngine ─▶ /generate
                             ▲ paused() … deployed()
                          Deployer ─▶ /update_weights_from_disk

Invariants:
- a token has the version of the weights that the server named when it sampled it, an index into `models`; weights that
  nobody deployed here are an `EngineError`, and the server is not ready any more. The same holds if the server has
  loaded another folder under the old name, as `/update_weights_from_disk` without a `weight_version` does;
- while it is paused, no generation is under way and none begins;
- a generation that a pause interrupts goes on after it, from the tokens that it has; nothing of it is lost or twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.rollout.engines.http_engine import GenerateEngine
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.life import stopped

_ABORT_S = 5.0
"""Seconds in which the server returns the tokens of interrupted generations; later ones are sampled anew."""
_AGAIN_S = 0.25
"""Seconds until the next order to stop one: the server ignores an order for a request that it has not read yet."""

_LOAD_S = 1800.0
"""Seconds in which the server has to load a model."""


@dataclass(eq=False)
class _Part:
    """A request to the server, for a whole generation or its rest."""

    rid: str
    task: asyncio.Task[Generation]
    is_cut: bool = False
    """Whether a pause interrupts it."""


class DeployedEngine(GenerateEngine):
    """SGLang's `/generate`, with the weights that were deployed one after the other.

    Args:
        url: Address of the server.
        first: Hash of the weights, with which the server was started (`--weight-version`).
        options: As `HttpEngine` has them.
    """

    def __init__(self, url: str, first: str, **options: Any) -> None:
        super().__init__(url, first, **options)
        self.models = [first]
        """Hashes of the weights that were deployed here, in order; a token's version is an index into them."""
        self.fault = ""
        """Why the server's weights are not known any more, so that nothing is sampled; "" while they are."""
        self._foreign = ""
        """The weights that the last answer named, where nobody deployed them here."""
        self._place: str | None = None
        """The folder that the server reports as its model's; None: it has not yet, or reports none."""
        self._look_lock = asyncio.Lock()
        self._looked = 0.0
        """When the last question for this folder was sent (`time.monotonic`)."""
        self._loads = 0
        """Beginnings and ends of loading; while it is odd, the folder is none that can be compared."""
        self._open = asyncio.Event()
        self._open.set()
        self._parts: set[_Part] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> str:
        """Return the hash of the weights that serve now."""
        return self._weights

    @property
    def underway(self) -> int:
        """Return the number of generations at the server."""
        return len(self._parts)

    async def generate(self, ask: Ask) -> Generation:
        """Sample as `Engine.generate` describes, over pauses.

        Raises:
            EngineError: There is no answer, or one of weights that were not deployed here.
        """
        made: Generation | None = None
        while True:
            while not self._open.is_set():
                with stopped():
                    await self._open.wait()
            if self.fault:
                raise EngineError(self.fault)
            part, is_cut = await self._part(_rest(ask, made))
            made = _joined(made, part)
            if made is not None and (not is_cut or made.finish != "abort"):
                return made
            if made is not None and len(made.ids) >= ask.max_new_tokens:
                return replace(made, finish="length")

    async def _part(self, ask: Ask) -> tuple[Generation | None, bool]:
        """Let the server sample, and return its tokens and whether a pause cut it; None: it returned none in time."""
        rid = uuid4().hex
        part = _Part(rid, asyncio.ensure_future(self._sample(ask, rid)))
        self._parts.add(part)
        self._idle.clear()
        try:
            return await asyncio.shield(part.task), part.is_cut
        except EngineError:
            if part.is_cut and not (self.lost or self.fault):  # a server may answer an order to stop with an error
                return None, True
            raise
        except asyncio.CancelledError:
            if part.is_cut and part.task.cancelled() and not _is_cancelled():
                return None, True
            part.task.cancel()
            await asyncio.wait({part.task})
            raise
        finally:
            self._parts.discard(part)
            if not self._parts:
                self._idle.set()

    @asynccontextmanager
    async def paused(self, drain_s: float) -> AsyncIterator[int]:
        """Begin no generation until the block ends, which is entered when none is under way.

        Yields the number of generations that were interrupted; they go on when the block has ended.

        Args:
            drain_s: Seconds in which running ones may end; then they are interrupted.

        Raises:
            RuntimeError: It is paused already.
        """
        if not self._open.is_set():
            raise RuntimeError("the engine is paused already")
        self._open.clear()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
            yield await self._cut()
        finally:
            self._open.set()

    async def _cut(self) -> int:
        """Interrupt the running generations, wait until none is at the server, and return their number."""
        parts = list(self._parts)
        for part in parts:
            part.is_cut = True
        until = time.monotonic() + _ABORT_S
        while (running := [part for part in parts if not part.task.done()]) and time.monotonic() < until:
            await asyncio.gather(*(self._stop(part.rid) for part in running))
            await asyncio.wait([part.task for part in running], timeout=_AGAIN_S)
        for part in parts:
            part.task.cancel()  # of one that has ended it does nothing
        await self._idle.wait()
        return len(parts)

    def expect(self, weights: str) -> None:
        """Take answers of weights that are about to be loaded, too; called in a pause.

        Args:
            weights: Their hash. It becomes the last of `models` where it is new there.
        """
        if weights not in self.models:
            self.models.append(weights)
        self._weights = weights

    async def sample_alone(self, ask: Ask) -> Generation:
        """Sample in a pause, with the weights that were loaded last.

        Raises:
            EngineError: As `generate`.
        """
        return await self._sample(ask, uuid4().hex)

    async def load(self, path: str, weights: str) -> None:
        """Let the server load a model's weights in the place of its own; called in a pause.

        Args:
            path: The folder, as the server reads it.
            weights: Their hash, which its answers name from then on.

        Raises:
            EngineError: It has not loaded them.
        """
        body = {"model_path": path, "weight_version": weights, "flush_cache": True, "abort_all_requests": False}
        self._loads += 1
        try:
            # Not watched as generations are: a large model takes minutes, in which the server answers nothing else.
            async with asyncio.timeout(_LOAD_S), self._answer("/update_weights_from_disk", body) as response:
                answer = await self._read(response)
        except TimeoutError:
            raise EngineError(f"{self.url} has not loaded {path!r} in {_LOAD_S:.0f} s") from None
        finally:
            self._loads += 1
        if answer.get("success") is not True:
            raise EngineError(f"{self.url} did not load {path!r}: {show(answer.get('message'), 300)}")
        if self._place is not None:
            self._place = path

    async def look(self) -> str:
        """Return why the server cannot serve now, as when somebody else has swapped its weights; "" if it can.

        A server that was away serves again once it answers with the weights that were deployed last. The gateway calls
        it from time to time.
        """
        if self._open.is_set() and not self.fault:
            try:
                await self.check()
                await self._check_place()
            except (ConfigError, EngineError) as error:
                return str(error)
            self._foreign = ""
            if self.lost and await self.answered():
                self.revive()
        return self.lost or self.fault or self._foreign

    def restart(self) -> None:
        """Take requests again: the server was started anew with the weights that were deployed last."""
        self.fault = self._foreign = ""
        self._place = None
        self.revive()

    async def _sample(self, ask: Ask, rid: str) -> Generation:
        made = await super()._sample(ask, rid)
        await self._check_place()
        return made

    async def _check_place(self) -> None:
        """Refuse what a server has sampled until now if it has loaded a folder that was not deployed here.

        One question serves all generations that ended before it was sent.

        Raises:
            EngineError: It has, or it does not answer.
        """
        ended = time.monotonic()
        async with self._look_lock:
            if self._looked > ended:
                return
            sent, loads = time.monotonic(), self._loads
            found = (await self._get("/get_model_info")).get("model_path")
            if not isinstance(found, str) or loads % 2 or loads != self._loads:
                return
            self._looked = sent
        if self._place is None:
            self._place = found
        if found != self._place:
            self.fault = (
                f"{self.url} has loaded {found!r}, which was not deployed here, under the name of {self._place!r}; "
                "deploy a model anew, so that its hash is known"
            )
            raise EngineError(self.fault)

    def _version(self, weights: Any) -> int:
        if weights not in self.models:
            self._foreign = f"{self.url} serves the weights {weights!r}, which were not deployed here"
            raise EngineError(
                f"the weights {weights!r} sampled it, and those deployed here are {', '.join(self.models)}; "
                "deploy a model anew, so that its hash is known"
            )
        return self.models.index(weights)


def _rest(ask: Ask, made: Generation | None) -> Ask:
    """Return the question that goes on with the tokens that were sampled."""
    if made is None or not made.ids:
        return ask
    left = ask.max_new_tokens - len(made.ids)
    return replace(ask, ids=[*ask.ids, *made.ids], max_new_tokens=left)


def _joined(made: Generation | None, part: Generation | None) -> Generation | None:
    """Return the tokens of a generation so far, with those of its next part."""
    if made is None or part is None:
        return made or part
    return replace(
        part,
        ids=made.ids + part.ids,
        logprobs=made.logprobs + part.logprobs,
        versions=made.versions + part.versions,
        cached=made.cached,
    )


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
