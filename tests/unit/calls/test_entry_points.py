"""Entry points of installed packages: references, their faults, and metadata as broken installs leave it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.installed_packages import install
from verl_multiturn.calls.loading.entry_points import (
    InstalledEntries,
    folder_of,
    installed_entries,
    installed_entry,
    is_reference,
    load_entry,
)
from verl_multiturn.errors import ConfigError

CODE = {"plug_world.py": "imported = True\nclass Lookup: pass\nclass Deep:\n    class Inner: pass\n"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages, the first one of `sys.path`."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no module of one test be imported in the next."""
    for name in ("plug_world", "plug_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def of(entries: InstalledEntries) -> list[tuple[str, str, str]]:
    return [(entry.name, entry.source, entry.fault) for entry in entries.entries]


def refusal(reference: str, group: str = "tools") -> str:
    with pytest.raises(ConfigError) as caught:
        load_entry(reference, group, "here")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my_tools/lookup", True),
        ("My.Tools/look-up", True),
        ("my_tools.lookup", False),
        ("my_tools:lookup", False),
        ("own/file.py:function", False),
        ("a/b/c", False),
        ("/a", False),
        ("a/", False),
        ("a/b\n", False),
        (None, False),
        (3, False),
    ],
)
def test_the_form_of_a_reference(text: object, expected: bool) -> None:
    assert is_reference(text) is expected


@pytest.mark.parametrize("reference", ["plug-world/lookup", "plug_world/lookup", "Plug.World/lookup"])
def test_the_spelling_of_the_package_makes_no_difference(site: Path, reference: str) -> None:
    install(site, "Plug-World", {"tools": "lookup = plug_world:Lookup"}, CODE)
    found = installed_entry(reference, "tools", "here")
    assert (found.name, found.source, found.value) == ("Plug-World/lookup", "Plug-World 0.1", "plug_world:Lookup")
    assert "plug_world" not in sys.modules, "a look-up imports nothing"
    assert load_entry(reference, "tools", "here").__name__ == "Lookup"


def test_a_name_with_a_slash_is_the_whole_reference(site: Path) -> None:
    install(site, "some-package", {"tools": "acme/lookup = plug_world:Deep.Inner [extra]"}, CODE)
    assert load_entry("acme/lookup", "tools", "here").__qualname__ == "Deep.Inner"
    assert "did you mean 'acme/lookup'" in refusal("acme/lokup")


def test_unknown_references(site: Path) -> None:
    assert refusal("plug-world/lookup").startswith(
        "here: no installed package gives 'plug-world/lookup' in verl_multiturn.tools; install the package in this "
        "Python, and see `verl-multiturn doctor`"
    )


def test_unknown_references_beside_known_ones(site: Path) -> None:
    install(site, "plug-world", {"tools": ["lookup = plug_world:Lookup", "look_up = plug_world:Deep"]}, CODE)
    assert "did you mean 'plug-world/lookup'" in refusal("plug-world/lokup")
    assert "known are plug-world/lookup, plug-world/look_up" in refusal("zzz/q")
    assert refusal("plug-world/lookup", "rewards") == (
        "here: 'plug-world/lookup' belongs to verl_multiturn.tools, and not to verl_multiturn.rewards; name one of "
        "this kind"
    )


def test_two_packages_of_one_reference_are_both_named(site: Path) -> None:
    install(site, "first", {"tools": "acme/lookup = plug_world:Lookup"}, CODE)
    install(site, "second", {"tools": "acme/lookup = plug_world:Deep"}, version="3")
    said = refusal("acme/lookup")
    assert "first 0.1 (plug_world:Lookup)" in said
    assert "second 3 (plug_world:Deep)" in said
    assert [bool(fault) for *_, fault in of(installed_entries())] == [True, True]


def test_another_package_takes_no_name_of_a_package(site: Path) -> None:
    """`acme` declares `lookup`; another package declares `acme/lookup`: neither wins."""
    install(site, "acme", {"tools": "lookup = plug_world:Lookup"}, CODE)
    install(site, "thief", {"tools": "acme/lookup = plug_world:Lookup"})
    said = refusal("acme/lookup")
    assert "acme 0.1" in said
    assert "thief 0.1" in said


