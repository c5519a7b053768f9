"""verl-multiturn: multi-turn tool rollouts for verl.

Importing this package needs neither torch nor verl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl_multiturn.old_names import understand_old_names

if TYPE_CHECKING:
    from verl_multiturn.errors import (
        CertificateError,
        ConfigError,
        EngineError,
        InteractionContractError,
        MultiTurnError,
        OutageError,
        ToolContractError,
        TrajectoryError,
        UnjudgedError,
    )
    from verl_multiturn.interactions.base import Interaction, Reply
    from verl_multiturn.interactions.running.registry import load_interactions
    from verl_multiturn.rollout.conversation import Conversation
    from verl_multiturn.rollout.engines.protocol import Ask, Engine, Generation
    from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
    from verl_multiturn.rollout.limits import Limits, StopReason
    from verl_multiturn.rollout.outcome import Outcome, Request
    from verl_multiturn.rollout.scripted_chat import scripted_rollout
    from verl_multiturn.rollout.trajectory import Source, Trajectory
    from verl_multiturn.tools.base import BaseTool, ToolResponse
    from verl_multiturn.tools.loading.functions import tool
    from verl_multiturn.tools.loading.registry import load_tools
    from verl_multiturn.tools.schema import ToolSchema

__version__ = "0.1.0"

understand_old_names()

__all__ = [
    "Ask",
    "BaseTool",
    "CertificateError",
    "ConfigError",
    "Conversation",
    "Engine",
    "EngineError",
    "Generation",
    "Interaction",
    "InteractionContractError",
    "Limits",
    "MultiTurnError",
    "OutageError",
    "Outcome",
    "Reply",
    "Request",
    "ScriptedEngine",
    "Source",
    "StopReason",
    "ToolContractError",
    "ToolResponse",
    "ToolSchema",
    "Trajectory",
    "TrajectoryError",
    "UnjudgedError",
    "__version__",
    "load_interactions",
    "load_tools",
    "scripted_rollout",
    "tool",
]

_PLACES = {
    "errors": (
        "CertificateError",
        "ConfigError",
        "EngineError",
        "InteractionContractError",
        "MultiTurnError",
        "OutageError",
        "ToolContractError",
        "TrajectoryError",
        "UnjudgedError",
    ),
    "interactions.base": (
        "Interaction",
        "Reply",
    ),
    "interactions.running.registry": ("load_interactions",),
    "rollout.conversation": ("Conversation",),
    "rollout.engines.protocol": (
        "Ask",
        "Engine",
        "Generation",
    ),
    "rollout.limits": (
        "Limits",
        "StopReason",
    ),
    "rollout.outcome": (
        "Outcome",
        "Request",
    ),
    "rollout.engines.scripted_engine": ("ScriptedEngine",),
    "rollout.scripted_chat": ("scripted_rollout",),
    "rollout.trajectory": (
        "Source",
        "Trajectory",
    ),
    "tools.base": (
        "BaseTool",
        "ToolResponse",
    ),
    "tools.loading.functions": ("tool",),
    "tools.loading.registry": ("load_tools",),
    "tools.schema": ("ToolSchema",),
}
"""Names of `__all__` by the module that has them. It is imported at the first use of one of them."""


def __getattr__(name: str) -> Any:
    """Import the module that has a public name, and return the object of that name."""
    module = next((module for module, names in _PLACES.items() if name in names), None)
    if module is None:
        try:
            return importlib.import_module(f"{__name__}.{name}")  # `import verl_multiturn; verl_multiturn.errors`
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found


def __dir__() -> list[str]:
    """Return the names that this package has, those not imported yet among them."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
