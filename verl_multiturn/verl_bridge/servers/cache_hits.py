"""`CacheHits`: what SGLang says of its prefix cache, which verl 0.9.1's server leaves out of its output.

verl's server asks SGLang's tokenizer manager for a generation and keeps its tokens alone. `AsyncSGLangServer` puts this
class in the manager's place, in its own attribute; SGLang and its HTTP server keep theirs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

CACHED = "num_cached_tokens"
"""Field of an output: number of the prompt's ids that were in the engine's prefix cache. The name is verl's."""


class CacheHits:
    """A tokenizer manager of SGLang that notes how much of each prompt was cached; all else is the manager's own."""

    _manager: Any
    _cached: dict[str, int]
    """Number of cached ids by request id, until it is taken."""

    def __init__(self, manager: Any) -> None:
        # `__setattr__` is the manager's.
        self.__dict__.update(_manager=manager, _cached={})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_manager"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_manager"], name, value)

    def generate_request(self, asked: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Generate as SGLang does, and note what it says of the cache."""
        return _Noted(self._manager.generate_request(asked, request), self._cached, asked.rid)

    def take(self, request_id: str) -> int | None:
        """Return how many ids of a generation's prompt were cached, and forget it; None where SGLang did not say."""
        cached: int | None = self._cached.pop(request_id, None)
        return cached


class _Noted(AsyncIterator[dict[str, Any]]):
    """SGLang's outputs of one request; `cached` gets what the last one says."""

    def __init__(self, outputs: AsyncIterator[dict[str, Any]], cached: dict[str, int], request_id: str) -> None:
        self._outputs, self._cached, self._request_id = outputs, cached, request_id

    async def __anext__(self) -> dict[str, Any]:
        output = await anext(self._outputs)
        if (cached := output.get("meta_info", {}).get("cached_tokens")) is not None:
            self._cached[self._request_id] = int(cached)
        return output
