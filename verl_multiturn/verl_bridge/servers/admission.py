"""`Admission`: whether a generation server takes new generations, and how many it is running.

`AsyncSGLangServer` has one. Each generation enters and leaves it; a pause for new weights closes it, asks SGLang to
stop them all, and waits until it is empty. A generation that comes during a pause is refused at once: the client, not
the server, keeps the tokens so far, and waits with `opened` (the server's method `resumed`) until it may ask
again.
"""

from __future__ import annotations

import asyncio
import contextlib

PAUSED = "paused"
"""Field of a generation's output: whether its server is paused."""


class Admission:
    """The count of running generations of a server, and whether more are let in.

    It is in one of three states: open; closed for a pause; closed because the server leaves the load balancer, so that
    a client that waits in `opened` has to look for another server.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0
        self._leaves = False

    @property
    def is_open(self) -> bool:
        """Return whether generations are let in."""
        return self._is_open

    @property
    def leaves(self) -> bool:
        """Return whether the server leaves the load balancer."""
        return self._leaves

    def enter(self) -> bool:
        """Let a generation in, and return True; return False when the door is closed."""
        if not self._is_open:
            return False
        self._inside += 1
        self._empty.clear()
        return True

    def leave(self) -> None:
        """Note that a generation that was let in has ended."""
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    def close(self, *, leaves: bool = False) -> None:
        """Admit no generation until `open`.

        Args:
            leaves: Whether the server leaves the load balancer, so that no client should wait for it.
        """
        self._is_open = False
        self._leaves = leaves
        self._change()

    def open(self) -> None:
        """Let generations in again."""
        self._leaves = False
        self._is_open = True
        self._change()

    async def opened(self, patience_s: float = 0.0) -> bool:
        """Wait until the door is open, and return True; return False as soon as the server leaves.

        Args:
            patience_s: Seconds for which a server that leaves is given time to come back.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as patience:
                while not self._is_open:
                    if self._leaves and patience.when() is None:
                        patience.reschedule(asyncio.get_running_loop().time() + patience_s)
                    await self._changed.wait()
        return self._is_open

    async def emptied(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds until no generation is inside; return whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._empty.is_set()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
