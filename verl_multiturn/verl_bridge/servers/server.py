"""`AsyncSGLangServer`: verl's SGLang server with quick pauses and with versions that are certain.

Additions:
- a pause ends as soon as the last generation has stopped; SGLang's own loop looks once a second;
- a generation is requested only while the server is not paused, so that all its tokens have the weight version that
  the server had when it began;
- a generation that is stopped just at the end of its turn has ended; SGLang calls it aborted, so that it would go on
  behind the end token;
- a server that leaves the load balancer refuses generations, where verl's lets them wait;
- a single generation can be stopped;
- a generation reports how much of its prompt was in SGLang's prefix cache, and when its prompt has been read;
- the server reports the conversations' need of its cache, and is not started with one that no conversation fits in;
- a server dies soon after any of SGLang's processes. SGLang's own watch sends SIGQUIT to the server, which every
  process of a script's background job ignores (`run.sh &`); the server would never answer again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import ContinueGenerationReqInput
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_multiturn.rollout.cache.need import CacheNeed, CacheReport, Conversations, require_room
from verl_multiturn.verl_bridge.compat.engine import cache_tokens
from verl_multiturn.verl_bridge.servers.admission import PAUSED, Admission
from verl_multiturn.verl_bridge.servers.cache_hits import CACHED, CacheHits
from verl_multiturn.verl_bridge.servers.caches import LEADS

logger = logging.getLogger(__name__)

# Seconds after which generations that still run get a second order to stop. SGLang forgets the order for those that
# had not reached its scheduler.
_AGAIN_S = 0.005
# Seconds from the death of one of SGLang's processes to the end of the server. When Ray ends an actor, it first kills
# the actor's children, and then, some 0.03 s later, the actor: a server that is gone by then has died of nothing.
_ENDING_S = 1.0


class AsyncSGLangServer(SGLangHttpServer):
    """The server of `rollout.name=sglang_async`, which runs in a Ray actor."""

    tokenizer_manager: Any
    """SGLang's manager of requests; verl's `launch_server` makes it."""
    _hits: CacheHits | None = None
    """The same, which also counts cached tokens; None before the launch."""
    _need: CacheNeed | None = None
    """The conversations' need of the cache; None if SGLang does not report its size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._admission = Admission()
        # One pause or resumption at a time. A door that opens while SGLang is paused would let generations in that
        # cannot begin, whose end the pause would await in vain.
        self._switching = asyncio.Lock()

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start SGLang as verl does, and end this process soon after one of SGLang's has died."""
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            self._hits = CacheHits(self.tokenizer_manager)
            self.tokenizer_manager = self._hits
            if tokens := await cache_tokens(self.tokenizer_manager):
                require_room(min(tokens), self.config)  # a conversation has to fit into the rank that it is sent to
                self._need = CacheNeed(sum(tokens))
            else:
                logger.warning("SGLang does not say how many tokens its cache holds, so that no turn waits for room")
        loop = asyncio.get_running_loop()
        for process in multiprocessing.active_children():
            loop.add_reader(process.sentinel, _ended, process, loop)

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """Sample as verl's server does; return without a token where the server is paused.

        `extra_fields["global_steps"]` of the output is the version of the weights that sampled all its tokens; None
        where it changed meanwhile, without a pause. `extra_fields["paused"]` is whether the server is paused,
        `extra_fields["num_cached_tokens"]` how many of the prompt's ids were in the cache, where SGLang reports it.
        """
        version = self.global_steps
        ends = self._end_ids(sampling_params)
        leads = sampling_params.pop(LEADS, False)
        if not self._admission.enter():
            return TokenOutput(
                token_ids=[], log_probs=[], stop_reason="abort", extra_fields={"global_steps": version, PAUSED: True}
            )
        if leads and self._hits is not None:
            self._hits.watch(request_id)
        try:
            output: TokenOutput = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._admission.leave()
            cached = None if self._hits is None else self._hits.take(request_id)
        if cached is not None and output.token_ids:  # one that was stopped before its first token has read no prompt
            output.extra_fields[CACHED] = cached
        if output.stop_reason == "abort" and output.token_ids and output.token_ids[-1] in ends:
            output.stop_reason = "stop"
        output.extra_fields["global_steps"] = version if self.global_steps == version else None
        output.extra_fields[PAUSED] = not self._admission.is_open
        return output

    async def prefilled(self, request_id: str, wait_s: float) -> bool:
        """Return True when SGLang has read the prompt of a generation that leads; False when `wait_s` seconds are up.

        Args:
            request_id: Its id, which may come before or after the generation itself.
            wait_s: The most seconds to wait.
        """
        return self._hits is not None and await self._hits.prefilled(request_id, wait_s)

    async def cache_need(self, client: str, conversations: Conversations, full: float) -> CacheReport | None:
        """Return the cache figures for a client, as `CacheNeed.tell` does; None where they are not known.

        A server that leaves lets all turns in, to send them elsewhere.
        """
        if self._need is None:
            return None
        told = self._need.tell(client, conversations, full)
        return told._replace(youngest=math.inf, room=math.inf) if self._admission.leaves else told

    async def resumed(self, patience_s: float = 0.0) -> bool:
        """Wait until the server samples again, and return True; return False when it leaves the load balancer.

        Args:
            patience_s: Seconds for which a server that leaves is given time to come back.
        """
        return await self._admission.opened(patience_s)

    async def abort_request(self, request_id: str) -> None:
        """Stop the generation of this id, which then returns its tokens; do nothing where there is none."""
        self.tokenizer_manager.abort_request(request_id)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop all generations, and let none begin until `resume_generation`.

        Args:
            reject_request: Whether the server leaves the load balancer, so that no client should wait for it.
        """
        if self.node_rank != 0:
            return
        async with self._switching:
            self._admission.close(leaves=reject_request)
            manager = self.tokenizer_manager
            async with manager.is_pause_cond:
                manager.is_pause = True  # holds up requests that come over HTTP
            while True:
                manager.abort_request(abort_all=True)
                if await self._admission.emptied(_AGAIN_S):
                    if not await manager.model_update_lock.is_locked():
                        return
                    await asyncio.sleep(_AGAIN_S)  # requests that came over HTTP are not counted at the door

    async def resume_generation(self) -> None:
        """Let generations begin again."""
        if self.node_rank != 0:
            return
        async with self._switching:
            await self.tokenizer_manager.continue_generation(ContinueGenerationReqInput())
            self._admission.open()

    def _end_ids(self, sampling_params: Mapping[str, Any]) -> set[int]:
        """Return the tokens at which SGLang ends a generation by itself."""
        if sampling_params.get("ignore_eos"):
            return set()
        manager = self.tokenizer_manager
        ends = {*(sampling_params.get("stop_token_ids") or ()), *(manager.model_config.hf_eos_token_id or ())}
        if manager.tokenizer is not None:
            ends |= {manager.tokenizer.eos_token_id, *(manager.tokenizer.additional_stop_token_ids or ())}
        return ends


def _ended(process: multiprocessing.process.BaseProcess, loop: asyncio.AbstractEventLoop) -> None:
    """End this process in a moment, because a child of it has ended."""
    loop.remove_reader(process.sentinel)
    loop.call_later(_ENDING_S, _end_with, process)


def _end_with(process: multiprocessing.process.BaseProcess) -> None:
    """End this process, because a child of it has ended and nothing else has ended this one since."""
    logger.error("SGLang's process %s (%s) has died, and this server with it", process.name, process.pid)
    os._exit(1)