def test_one_reference_in_two_groups_is_two_things(site: Path) -> None:
    lines = {"tools": "one = plug_world:Lookup", "interactions": "one = plug_world:Deep"}
    install(site, "plug-world", lines, CODE)
    assert load_entry("plug-world/one", "tools", "here").__name__ == "Lookup"
    assert load_entry("plug-world/one", "interactions", "here").__name__ == "Deep"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module_anywhere\n", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("x = 1 / 0\n", "ZeroDivisionError: division by zero (plug_broken.py:1)"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_when_it_is_used(site: Path, code: str, said: str) -> None:
    install(site, "broken", {"tools": "lookup = plug_broken:Lookup"}, {"plug_broken.py": code})
    assert of(installed_entries()) == [("broken/lookup", "broken 0.1", "")]
    found = refusal("broken/lookup")
    assert found.startswith("here: 'broken/lookup' of broken 0.1 (plug_broken:Lookup) cannot be imported: ")
    assert said in found
    assert "mend broken, or install the packages that it needs" in found


def test_metadata_that_is_older_than_the_files(site: Path) -> None:
    """An editable install whose module moved: the metadata names the old one (datachain#1904, glasgow#468)."""
    lines = ["gone = plug_world.gone:Lookup", "moved = plug_elsewhere:Lookup", "renamed = plug_world:Lookups"]
    info = install(site, "plug-world", {"tools": lines}, CODE)
    for name in ("gone", "moved"):
        assert f"the metadata in {info.parent} may be older than the package's files" in refusal(f"plug-world/{name}")
    assert "the module 'plug_world' has no 'Lookups'; did you mean 'Lookup'?" in refusal("plug-world/renamed")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lookup = plug_world", "declares 'plug_world'; expected module:name"),
        ("lookup = plug world:x", "declares 'plug world:x'; expected module:name"),
        ("lookup =", "declares ''; expected module:name"),
        ("lookup = ../evil:x", "declares '../evil:x'; expected module:name"),
    ],
)
def test_declarations_that_name_no_object(site: Path, line: str, said: str) -> None:
    install(site, "plug-world", {"tools": line}, CODE)
    assert said in refusal("plug-world/lookup")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[verl_multiturn.tools]\nnonsense\n", "plug-world 0.1: [verl_multiturn.tools] 'nonsense': expected name ="),
        ("[verl_multiturn.tools]\na b = x:y\n", "[verl_multiturn.tools] 'a b = x:y': expected name ="),
        ("[verl_multiturn.tool]\na = x:y\n", "no such group; did you mean 'verl_multiturn.tools'?"),
        ("[verl-multiturn.tools]\na = x:y\n", "no such group; did you mean 'verl_multiturn.tools'?"),
    ],
)
def test_lines_that_nobody_could_use_are_reported(site: Path, text: str, said: str) -> None:
    install(site, "plug-world", text, CODE)
    (fault,) = installed_entries().faults
    assert said in fault
    assert said in refusal("plug-world/a"), "who looks for it in vain sees why"


def test_other_peoples_broken_metadata_concerns_nobody(site: Path) -> None:
    install(site, "other", "[other.group]\nnonsense\n[console_scripts]\n= = =\n")
    install(site, "bytes", "").joinpath("entry_points.txt").write_bytes(b"[x]\n\xff\xfe = a:b\n")
    install(site, "plug-world", {"tools": "lookup = plug_world:Lookup"}, CODE)
    assert load_entry("plug-world/lookup", "tools", "here").__name__ == "Lookup"
    (fault,) = installed_entries().faults
    assert "UnicodeDecodeError" in fault


def test_a_package_without_metadata_hides_nothing(site: Path) -> None:
    """An upgrade leaves an empty folder (importlib_metadata#534); another package has no name (cpython#100455)."""
    install(site, "plug-world", {"tools": "lookup = plug_world:Deep"}, version="0.0.9", metadata="")
    install(site, "nameless", {"tools": "lookup = plug_world:Deep"}, metadata="Metadata-Version: 2.1\n")
    install(site, "plug-world", {"tools": "lookup = plug_world:Lookup"}, CODE)
    assert of(installed_entries()) == [("plug-world/lookup", "plug-world 0.1", "")]
    assert load_entry("plug-world/lookup", "tools", "here").__name__ == "Lookup"


