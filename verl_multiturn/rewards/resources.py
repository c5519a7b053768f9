"""Processes and clients that rewards share, one set for each event loop.

They are opened at their first use and kept until `aclose`. verl ends its reward workers without notice. The processes
then end by themselves, because their sockets close.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol, TypeVar

from verl_multiturn.calls.per_loop import PerLoop


class _Closable(Protocol):
    def close(self) -> Awaitable[None]: ...


Resource = TypeVar("Resource", bound=_Closable)

_resources: PerLoop[Any] = PerLoop(lambda resource: resource.close())


def shared(key: Hashable, open_resource: Callable[[], Resource]) -> Resource:
    """Return the running event loop's resource of a key; open it at the first call.

    Args:
        key: Names the resource, its options included.
        open_resource: Makes the resource, without waiting for anything.
    """
    resource: Resource = _resources.get(open_resource, key)
    return resource


async def aclose() -> None:
    """Close all resources of the running event loop; the next reward opens new ones."""
    await _resources.aclose()
