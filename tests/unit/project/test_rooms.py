"""Imports run one way, and importing the package is light."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "verl_multiturn"
# A room imports those before it, never one behind it.
ORDER = [
    "errors", "paths", "describe", "syntax", "reward_numbers", "config", "tasks", "row_files", "row_keys", "row_scores",
    "driver", "version_sets", "json_schema",
    "chat", "calls", "http_connections", "chat_endpoint", "processes", "sandbox", "workspaces", "tools", "interactions",
    "rollout", "certificate", "records", "rewards", "proxy", "task_sets", "data", "recipes", "trust", "evaluation",
    "observe", "cpu_processes", "launch", "verl_bridge", "cpu", "plugin", "cli",
]  # fmt: skip
STACK = ["verl_bridge", "cpu", "plugin", "cli"]
HEAVY = {"verl", "ray", "sglang"}
HARBORS = {f"proxy.agents.harbor.{name}" for name in ("environment", "mini_swe", "trial")}
"""Imported by Harbor's own Python alone (requirements/harbor.lock)."""


@functools.cache
def modules() -> dict[str, Path]:
    """Return all modules of the package by their dotted name, without `verl_multiturn.` itself."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del names[""]
    return names


@functools.cache
def _names_of(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a file imports, a module's names with the module before them: all, and those on top."""
    tree = ast.parse(path.read_text())
    return _names_in(ast.walk(tree)), _names_in(tree.body)


def _names_in(nodes: Iterable[ast.AST]) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imported(path: Path) -> frozenset[str]:
    """Return the names that a file imports, wherever it does."""
    return _names_of(path)[0]


def imports() -> dict[str, set[str]]:
    """Return for each module the modules of this package that it imports."""
    known = modules()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        ours = {name.removeprefix("verl_multiturn.") for name in imported(path) if name.startswith("verl_multiturn.")}
        found[module] = {name if name in known else name.rpartition(".")[0] for name in ours} & known.keys() - {module}
    return found


def test_rooms_import_one_way() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if ORDER.index(module.split(".")[0]) < ORDER.index(other.split(".")[0])
    ]
    assert not wrong


def test_the_rooms_are_documented_in_their_order() -> None:
    page = (ROOT / "docs" / "understand" / "architecture.md").read_text().partition("## The rooms")[2]
    assert re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE) == ORDER


def test_files_import_in_no_circle() -> None:
    left = imports()
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left


@pytest.mark.parametrize("room", [room for room in ORDER if room not in STACK])
def test_a_tool_author_needs_no_gpu_stack(room: str) -> None:
    for module, path in modules().items():
        if module.split(".")[0] == room:
            assert not {name.split(".")[0] for name in imported(path)} & HEAVY, path


def test_setup_names_what_is_imported() -> None:
    needed: set[str] = set()
    for module, path in modules().items():
        if module.split(".")[0] not in STACK and module not in HARBORS:
            # What a function imports may be missing.
            needed |= {name.split(".")[0] for name in _names_of(path)[1]}
    needed -= sys.stdlib_module_names | {"verl_multiturn"}
    known = packages_distributions()
    wanted = {known[name][0].lower().replace("_", "-") for name in needed}
    named = re.findall(r'^        "([\w-]+)>=', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert "numpy" in wanted
    assert wanted - {"pydantic-core"} <= set(named)  # which comes with pydantic alone


def test_no_module_hides_one_of_python() -> None:
    # A file that is run as a script has its folder before the standard library.
    assert not {path.stem for path in PACKAGE.rglob("*.py")} & sys.stdlib_module_names


def test_importing_the_package_needs_neither_torch_nor_verl() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'verl', 'ray', 'sglang', 'transformers', 'hydra'): sys.modules[name] = None\n"
        "import verl_multiturn\n"
        "assert len(verl_multiturn.__all__) <= 30\n"
        "for name in verl_multiturn.__all__: getattr(verl_multiturn, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_file_talks_to_transfer_queue() -> None:
    talking = [name for name, path in modules().items() if any("transfer_queue" in each for each in imported(path))]
    assert talking == ["verl_bridge.compat.row_store"]