def test_a_package_of_another_name_than_its_folder_is_named(site: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: other-tools\nVersion: 0.1\n"
    info = install(site, "my-tools", {"tools": "lookup = my_tools:Lookup"}, metadata=metadata)
    install(site, "sound", {"tools": "lookup = sound:Lookup"})
    found = installed_entries()
    assert [entry.name for entry in found.entries] == ["sound/lookup"]
    (fault,) = found.faults
    assert fault.startswith(f"{info} is the package other-tools by its METADATA")
    for reference in ("my-tools/lookup", "other-tools/lookup"):
        with pytest.raises(ConfigError, match="is the package other-tools by its METADATA"):
            load_entry(reference, "tools", "here")


def test_two_versions_in_one_folder_are_reported(site: Path) -> None:
    install(site, "plug-world", {"tools": ["lookup = plug_world:Lookup", "same = plug_world:Deep"]}, CODE)
    install(site, "plug-world", {"tools": ["lookup = plug_world:Deep", "same = plug_world:Deep"]}, version="0.2")
    (fault,) = installed_entries().faults
    assert "has the package plug-world in 2 versions (0.1, 0.2)" in fault
    said = refusal("plug-world/lookup")
    assert "plug-world 0.1 (plug_world:Lookup)" in said
    assert "plug-world 0.2 (plug_world:Deep)" in said
    assert load_entry("plug-world/same", "tools", "here").__name__ == "Deep"


def test_an_editable_install_has_its_metadata_twice(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkout's `egg-info` beside the `dist-info` (setuptools#3649 and #4170, importlib_metadata#410)."""
    install(site, "plug-world", {"tools": "lookup = plug_world:Lookup"}, CODE)
    checkout = tmp_path / "checkout"
    egg = checkout / "plug_world.egg-info"
    shutil.copytree(site / "plug_world-0.1.dist-info", egg)
    (egg / "METADATA").rename(egg / "PKG-INFO")
    monkeypatch.syspath_prepend(str(checkout))
    assert of(installed_entries()) == [("plug-world/lookup", "plug-world 0.1", "")]


def test_a_folder_that_is_in_the_path_twice_counts_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "plug-world", {"tools": "lookup = plug_world:Lookup"}, CODE)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert of(installed_entries()) == [("plug-world/lookup", "plug-world 0.1", "")]


def test_the_first_folder_of_the_path_counts(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the user's own copy in PYTHONPATH before the installed one, as `import` does."""
    install(site, "plug-world", {"tools": ["lookup = plug_world:Lookup", "old = plug_world:Deep"]}, CODE)
    own = tmp_path / "own"
    install(own, "plug_world", {"tools": "lookup = plug_world:Deep"}, CODE, version="2")
    monkeypatch.syspath_prepend(str(own))
    assert of(installed_entries()) == [("plug_world/lookup", "plug_world 2", "")]
    assert "no installed package gives" in refusal("plug-world/old")


def test_the_folder_of_a_recipe(site: Path) -> None:
    files = {"plug_world/__init__.py": "raise RuntimeError('imported')", "plug_world/recipes/maze/config.yaml": "{}"}
    lines = ["maze = plug_world.recipes.maze", "gone = plug_world.recipes.gone", "object = plug_world:maze"]
    install(site, "plug-world", {"recipes": lines}, files)
    assert folder_of("plug_world/maze", "here") == site / "plug_world" / "recipes" / "maze"
    with pytest.raises(ConfigError, match=r"no folder 'plug_world.recipes.gone' is installed; list its files"):
        folder_of("plug-world/gone", "here")
    with pytest.raises(ConfigError, match=r"declares 'plug_world:maze'; expected package.folder"):
        folder_of("plug-world/object", "here")
    assert "plug_world" not in sys.modules


def test_broken_metadata_of_one_package_is_no_fault_of_another(site: Path) -> None:
    install(site, "good-pkg", {"rewards": "r = json:dumps"})
    info = install(site, "bad-pkg", {"rewards": "r = json:dumps"})
    (info / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: bad\xff-pkg\nVersion: 1\n")
    assert load_entry("good-pkg/r", "rewards", "here") is json.dumps
    (fault,) = installed_entries().faults
    assert fault.startswith(f"METADATA of a package in {site} cannot be read (UnicodeDecodeError: ")
    with pytest.raises(ConfigError, match="METADATA of a package in"):
        load_entry("bad-pkg/r", "rewards", "here")
