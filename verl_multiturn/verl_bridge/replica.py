"""The server side of `rollout.name=sglang_async`.

Import this module only through verl's replica registry. On a driver without an accelerator, verl's loader of "sglang"
has to prepare the import of SGLang first (`plugin.py` takes care of that).
"""

from __future__ import annotations

from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica


class AsyncSGLangReplica(SGLangReplica):
    """verl's SGLang servers, unchanged; `AsyncSGLangRollout` finds them under the names that verl gives them."""
