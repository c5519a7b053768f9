"""SGLang's names and habits that differ between the supported sets of versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def local_tensor_class() -> type:
    """Return SGLang's `LocalSerializedTensor`, a tensor of a weight update with a value for each rank.

    The import takes seconds where SGLang's model runner is not loaded yet.
    """
    try:
        from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
    except ImportError:  # before SGLang 0.5.16
        from sglang.srt.model_executor.model_runner import LocalSerializedTensor
    return LocalSerializedTensor  # type: ignore[no-any-return]


async def cache_tokens(manager: Any) -> list[int]:
    """Return how many tokens the cache of each of an engine's data-parallel ranks holds; [] if unknown.

    Args:
        manager: SGLang's tokenizer manager.
    """
    try:
        states = await manager.get_internal_state()
        return [tokens for state in states if (tokens := int(state["memory_usage"]["token_capacity"]))]
    except (AttributeError, KeyError, TypeError):  # no part of SGLang's documented interface
        return []


def then(value: Any, finish: Callable[[Any], Any]) -> Any:
    """Return `finish(value)`; where the value is awaitable, return an awaitable of it.

    An override of `load_mm_data` uses it: since SGLang 0.5.13 the method is asynchronous.
    """
    if not inspect.isawaitable(value):
        return finish(value)

    async def later() -> Any:
        return finish(await value)

    return later()
