"""A file whose docstring says that it needs an old Python alone is one that this Python can run."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_NEEDS = re.compile(r"needs 3\.(\d+)")
_LATER = {
    "capture_output": 7,
    "cached_property": 8,
    "dataclass": 7,
    "dirs_exist_ok": 8,
    "missing_ok": 8,
    "removeprefix": 9,
    "removesuffix": 9,
}
"""Names that came after 3.6, with the minor version of Python that brought them."""
_PLAIN = {"str", "int", "bool", "None", "ImportNames"}
"""Annotations that 3.6 can evaluate; all others are texts."""


def _needs(path: Path) -> int | None:
    found = _NEEDS.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    return int(found[1]) if found else None


OLD = {path: minor for path in sorted((ROOT / "verl_multiturn").rglob("*.py")) if (minor := _needs(path)) is not None}


def test_what_is_copied_into_images_or_installs_says_so() -> None:
    assert {path.name for path in OLD} == {"grade.py", "import_places.py", "install.py"}


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.name)
def test_it_is_of_that_python(path: Path) -> None:
    minor = OLD[path]
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, minor))
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    of_3_7 = {"__future__", "dataclasses"} if minor < 7 else set()  # of `__future__`, its `annotations`
    assert imported <= sys.stdlib_module_names - of_3_7 | {"collections.abc"}
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}
    assert not [name for name in names if _LATER.get(name, 0) > minor]
    if "__future__" in imported:
        return  # no annotation is evaluated
    annotations = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign)]
    annotations += [node.returns for node in nodes if isinstance(node, ast.FunctionDef)]
    assert {ast.unparse(each) for each in annotations if each and not isinstance(each, ast.Constant)} <= _PLAIN
