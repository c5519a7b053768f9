"""Recipes of installed packages: their references, where they run, and what is refused by name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.installed_packages import install
from verl_multiturn.errors import ConfigError
from verl_multiturn.recipes import copy_recipe, installed_recipes, list_recipes, make_recipe
from verl_multiturn.runs.plan import chosen_outputs, find_recipe, plan_run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package `plug-hub`, whose recipe `maze` is one that `recipe new` made; return its folder."""
    site = tmp_path / "site-packages"
    hub = site / "plug_hub" / "shipped"
    make_recipe("maze", hub)
    lines = ["maze = plug_hub.shipped.recipes.maze", "bare = plug_hub.bare", "gone = plug_hub.gone"]
    files = {"plug_hub/__init__.py": "raise RuntimeError('imported')", "plug_hub/bare/config.yaml": "a: 1"}
    install(site, "plug-hub", {"recipes": lines}, files, version="2.1")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    return hub


@pytest.mark.parametrize("name", ["plug-hub/maze", "plug_hub/maze", "Plug.Hub/maze"])
def test_a_recipe_runs_by_its_reference(hub: Path, tmp_path: Path, name: str) -> None:
    plan = plan_run(name, smoke=True)
    assert plan.folder == hub / "recipes" / "maze" == find_recipe(name)
    assert plan.root == hub
    assert plan.out == tmp_path / "outputs" / "maze-smoke", "nobody writes into the package"
    assert chosen_outputs(name) == tmp_path / "outputs"
    assert "plug_hub" not in sys.modules


def test_lists_name_the_package(hub: Path) -> None:
    listed = installed_recipes()
    assert list(listed) == ["plug-hub/maze", "plug-hub/bare", "plug-hub/gone"]
    assert listed["plug-hub/maze"].endswith("(plug-hub 2.1)")
    assert "no folder 'plug_hub.gone' is installed" in listed["plug-hub/gone"]
    assert not set(listed) & set(list_recipes())


def test_a_strangers_readme_neither_ends_the_list_nor_writes_to_the_terminal(hub: Path) -> None:
    (hub / "recipes" / "maze" / "README.md").write_bytes(b"# Mazes \xff\x1b]0;owned\x07\n" + b"x" * 1_000_000)
    assert installed_recipes()["plug-hub/maze"] == "Mazes \ufffd\\x1b]0;owned\\x07 (plug-hub 2.1)"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plug-hub/maz", r"unknown recipe 'plug-hub/maz'; did you mean 'plug-hub/maze'\?"),
        ("plug-hub/gone", "no folder 'plug_hub.gone' is installed; list its files as the package's data"),
        ("plug-hub/bare", "does not lie under a folder named 'recipes'"),
    ],
)
def test_refusals(hub: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_run(name)


def test_a_package_without_what_its_recipe_needs(hub: Path) -> None:
    (hub / "recipes" / "common").rename(hub / "recipes" / "elsewhere")
    with pytest.raises(ConfigError, match="recipes/common' is not there; package everything that `recipe new` makes"):
        plan_run("plug-hub/maze")


def test_a_folder_of_the_same_name_is_not_replaced_in_silence(hub: Path, tmp_path: Path) -> None:
    own = tmp_path / "plug-hub" / "maze"
    own.mkdir(parents=True)
    (own / "config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=re.escape("is a folder, and ")):
        find_recipe("plug-hub/maze")
    assert find_recipe("./plug-hub/maze") == own


def test_a_path_stays_a_path(hub: Path, tmp_path: Path) -> None:
    """`recipes/maze` has the form of a reference, too."""
    made = make_recipe("shop", tmp_path)
    assert find_recipe("recipes/shop") == made
    assert plan_run("recipes/shop").outputs == tmp_path / "outputs"


def test_a_copy_has_what_the_recipe_needs(hub: Path, tmp_path: Path) -> None:
    copied = copy_recipe("plug_hub/maze", tmp_path / "copy")
    assert copied == tmp_path / "copy" / "recipes" / "maze"
    assert (copied.parent / "common" / "config" / "places.yaml").is_file()
    assert plan_run(str(copied)).root == tmp_path / "copy"
