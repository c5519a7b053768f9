"""The places where verl looks a rollout's classes up, and our entries there.

    rollout.name=sglang_async      programs that bypass the start-up check: ours
    rollout.name=sglang            a class that is `either`: it makes objects of ours where the start-up check has set
                                   `custom.multiturn.derived.own_server`, and else of verl's own class, as for each
                                   reward model and teacher

Another package may have registered classes of its own under verl's name: they stay, and a run that asks for our server
is refused then (`another_class`), unless they derive from ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from verl.workers.rollout import base
from verl.workers.rollout import replica as verls
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_multiturn.verl_bridge.names import ROLLOUT, SGLANG

OUR_ROLLOUT = "verl_multiturn.verl_bridge.loops.spmd.AsyncSGLangRollout"
OUR_REPLICA = "verl_multiturn.verl_bridge.servers.replica.AsyncSGLangReplica"
_EITHER_ROLLOUT = "verl_multiturn.verl_bridge.loops.either_rollout.EitherRollout"
_OUR_PACKAGE = __name__.partition(".")[0] + "."
_VERLS = verls.__name__.partition(".")[0] + "."
_verls_loader = RolloutReplicaRegistry._registry[SGLANG]


@dataclass(frozen=True)
class AnotherClass:
    """A class of another package that is where ours must."""

    place: str
    """verl's registry."""
    name: str
    """Its dotted name."""
    ours: str
    """The class of ours that it should derive from."""


def register_rollout() -> None:
    """Register rollout and replica under our name, and under verl's unless another package has classes of its own."""
    set_rollout_class(OUR_ROLLOUT, _EITHER_ROLLOUT)
    RolloutReplicaRegistry.register(ROLLOUT, _load_ours)
    if _verls_loader.__module__.startswith(_VERLS):
        RolloutReplicaRegistry.register(SGLANG, _load_either)


def set_rollout_class(ours: str, either: str) -> None:
    """Register the class of the training workers, by its dotted name.

    Args:
        ours: Under our name.
        either: Under verl's name, unless another package has registered a class of its own.
    """
    base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = ours
    if base._ROLLOUT_REGISTRY[(SGLANG, "async")].startswith((_VERLS, _OUR_PACKAGE)):
        base._ROLLOUT_REGISTRY[(SGLANG, "async")] = either


def another_class() -> AnotherClass | None:
    """Return a class of another package that verl would take in the place of ours; None where there is none."""
    rollout = base._ROLLOUT_REGISTRY[(SGLANG, "async")]
    if not rollout.startswith(_OUR_PACKAGE) and not _derives(base.get_rollout_class(SGLANG), OUR_ROLLOUT):
        return AnotherClass("_ROLLOUT_REGISTRY", rollout, OUR_ROLLOUT)
    if RolloutReplicaRegistry._registry[SGLANG] is _load_either:
        return None
    replica = RolloutReplicaRegistry.get(SGLANG)
    return (
        None
        if _derives(replica, OUR_REPLICA)
        else AnotherClass("RolloutReplicaRegistry", _dotted(replica), OUR_REPLICA)
    )


def either(verls: type, ours: str, is_ours: Callable[[Mapping[str, Any]], bool]) -> type:
    """Return a class that takes the place of verl's in a registry, and makes an object of verl's class or of ours.

    It counts as verl's class: for `isinstance`, for `issubclass`, and to derive from. A class that derives from it is
    one that derives from verl's.

    Args:
        verls: verl's class.
        ours: The dotted name of ours, which is imported when the first object of it is made.
        is_ours: Whether an object with these arguments, by name, is one of ours.
    """
    made_from = signature(verls)

    class Either(verls):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Either:
                return super().__new__(cls)
            made = _class_of(ours) if is_ours(made_from.bind(*args, **kwargs).arguments) else verls
            return made(*args, **kwargs)

        @classmethod
        def __subclasshook__(cls, other: type) -> Any:
            return verls in other.__mro__ if cls is Either else NotImplemented

    return Either


def _class_of(dotted: str) -> type:
    module, _, name = dotted.rpartition(".")
    found: type = getattr(import_module(module), name)
    return found


def _derives(derived: type, ours: str) -> bool:
    return any(_dotted(each) == ours for each in derived.__mro__)


def _dotted(named: type) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _load_ours() -> type:
    _verls_loader()  # it prepares the import of SGLang on a driver without a GPU
    return _class_of(OUR_REPLICA)


@cache
def _load_either() -> type:
    from verl_multiturn.verl_bridge.settings import runs_our_server

    def is_ours(given: Mapping[str, Any]) -> bool:
        is_of_policy = not given.get("is_reward_model") and not given.get("is_teacher_model")
        return is_of_policy and runs_our_server(given["config"])

    return either(_verls_loader(), OUR_REPLICA, is_ours)
