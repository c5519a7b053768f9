"""`EitherReplica`: what verl finds under the name `sglang`. Making one makes verl's replica, or ours.

Import this module only through verl's replica registry (`registered.py`), as `replica.py`.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from verl_multiturn.verl_bridge.settings import runs_our_server


class EitherReplica(SGLangReplica):
    """Stands for verl's `SGLangReplica`, as which it counts: for `isinstance`, for `issubclass`, and to derive from.

    Calling it with the arguments of verl's class gives an `AsyncSGLangReplica` where the configuration asks for our
    server, and else, as for each reward model and teacher, an object of verl's own class. A class that derives from it
    is one that derives from verl's.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a replica of verl's class or of ours."""
        if cls is not EitherReplica:
            return super().__new__(cls)
        given = signature(SGLangReplica).bind(*args, **kwargs).arguments
        is_of_policy = not given.get("is_reward_model") and not given.get("is_teacher_model")
        if not (is_of_policy and runs_our_server(given["config"])):
            return SGLangReplica(*args, **kwargs)
        from verl_multiturn.verl_bridge.servers.replica import AsyncSGLangReplica

        return AsyncSGLangReplica(*args, **kwargs)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Let verl's class, and all that derive from it, count as derived from this one."""
        return SGLangReplica in other.__mro__ if cls is EitherReplica else NotImplemented
