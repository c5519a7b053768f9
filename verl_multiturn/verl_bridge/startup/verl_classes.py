"""The dataclasses of verl's configuration, read from verl's files: their fields, annotations and defaults.

Invariants:
- verl is not imported, so that the answer takes no second.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from verl_multiturn.verl_bridge.startup.verl_keys import verl_root

ROLLOUT = "RolloutConfig"
"""verl's class of a rollout's settings, which has more of them than the YAML files."""

_FOLDERS = ("workers/config", "trainer/config", "utils/profiler")
_FACTORIES: dict[str, Any] = {"dict": {}, "list": []}


@dataclass(frozen=True)
class ClassField:
    """A field of a dataclass of verl's."""

    annotation: ast.expr
    default: ast.expr | None


@functools.cache
def fields_of(name: str) -> dict[str, ClassField]:
    """Return the fields of a dataclass by their names, those of its bases first; empty for another name.

    Args:
        name: Name of the class, without its module.
    """
    found: dict[str, ClassField] = {}
    if (node := _classes().get(name)) is None:
        return found
    for base in node.bases:
        found |= fields_of(ast.unparse(base).rpartition(".")[2])
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found[line.target.id] = ClassField(line.annotation, line.value)
    return found


def default_of(name: str, field: str) -> Any:
    """Return the default of a field of a dataclass; None where there is none, or one that is not a literal."""
    found = fields_of(name).get(field)
    default = None if found is None else found.default
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
        given = {word.arg: word.value for word in default.keywords}
        factory = ast.unparse(given["default_factory"]) if "default_factory" in given else None
        if factory in _FACTORIES:
            return type(_FACTORIES[factory])()
        default = given.get("default")
    if default is None:
        return None
    if isinstance(default, ast.Name) and default.id == "MISSING":
        return MISSING
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


@functools.cache
def _classes() -> dict[str, ast.ClassDef]:
    paths = [path for folder in _FOLDERS for path in sorted((verl_root() / folder).glob("*.py"))]
    paths.append(verl_root() / "base_config.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
