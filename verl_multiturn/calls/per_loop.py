"""`PerLoop`: resources that each event loop owns, such as a pool of connections or the processes of an environment.

Invariants:
- a resource is opened at its first use on an event loop, and two event loops never see the same one;
- it is closed on its event loop: by name, with all others of that loop, or when the last conversation that entered has
  gone. The resources of a closed event loop are let go when another one begins;
- with `counted`, nothing is opened while no conversation is there: it would never be closed;
- `enter` and `get` never wait, so that they cannot be cancelled halfway. The resources of another event loop raise into
  neither;
- `leave` is safe for a conversation that never entered, because its `create` was cancelled before it ran.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from verl_multiturn.describe import describe

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _OfLoop(Generic[T]):
    resources: dict[Hashable, T] = field(default_factory=dict)
    conversations: set[str] = field(default_factory=set)


class PerLoop(Generic[T]):
    """Resources for each event loop, by a key where it has several.

    For one that conversations share, a tool calls `enter` in its `create`, `get` in `execute`, `leave` in `release`.

    Args:
        close: Closes a resource; called on the event loop that used it.
        let_go: Ends the resources of a closed event loop without waiting; None: the garbage collector does.
        counted: Whether resources are open only while a conversation is that called `enter`.
    """

    def __init__(
        self,
        close: Callable[[T], Awaitable[None]],
        let_go: Callable[[T], None] | None = None,
        *,
        counted: bool = False,
    ) -> None:
        self._close = close
        self._let_go = let_go
        self._counted = counted
        self._of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop[T]] = weakref.WeakKeyDictionary()

    def get(self, open_resource: Callable[[], T], key: Hashable = None) -> T:
        """Return a resource of the running event loop.

        Args:
            open_resource: Opens it, if it is not open yet.
            key: Names it among those of its event loop.

        Raises:
            RuntimeError: With `counted`, no conversation that called `enter` is still there.
        """
        of_loop = self._of_loop()
        if self._counted and not of_loop.conversations:
            raise RuntimeError(
                "no conversation is open on this event loop; call it between `create` and `release`, and from a "
                "`create` or `start` of your own call that of the class you derive from"
            )
        if key not in of_loop.resources:
            of_loop.resources[key] = open_resource()
        return of_loop.resources[key]

    def everywhere(self) -> list[T]:
        """Return the resources of all event loops."""
        of_loops = [self._of_loops.get(loop) for loop in self._loops()]
        return [resource for of_loop in of_loops if of_loop is not None for resource in of_loop.resources.values()]

    async def close(self, key: Hashable = None) -> None:
        """Close a resource of the running event loop, if it is open.

        Args:
            key: As in `get`.
        """
        of_loop = self._of_loops.get(asyncio.get_running_loop())
        if of_loop is not None and key in of_loop.resources:
            await self._close(of_loop.resources.pop(key))

    async def aclose(self) -> None:
        """Close all resources of the running event loop; then raise the first error, or cancellation, of them."""
        of_loop = self._of_loops.pop(asyncio.get_running_loop(), None)
        errors: list[BaseException] = []
        for resource in of_loop.resources.values() if of_loop is not None else ():
            try:
                await self._close(resource)
            except BaseException as error:  # the others are closed first: they are no longer known anywhere
                errors.append(error)
        if errors:
            raise errors[0]

    def enter(self, conversation: str) -> None:
        """Count a conversation of the running event loop.

        Args:
            conversation: Its id.
        """
        self._of_loop().conversations.add(conversation)

    async def leave(self, conversation: str) -> None:
        """Stop counting a conversation; the last one of the event loop closes its resources.

        Args:
            conversation: Its id.
        """
        of_loop = self._of_loops.get(asyncio.get_running_loop())
        if of_loop is None:
            return
        of_loop.conversations.discard(conversation)
        if not of_loop.conversations:
            await self.aclose()

    def _of_loop(self) -> _OfLoop[T]:
        loop = asyncio.get_running_loop()
        if (found := self._of_loops.get(loop)) is None:
            for other in self._loops():
                left = self._of_loops.pop(other, None) if other.is_closed() else None
                if left is not None:
                    self._let_go_of(left)
            found = self._of_loops[loop] = _OfLoop()
        return found

    def _let_go_of(self, left: _OfLoop[T]) -> None:
        """End the resources of a closed event loop; an error of it is not the caller's."""
        if (let_go := self._let_go) is None:
            return
        for resource in left.resources.values():
            try:
                let_go(resource)
            except Exception as error:  # of another loop's resource: no error of the caller's
                logger.warning("what a closed event loop has left cannot be closed: %s", describe(error))

    def _loops(self) -> list[asyncio.AbstractEventLoop]:
        return [loop for reference in self._of_loops.keyrefs() if (loop := reference()) is not None]
