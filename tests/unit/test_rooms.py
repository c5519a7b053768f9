"""Imports run one way, and importing the package is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "verl_multiturn"
FREE_ROOMS = ("rollout", "chat", "sandbox", "tools", "observe", "rewards", "certificate", "workers")
HEAVY = {"verl", "ray", "sglang"}
BRIDGES = {"verl_multiturn.verl_bridge", "verl_multiturn.cpu"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("room", FREE_ROOMS)
def test_a_tool_author_needs_no_gpu_stack(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] not in HEAVY, f"{path} imports {name}"
            assert not any(name == bridge or name.startswith(f"{bridge}.") for bridge in BRIDGES), (
                f"{path} imports {name}"
            )


def test_nothing_but_the_plugin_knows_the_cpu() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "cpu" in path.relative_to(PACKAGE).parts or path.name == "plugin.py":
            continue
        assert not any(name.startswith("verl_multiturn.cpu") for name in imported(path)), path


def test_importing_the_package_needs_neither_torch_nor_verl() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'verl', 'ray', 'sglang', 'transformers', 'hydra'): sys.modules[name] = None\n"
        "import verl_multiturn\n"
        "assert len(verl_multiturn.__all__) <= 25\n"
        "for name in verl_multiturn.__all__: getattr(verl_multiturn, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_can_be_read_in_one_sitting() -> None:
    long = {path.name: count for path in PACKAGE.rglob("*.py") if (count := len(path.read_text().splitlines())) > 400}
    assert not long
