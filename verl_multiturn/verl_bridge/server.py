"""`AsyncSGLangServer`: verl's SGLang server with quick pauses and with versions that are certain.

What it adds:
- a pause ends as soon as the last generation has stopped; SGLang's own loop looks once a second;
- a generation is asked for only while the server is not paused, so that all its tokens have the weight version that
  the server had when it began;
- a server that leaves the load balancer refuses generations, where verl's lets them wait;
- a single generation can be stopped.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.managers.io_struct import ContinueGenerationReqInput
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from verl_multiturn.verl_bridge.admission import PAUSED, Admission

# Seconds after which generations that still run are told once more to stop. SGLang forgets the order for those that
# had not reached its scheduler.
_AGAIN_S = 0.005


class AsyncSGLangServer(SGLangHttpServer):
    """The server of `rollout.name=sglang_async`, which runs in a Ray actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._admission = Admission()

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """Sample as verl's server does; return without a token where the server is paused.

        `extra_fields["global_steps"]` of the output is the version of the weights that sampled all its tokens.
        `extra_fields["paused"]` tells whether the server is paused.
        """
        version = self.global_steps
        if not self._admission.enter():
            return TokenOutput(
                token_ids=[], log_probs=[], stop_reason="abort", extra_fields={"global_steps": version, PAUSED: True}
            )
        try:
            output: TokenOutput = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._admission.leave()
        output.extra_fields["global_steps"] = version
        output.extra_fields[PAUSED] = not self._admission.is_open
        return output

    async def resumed(self) -> bool:
        """Wait until the server samples again, and return True; return False when it leaves the load balancer."""
        return await self._admission.opened()

    async def abort_request(self, request_id: str) -> None:
        """Stop the generation of this id, which then returns what it has; do nothing where there is none."""
        self.tokenizer_manager.abort_request(request_id)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop all generations, and let none begin until `resume_generation`.

        Args:
            reject_request: whether the server leaves the load balancer, so that nobody should wait for it.
        """
        if self.node_rank != 0:
            return
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
        await self.tokenizer_manager.continue_generation(ContinueGenerationReqInput())
        self._admission.open()
