"""The server side of `rollout.name=sglang_async`.

Import this module only through verl's replica registry. On a driver without an accelerator, verl's loader of "sglang"
has to prepare the import of SGLang first (`plugin.py` takes care of that).
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from verl_multiturn.verl_bridge.server import AsyncSGLangServer

# Most calls that a server runs at once. Ray holds up the others, among them that which ends a pause.
_CALLS = 100_000


class AsyncSGLangReplica(SGLangReplica):
    """verl's SGLang servers of our class; `AsyncSGLangRollout` finds them under the names that verl gives them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(AsyncSGLangServer)

    @property
    def max_concurrency(self) -> int:
        """Return how many calls a server runs at once: more than there are conversations.

        verl's number is 1000, or little more than `max_num_seqs`. During a pause every conversation that wants to
        sample waits in a call. With as many of them, the call that ends the pause would wait behind them for ever.
        """
        return max(_CALLS, int(super().max_concurrency))

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop all generations of this replica, and let none begin until `resume_generation`.

        Args:
            reject_request: whether requests are refused meanwhile instead of waiting.
        """
        # Only the first node's server speaks to SGLang's scheduler.
        await self.servers[0].abort_all_requests.remote(reject_request=reject_request)
