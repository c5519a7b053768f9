"""The server side of `rollout.name=sglang_async`.

Import this module only through verl's replica registry. On a driver without an accelerator, verl's loader of "sglang"
has to prepare the import of SGLang first (`plugin.py` takes care of that).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import ray
from ray.exceptions import RayActorError
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from verl_multiturn.describe import describe
from verl_multiturn.verl_bridge.servers.server import AsyncSGLangServer

logger = logging.getLogger(__name__)

# Most calls that a server runs at once. Ray holds up the others, among them that which ends a pause.
_CALLS = 100_000
# Seconds after which a server that does not answer is ended.
_HUNG_S = 300.0
# Seconds that a pause and the like may take; a server that takes longer is ended.
_CONTROL_S = 600.0
# Seconds in which a server must start.
_START_S = 1800.0


class AsyncSGLangReplica(SGLangReplica):
    """verl's SGLang servers of our class; `AsyncSGLangRollout` finds them under the names that verl gives them.

    A replica is one server, or one on each of several nodes. One that has died, or that hangs, `serves` no more: it is
    skipped in pauses and the like, without an error, so that the other replicas go on. Its workers stay, and take part
    in transfers of weights (`server_loss.py`), so that nothing about these has to be built anew.

    Attributes:
        serves: Whether the replica takes part. `restart` does not set it again: its caller does, when the replica
            may be paused and the like.
        heard: Time of the latest question that all its servers have answered (`time.monotonic`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(AsyncSGLangServer)
        self.serves = True
        self.heard = 0.0
        self.servers: list[Any]
        self._asked: tuple[float, list[Any]] | None = None
        """Time of the last liveness question to the servers, and Ray's references of the answers."""

    @property
    def max_concurrency(self) -> int:
        """Return how many calls a server runs at once: more than there are conversations.

        verl's number is 1000, or little more than `max_num_seqs`. During a pause every conversation that wants to
        sample waits in a call. With as many of them, the call that ends the pause would wait behind them forever.
        """
        return max(_CALLS, int(super().max_concurrency))

    def look(self, wait_s: float = 0.0) -> bool:
        """Return whether the replica serves, as far as is known; ask its servers, unless a question is pending.

        Args:
            wait_s: Seconds to wait for the answers. A later one is seen the next time.
        """
        if self.serves and (self._asked is None or self._answered(0.0)):
            self._asked = time.monotonic(), [server.__ray_ready__.remote() for server in self.servers]
        if self.serves:
            self._answered(wait_s)
        return self.serves

    def _answered(self, wait_s: float) -> bool:
        """Return whether all servers have answered the question."""
        assert self._asked is not None
        since, answers = self._asked
        come, late = ray.wait(answers, num_returns=len(answers), timeout=wait_s)
        try:
            ray.get(come)
        except RayActorError as error:
            self._lose(describe(error))
            return False
        if late and time.monotonic() > since + _HUNG_S:
            self._lose(f"it has not answered for {_HUNG_S:g} s")
        if not late:
            self.heard = since
        return not late

    async def restart(self) -> None:
        """Start the servers of a replica that serves no more again, on the same devices.

        Raises:
            Exception: A server does not start, or the replica's workers are gone, too.
        """
        self.servers = []
        try:
            await asyncio.wait_for(self.launch_servers(), _START_S)
            for worker in self.workers:
                await worker.__ray_call__.remote(lambda it: setattr(it.server_adapter, "_engine", None))
        except BaseException:  # whatever ends the start, no started server must stay; it is raised again
            _end(self.servers)
            raise

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop all generations of this replica, and let none begin until `resume_generation`.

        Args:
            reject_request: Whether requests are refused meanwhile instead of waiting.
        """
        await self._control(self._abort(reject_request))

    async def _abort(self, reject_request: bool) -> None:
        # Only the first node's server speaks to SGLang's scheduler.
        await self.servers[0].abort_all_requests.remote(reject_request=reject_request)

    async def resume_generation(self) -> None:
        """Let generations begin again."""
        await self._control(super().resume_generation())

    async def sleep(self) -> None:
        """Free the memory of weights and cache."""
        await self._control(super().sleep())

    async def wake_up(self) -> None:
        """Take the memory of weights and cache again."""
        await self._control(super().wake_up())

    async def clear_kv_cache(self) -> None:
        """Empty the cache."""
        await self._control(super().clear_kv_cache())

    async def release_kv_cache(self) -> None:
        """Free the memory of the cache."""
        await self._control(super().release_kv_cache())

    async def resume_kv_cache(self) -> None:
        """Take the memory of the cache again."""
        await self._control(super().resume_kv_cache())

    async def _control(self, call: Coroutine[Any, Any, None]) -> None:
        """Let a call to the servers end; leave it out if they are dead, and note it if they die of it or hang."""
        if not self.serves:
            call.close()
            return
        try:
            await asyncio.wait_for(call, _CONTROL_S)
        except RayActorError as error:
            self._lose(describe(error))
        except TimeoutError:
            self._lose(f"a call of it has not ended for {_CONTROL_S:g} s")

    def _lose(self, why: str) -> None:
        first = why.splitlines()[0]
        logger.error("generation server %s (%s) is dead: %s", self.replica_rank, self._server_address, first)
        self.serves, self._asked = False, None
        _end(self.servers)


def _end(servers: list[Any]) -> None:
    for server in servers:
        ray.kill(server)
