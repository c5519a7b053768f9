"""Names that verl's own code registers, read from verl's files: estimators, policy losses and loggers.

Invariants:
- verl is not imported, so that the answer takes no second.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os

from verl_multiturn.verl_bridge.startup.verl_keys import verl_root

_ALGORITHMS, _TRACKING = "trainer/ppo/core_algos.py", "utils/tracking.py"


@functools.cache
def estimators() -> frozenset[str]:
    """Return verl's estimators of advantages."""
    found = {line.value for line in _class(_ALGORITHMS, "AdvantageEstimator").body if isinstance(line, ast.Assign)}
    return frozenset(str(ast.literal_eval(value)) for value in found)


@functools.cache
def policy_losses() -> frozenset[str]:
    """Return verl's policy losses."""
    calls = (
        decorator
        for node in _tree(_ALGORITHMS).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "register_policy_loss"
    )
    return frozenset(str(ast.literal_eval(call.args[0])) for call in calls)


@functools.cache
def loggers() -> frozenset[str]:
    """Return the targets of verl's `Tracking`."""
    lists = (
        line.value
        for line in _class(_TRACKING, "Tracking").body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "supported_backend"
    )
    return frozenset(str(name) for value in lists for name in ast.literal_eval(value))


def has_other_plugins() -> bool:
    """Return whether verl loads code beside ours, which may register names of its own."""
    plugins = importlib.metadata.entry_points(group="verl.plugins")
    others = [entry for entry in plugins if not entry.value.startswith("verl_multiturn")]
    return bool(others or os.environ.get("VERL_USE_EXTERNAL_MODULES"))


def _class(file: str, name: str) -> ast.ClassDef:
    return next(node for node in _tree(file).body if isinstance(node, ast.ClassDef) and node.name == name)


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((verl_root() / file).read_text(encoding="utf-8"))
