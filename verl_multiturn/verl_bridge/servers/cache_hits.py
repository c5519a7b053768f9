"""`CacheHits`: SGLang's report on its prefix cache, which verl 0.9.1's server drops from its output.

verl's server asks SGLang's tokenizer manager for a generation and keeps its tokens alone. `AsyncSGLangServer` puts this
class in the manager's place, in its own attribute; SGLang and its HTTP server keep theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

CACHED = "num_cached_tokens"
"""Field of an output: number of the prompt's ids that were in the engine's prefix cache. The name is verl's."""


# Tokens between two outputs of a request that is streamed: more than any has.
_NEVER = 1 << 30


class CacheHits:
    """A tokenizer manager of SGLang that notes how much of each prompt was cached; all else is the manager's own."""

    _manager: Any
    _cached: dict[str, int]
    """Number of cached ids by request id, until it is taken."""
    _reads: dict[str, asyncio.Event]
    """Set when the prompt of a request has been read, by the id of a watched or awaited one."""
    _watched: set[str]
    _streams: bool
    """Whether the last output of a request that is streamed has all its tokens."""

    def __init__(self, manager: Any) -> None:
        # `__setattr__` is the manager's.
        options = getattr(manager, "server_args", None)
        # The second name is that of older versions.
        is_cut = any(getattr(options, name, False) for name in ("incremental_streaming_output", "stream_output"))
        self.__dict__.update(_manager=manager, _cached={}, _reads={}, _watched=set(), _streams=not is_cut)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_manager"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_manager"], name, value)

    def generate_request(self, asked: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Generate as SGLang does, and note its report on the cache."""
        if asked.rid not in self._watched:
            return _CountedOutputs(self._manager.generate_request(asked, request), self._cached, asked.rid)
        # SGLang sends the first token of a streamed request alone. It never streams the next one.
        asked.stream = True
        asked.sampling_params = {**asked.sampling_params, "stream_interval": _NEVER}
        read = self._reads.setdefault(asked.rid, asyncio.Event())
        return _CountedOutputs(_whole(self._manager.generate_request(asked, request), read), self._cached, asked.rid)

    def watch(self, request_id: str) -> None:
        """Note when the prompt of a request will have been read, which is about to be sent; `take` ends it.

        Nothing is noted where SGLang has to stream new tokens alone, since tokens would be lost.
        """
        if self._streams:
            self._watched.add(request_id)

    async def prefilled(self, request_id: str, wait_s: float) -> bool:
        """Wait until the prompt of a request that is watched has been read, at most `wait_s` seconds."""
        read = self._reads.setdefault(request_id, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await read.wait()
        if request_id not in self._watched:
            self._reads.pop(request_id, None)
        return read.is_set()

    def take(self, request_id: str) -> int | None:
        """Return how many ids of a generation's prompt were cached, and forget it; None if SGLang did not report it."""
        self._watched.discard(request_id)
        if (read := self._reads.pop(request_id, None)) is not None:
            read.set()
        cached: int | None = self._cached.pop(request_id, None)
        return cached


async def _whole(outputs: AsyncIterator[dict[str, Any]], read: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
    """Yield the last output of a request that is streamed, as of one that is not; set `read` with the first.

    Raises:
        ValueError: SGLang refused the request; without streaming it raises this itself.
    """
    async for output in outputs:
        read.set()
        reason = output.get("meta_info", {}).get("finish_reason")
        if reason is None:
            continue
        if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code") is not None:
            raise ValueError(reason.get("message"))
        yield output


class _CountedOutputs(AsyncIterator[dict[str, Any]]):
    """SGLang's outputs of one request; `cached` gets the last one's count."""

    def __init__(self, outputs: AsyncIterator[dict[str, Any]], cached: dict[str, int], request_id: str) -> None:
        self._outputs, self._cached, self._request_id = outputs, cached, request_id

    async def __anext__(self) -> dict[str, Any]:
        output = await anext(self._outputs)
        if (cached := output.get("meta_info", {}).get("cached_tokens")) is not None:
            self._cached[self._request_id] = int(cached)
        return output
