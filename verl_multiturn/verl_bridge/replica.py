"""The server side of `rollout.name=sglang_async`.

Import it through verl's replica registry only: on a driver without an accelerator, verl's loader of "sglang" has to
prepare SGLang's import first (`plugin.py` does that).
"""

from __future__ import annotations

from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica


class AsyncSGLangReplica(SGLangReplica):
    """verl's SGLang servers, unchanged; `AsyncSGLangRollout` finds them by the same names."""
