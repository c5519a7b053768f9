"""The engine protocol over verl's own generation server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from verl_multiturn.describe import describe
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engine import Finish, Generation
from verl_multiturn.rollout.trajectory import NO_VERSION

_FINISH: dict[str | None, Finish] = {"stop": "stop", "completed": "stop", "length": "length"}


class VerlEngine:
    """An `Engine` that asks verl for tokens.

    Args:
        generate: `(request_id=…, prompt_ids=…, sampling_params=…) -> TokenOutput`, called also with `image_data=…`
            where there are images. Either `LLMServerClient.generate`, or the method of a server actor.
    """

    def __init__(self, generate: Callable[..., Awaitable[Any]]) -> None:
        self._generate = generate

    async def generate(
        self,
        request_id: str,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        max_new_tokens: int,
        images: Sequence[Any] = (),
    ) -> Generation:
        """Sample with verl, as `Engine.generate` describes.

        Raises:
            EngineError: verl's call failed, or did not return one log-probability for each id.
        """
        params = {**sampling, "logprobs": True, "max_new_tokens": max_new_tokens}
        try:
            given = {"image_data": list(images)} if images else {}
            output = await self._generate(request_id=request_id, prompt_ids=list(ids), sampling_params=params, **given)
        except Exception as error:  # Ray, HTTP and SGLang raise errors of their own; a failure ends only this request
            raise EngineError(describe(error)) from error
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


def _versions(extra_fields: Mapping[str, Any], count: int) -> list[int]:
    """Return a weight version for each of `count` tokens.

    A request that was interrupted and resumed spans several versions. verl reports only the first and the last. The
    last token gets the last version and all tokens before it get the first, so that staleness is never understated.
    """
    first = extra_fields.get("min_global_steps", extra_fields.get("global_steps"))
    last = extra_fields.get("max_global_steps", first)
    if first is None or last is None:
        return [NO_VERSION] * count
    return [*[int(first)] * (count - 1), int(last)][:count]
