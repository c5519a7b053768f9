"""A package that pip builds and installs: its references in commands, each in a fork that finds the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.warm_python import light_python
from verl_multiturn.recipes import make_recipe

pytestmark = pytest.mark.slow

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "plug-real"
version = "0.3"
[project.entry-points."verl_multiturn.tools"]
stock = "plug_real.tools:stock"
broken = "plug_real.gone:stock"
[project.entry-points."verl_multiturn.interactions"]
echo = "plug_real.tools:Echo"
[project.entry-points."verl_multiturn.recipes"]
shop = "plug_real.shipped.recipes.shop"
[tool.setuptools.packages.find]
include = ["plug_real*"]
[tool.setuptools.package-data]
plug_real = ["shipped/**/*"]
"""
TOOLS = '''
from verl_multiturn import Interaction, Reply


def stock(article: str) -> int:
    """Return the pieces in stock.

    Args:
        article: Name of the article.
    """
    return len(article)


class Echo(Interaction):
    async def reply(self, instance_id, messages, **kwargs):
        return Reply("yes", done=True)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which pip installed the package from its source."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "plug_real").mkdir()
    (folder / "plug_real" / "__init__.py").touch()
    (folder / "plug_real" / "tools.py").write_text(TOOLS, encoding="utf-8")
    make_recipe("shop", folder / "plug_real" / "shipped")
    target = tmp_path_factory.mktemp("site-packages")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def said(site: Path, folder: Path, *words: str, fails: bool = False) -> str:
    """Run a command in a process that finds the package, and return all that it printed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "COLUMNS": "200"}
    command = [light_python(), "-m", "verl_multiturn.cli", *words]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_commands_take_the_references(site: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools:\n- tool: plug_real/stock\n", encoding="utf-8")
    (tmp_path / "users.yaml").write_text("interaction:\n- class_name: plug-real/echo\n", encoding="utf-8")
    checked = said(site, tmp_path, "validate", "tools.yaml", "--interactions", "users.yaml")
    assert "ok tool stock: plug_real.tools.stock" in checked
    assert "ok interaction echo: plug_real.tools.Echo" in checked
    assert "tool stock" in said(site, tmp_path, "check-tool", "plug-real/stock")
    assert "plug-real/shop" in said(site, tmp_path, "recipe", "list")
    printed = said(site, tmp_path, "run", "plug-real/shop", "--smoke", "--print")
    assert f"recipe.root={site / 'plug_real' / 'shipped'}" in printed
    assert f"recipe.out={tmp_path / 'outputs' / 'shop-smoke'}" in printed


def test_a_broken_entry_point_is_refused_where_it_is_used(site: Path, tmp_path: Path) -> None:
    refusal = said(site, tmp_path, "check-tool", "plug-real/broken", fails=True)
    assert "'plug-real/broken' of plug-real 0.3 (plug_real.gone:stock) cannot be imported" in refusal
    assert "Traceback" not in refusal


def test_help_looks_at_no_package(site: Path, tmp_path: Path) -> None:
    looked = "import sys; import verl_multiturn.cli.main; print('importlib.metadata' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    command = [sys.executable, "-c", looked]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
