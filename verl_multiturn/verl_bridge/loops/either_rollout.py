"""`EitherRollout`: what verl finds under the name `sglang` in a training worker. Making one makes verl's, or ours."""

from __future__ import annotations

from inspect import signature
from typing import Any

from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from verl_multiturn.verl_bridge.settings import runs_our_server


class EitherRollout(ServerAdapter):
    """Stands for verl's `ServerAdapter`, as `EitherReplica` (`servers/either_replica.py`) for verl's replica.

    Calling it with the arguments of verl's class gives an `AsyncSGLangRollout` where the configuration asks for our
    server, and else an object of verl's own class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a rollout of verl's class or of ours."""
        if cls is not EitherRollout:
            return super().__new__(cls)
        if not runs_our_server(signature(ServerAdapter).bind(*args, **kwargs).arguments["config"]):
            return ServerAdapter(*args, **kwargs)
        from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout

        return AsyncSGLangRollout(*args, **kwargs)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Let verl's class, and all that derive from it, count as derived from this one."""
        return ServerAdapter in other.__mro__ if cls is EitherRollout else NotImplemented
