"""Modules are found by the names that they had before they moved."""

import importlib
import importlib.util
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT
from verl_multiturn.old_names import UNTIL, old_names

PACKAGE = ROOT / "verl_multiturn"
# Every name of ours in docs, recipes, tool_configs, examples and README of the last commit before modules moved.
DOCUMENTED = frozenset((ROOT / "tests" / "support" / "names_of_version_0_1.txt").read_text().splitlines())
FOREIGN = frozenset(name for name in DOCUMENTED if ".verl_bridge" in name or ".harbor.mini_swe" in name)
"""Names of modules that import verl or Harbor."""


@pytest.fixture(autouse=True)
def _forget_old_modules() -> Iterator[None]:
    yield
    for name in old_names().keys() & sys.modules.keys():
        del sys.modules[name]


def _file_of(module: str) -> bool:
    place = ROOT.joinpath(*module.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def test_each_old_name_is_free_and_each_new_one_is_there() -> None:
    assert [old for old in old_names() if _file_of(old)] == []
    assert [new for new in old_names().values() if not _file_of(new)] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("launch.run_folder", "runs.run_folder"),  # in a package that is gone
        ("rollout.engine", "rollout.engines.protocol"),  # in one that is still there
        ("http_connections", "clients.http_connections"),  # at the root
    ],
)
def test_an_old_name_is_the_module_itself_and_says_the_new_one(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=rf"'verl_multiturn\.{re.escape(new)}'.*{UNTIL}"):
        found = importlib.import_module(f"verl_multiturn.{old}")
    assert found is importlib.import_module(f"verl_multiturn.{new}")
    assert found.__spec__ is not None
    assert found.__spec__.name == f"verl_multiturn.{new}"


@pytest.mark.filterwarnings("ignore:the module 'verl_multiturn:FutureWarning")  # the names are the old ones
def test_a_name_is_imported_from_an_old_package() -> None:
    from verl_multiturn.records import reader  # type: ignore[attr-defined]

    assert reader.__name__ == "verl_multiturn.records.read.records"


def test_an_unknown_module_is_still_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"verl_multiturn\.launch\.nothing"):
        importlib.import_module("verl_multiturn.launch.nothing")


@pytest.mark.filterwarnings("ignore:the module 'verl_multiturn:FutureWarning")  # many of the names are old ones
@pytest.mark.parametrize("name", sorted(DOCUMENTED - FOREIGN))
def test_a_documented_name_is_still_there(name: str) -> None:
    module, _, last = name.replace(":", ".").rpartition(".")
    try:
        importlib.import_module(name.replace(":", "."))
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_a_documented_name_beside_foreign_packages_is_still_there(name: str) -> None:
    name = name.replace(":", ".")
    module = name if name in old_names() or _file_of(name) else name.rpartition(".")[0]
    place = ROOT.joinpath(*old_names().get(module, module).split("."))
    path = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
    assert module == name or re.search(rf"\b{name.rpartition('.')[2]}\b", path.read_text())


def test_threads_that_import_an_old_name_at_once_all_get_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds the entry of the first in `sys.modules` while that still imports."""
    real, began, names = importlib.import_module, threading.Event(), list[str]()

    def slow(name: str, package: str | None = None) -> ModuleType:
        if name == "verl_multiturn.clients.http_connections":
            began.set()
            time.sleep(0.3)
        return real(name, package)

    def read() -> None:
        from verl_multiturn.http_connections import Route

        names.append(Route.__module__)

    monkeypatch.setattr("verl_multiturn.old_names.importlib.import_module", slow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = threading.Thread(target=read)
        first.start()
        assert began.wait(10)
        second = threading.Thread(target=read)
        second.start()
        first.join()
        second.join()
    assert names == ["verl_multiturn.clients.http_connections"] * 2


def test_a_command_of_an_old_name_runs_the_module(tmp_path: Path) -> None:
    """`python -m verl_multiturn.launch.checkpoint_evaluations` is a documented command of 0.1."""
    words = [sys.executable, "-m", "verl_multiturn.launch.checkpoint_evaluations", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "is now 'verl_multiturn.runs.checkpoint_evaluations'" in done.stderr
