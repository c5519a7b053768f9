"""A file whose docstring says that it needs an old Python alone is one that this Python can run."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_NEEDS = re.compile(r"needs 3\.(\d+)")
_LATER = {"removesuffix", "removeprefix", "capture_output", "cached_property", "dataclass"}
"""Names that came after 3.6."""
_PLAIN = {"str", "int", "bool", "None", "ImportNames"}
"""Annotations that 3.6 can evaluate; all others are texts."""


def _needs(path: Path) -> int | None:
    found = _NEEDS.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    return int(found[1]) if found else None


OLD = {path: minor for path in sorted((ROOT / "verl_multiturn").rglob("*.py")) if (minor := _needs(path)) is not None}


def test_what_is_copied_into_images_says_so() -> None:
    assert {path.name for path in OLD} == {"grade.py", "import_places.py"}


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.name)
def test_it_is_of_that_python(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, OLD[path]))
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    # `annotations` of `__future__` and `dataclasses` are 3.7's.
    assert imported <= sys.stdlib_module_names - {"__future__", "dataclasses"} | {"collections.abc"}
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}
    assert not names & _LATER
    annotations = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign)]
    annotations += [node.returns for node in nodes if isinstance(node, ast.FunctionDef)]
    assert {ast.unparse(each) for each in annotations if each and not isinstance(each, ast.Constant)} <= _PLAIN
