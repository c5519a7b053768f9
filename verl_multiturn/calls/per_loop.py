"""`PerLoop`: a resource that the conversations of one event loop share, such as a pool of connections.

Invariants:
- the resource is opened at its first use, and closed when the last conversation that entered has left;
- `enter` and `get` never wait, so that they cannot be cancelled halfway;
- `leave` is safe for a conversation that never entered, because its `create` was cancelled before it ran;
- two event loops never see the same resource.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Use(Generic[T]):
    conversations: set[str] = field(default_factory=set)
    resource: T | None = None


class PerLoop(Generic[T]):
    """A resource for each event loop. Call `enter` in a tool's `create`, `get` in `execute`, `leave` in `release`.

    Args:
        open_resource: Opens the resource; called on the event loop that will use it.
        close_resource: Closes the resource; called on the event loop that used it.
    """

    def __init__(self, open_resource: Callable[[], T], close_resource: Callable[[T], Awaitable[None]]) -> None:
        self._open = open_resource
        self._close = close_resource
        self._uses: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Use[T]] = weakref.WeakKeyDictionary()

    def enter(self, instance_id: str) -> None:
        """Count a conversation of the running event loop."""
        self._uses.setdefault(asyncio.get_running_loop(), _Use()).conversations.add(instance_id)

    def get(self) -> T:
        """Return the resource of the running event loop, opened if it is not yet; only between `enter` and `leave`."""
        use = self._uses[asyncio.get_running_loop()]
        if use.resource is None:
            use.resource = self._open()
        return use.resource

    async def leave(self, instance_id: str) -> None:
        """Stop counting a conversation; the last one of the event loop closes the resource."""
        loop = asyncio.get_running_loop()
        use = self._uses.get(loop)
        if use is None:
            return
        use.conversations.discard(instance_id)
        if use.conversations:
            return
        del self._uses[loop]
        if use.resource is not None:
            await self._close(use.resource)
