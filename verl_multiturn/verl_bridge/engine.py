"""The engine protocol over verl's own generation server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engine import Finish, Generation
from verl_multiturn.rollout.trajectory import NO_VERSION
from verl_multiturn.tasks import finish

_FINISH: dict[str | None, Finish] = {"stop": "stop", "completed": "stop", "length": "length"}


class VerlEngine:
    """An `Engine` that asks verl for tokens.

    Args:
        generate: `(request_id=…, prompt_ids=…, sampling_params=…) -> TokenOutput`: `LLMServerClient.generate`, or a
            server actor's own method.
    """

    def __init__(self, generate: Callable[..., Awaitable[Any]]) -> None:
        self._generate = generate

    async def generate(
        self, request_id: str, ids: Sequence[int], sampling: Mapping[str, Any], max_new_tokens: int
    ) -> Generation:
        params = {**sampling, "logprobs": True, "max_new_tokens": max_new_tokens}
        try:
            # verl has no way to stop a single generation, and an engine must not be put to sleep while one runs: a
            # cancelled request waits for its end, which its token budget bounds.
            output = await finish(asyncio.ensure_future(self._ask(request_id, list(ids), params)))
        except Exception as error:  # Ray, HTTP and SGLang each raise their own; a failed engine ends one request
            raise EngineError(f"{type(error).__name__}: {error}") from error
        sampled = list(output.token_ids)
        logprobs = list(output.log_probs or [])
        if len(logprobs) != len(sampled):
            raise EngineError(f"{len(sampled)} ids came with {len(logprobs)} logprobs")
        return Generation(
            ids=sampled,
            logprobs=logprobs,
            versions=_versions(output.extra_fields, len(sampled)),
            finish=_FINISH.get(output.stop_reason, "abort"),
        )

    async def _ask(self, request_id: str, ids: list[int], params: dict[str, Any]) -> Any:
        # A Ray reference can be awaited and is no coroutine; this makes either one.
        return await self._generate(request_id=request_id, prompt_ids=ids, sampling_params=params)


def _versions(extra_fields: Mapping[str, Any], count: int) -> list[int]:
    """A version for each token.

    A request that was interrupted and resumed spans several versions, of which verl reports the first and the last: the
    last token is the last version's, all before it are put down to the first, so that staleness is never understated.
    """
    first = extra_fields.get("min_global_steps", extra_fields.get("global_steps"))
    last = extra_fields.get("max_global_steps", first)
    if first is None or last is None:
        return [NO_VERSION] * count
    return [*[int(first)] * (count - 1), int(last)][:count]
