"""The engine protocol over verl's own generation server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl_multiturn.calls.tasks import ended
from verl_multiturn.describe import describe
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Finish, Generation
from verl_multiturn.rollout.trajectory import NO_VERSION
from verl_multiturn.verl_bridge.servers.cache_hits import CACHED
from verl_multiturn.verl_bridge.servers.caches import HELD, LED, USE
from verl_multiturn.verl_bridge.servers.client import SEGMENTS, RolloutClient

_FINISH: dict[str | None, Finish] = {"stop": "stop", "completed": "stop", "length": "length"}


class VerlEngine:
    """An `Engine` that asks verl for tokens.

    A cancellation is passed on to `RolloutClient`, which stops the generation. A client or server of verl cannot stop a
    single generation, so its end is waited for.

    Args:
        generate: `(request_id=…, prompt_ids=…, sampling_params=…) -> TokenOutput`, called also with `image_data=…`
            where there are images. Either a client's `generate`, or the method of a server actor.
    """

    def __init__(self, generate: Callable[..., Awaitable[Any]]) -> None:
        self._generate = generate
        self._stoppable = isinstance(getattr(generate, "__self__", None), RolloutClient)

    async def generate(self, ask: Ask) -> Generation:
        """Sample with verl, as `Engine.generate` describes.

        Raises:
            EngineError: verl's call failed, or did not return one log-probability for each id.
            CancelledError: The task was cancelled before the first token.
        """
        params = {**ask.sampling, "logprobs": True, "max_new_tokens": ask.max_new_tokens}
        given = {"image_data": list(ask.images)} if ask.images else {}

        async def answer() -> Any:
            return await self._generate(
                request_id=ask.request_id, prompt_ids=list(ask.ids), sampling_params=params, **given
            )

        asking = asyncio.ensure_future(answer())
        cancelled = await ended(asking, pass_on=self._stoppable)
        if asking.cancelled():
            raise cancelled or EngineError("verl cancelled the generation")
        if (error := asking.exception()) is not None:  # errors of Ray, HTTP and SGLang; only this request fails
            raise EngineError(describe(error)) from error
        output = asking.result()
        sampled = list(output.token_ids)
        logprobs = list(output.log_probs or [])
        if len(logprobs) != len(sampled):
            raise EngineError(f"{len(sampled)} ids came with {len(logprobs)} logprobs")
        return Generation(
            ids=sampled,
            logprobs=logprobs,
            versions=_versions(output.extra_fields, len(sampled)),
            finish=_FINISH.get(output.stop_reason, "abort"),
            cached=output.extra_fields.get(CACHED),
            held_s=output.extra_fields.get(HELD, 0.0),
            led_s=output.extra_fields.get(LED, 0.0),
            cache_use=output.extra_fields.get(USE),
        )


def _versions(extra_fields: Mapping[str, Any], count: int) -> list[int]:
    """Return a weight version for each of `count` tokens.

    `RolloutClient` reports the version of each attempt. verl's own client reports only the first and the last version
    of an interrupted generation: the last token gets the last version and all tokens before it get the first, so that
    staleness is never understated.
    """
    segments = extra_fields.get(SEGMENTS)
    if segments is not None and sum(tokens for _, tokens in segments) == count:
        return [NO_VERSION if version is None else int(version) for version, tokens in segments for _ in range(tokens)]
    first = extra_fields.get("min_global_steps", extra_fields.get("global_steps"))
    last = extra_fields.get("max_global_steps", first)
    if first is None or last is None:
        return [NO_VERSION] * count
    return [*[int(first)] * (count - 1), int(last)][:count]
