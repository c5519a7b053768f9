"""Packages by name: files of a distribution, and that nothing else is seen."""

import os
from pathlib import Path

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.sandbox import packages
from verl_multiturn.sandbox.launch import check
from verl_multiturn.sandbox.packages import files_of, modules_of, script
from verl_multiturn.sandbox.pool import SandboxPool
from verl_multiturn.sandbox.settings import SandboxSettings


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in which distributions can be made."""
    monkeypatch.setattr(packages, "package_folders", lambda: [str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, name: str, *files: str, requires: tuple[str, ...] = (), record: bool = True) -> None:
    """Make files as pip would for a distribution."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    required = "".join(f"Requires-Dist: {text}\n" for text in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{required}")
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()
    if record:
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA"]))


def shown(*names: str) -> set[str]:
    return set(files_of.__wrapped__(names))


def test_a_distribution_and_what_it_requires(site: Path) -> None:
    install(
        site, "one", "one/__init__.py", "one/a/b.py", requires=("Two>1", "gone", "none; extra == 'x'", "not a name!")
    )
    install(site, "two", "two.py", "../../bin/two", requires=("one",))
    install(site, "none", "none/__init__.py")
    assert shown("one") == {"0/one", "0/one-1.0.dist-info", "0/two.py", "0/two-1.0.dist-info"}
    assert shown("none") == {"0/none", "0/none-1.0.dist-info"}


def test_a_folder_that_several_share_is_taken_apart(site: Path) -> None:
    install(site, "one", "shared/one/__init__.py", "shared/one.txt", "deep/er/one.py")
    install(site, "two", "shared/two/__init__.py", "deep/er/two.py")
    assert shown("one") == {"0/shared/one", "0/shared/one.txt", "0/deep/er/one.py", "0/one-1.0.dist-info"}
    assert shown("one", "two") >= {"0/shared", "0/deep"}


def test_files_that_a_package_wrote_later_are_its_own(site: Path) -> None:
    install(site, "one", "one/__init__.py")
    for path in ("one/cache.json", "one/__pycache__/x.pyc"):
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).touch()
    assert shown("one") == {"0/one", "0/one-1.0.dist-info"}
    (site / "one/foreign").mkdir()
    assert shown("one") == {"0/one/__init__.py", "0/one-1.0.dist-info"}


def test_what_cannot_be_shown_is_refused(site: Path) -> None:
    install(site, "bare", "bare.py", record=False)
    install(site, "linked", "__editable__.linked-1.0.pth")
    with pytest.raises(ConfigError, match="packages: 'gone' is not installed; install it"):
        shown("gone")
    with pytest.raises(ConfigError, match="'bare' cannot be shown alone: it has no list of its files; install it anew"):
        shown("bare")
    with pytest.raises(ConfigError, match="'linked' cannot be shown alone: it is installed as an editable one"):
        shown("linked")


def test_a_wrong_setting_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="packages: 'no-such-package' is not installed"):
        check(SandboxSettings(packages=("no-such-package",)))
    with pytest.raises(ConfigError, match="isolation 'subprocess': the code sees all files there; set packages: true"):
        check(SandboxSettings(packages=("pytest",), isolation="subprocess"))
    with pytest.raises(ValueError, match="packages"):
        SandboxSettings(packages=("../up",))


async def test_nothing_but_the_named_packages_is_seen() -> None:
    program = (
        "import os, subprocess, importlib.util\n"
        "subprocess.run(['pytest', '--version'])\n"
        "print([bool(importlib.util.find_spec(name)) for name in ('pytest', 'pluggy', 'numpy', 'pip')])\n"
        "print(sorted(os.listdir('/opt/packages/0')))\n"
        "print(any('pydantic' in folders for _, folders, _ in os.walk('/')))"
    )
    async with SandboxPool(SandboxSettings(packages=("pytest",), timeout_s=60, pool=0)) as pool:
        lines = (await (await pool.acquire()).run(program)).output.splitlines()
    assert lines[0] == f"pytest {pytest.__version__}"
    assert lines[1] == "[True, True, False, False]"
    assert lines[2] == str(sorted(os.path.basename(name) for name in files_of(("pytest",))))
    assert lines[3] == "False"


def test_programs_of_packages() -> None:
    names, text = script(("pytest",), "/opt/bin/python3")
    assert set(names) == {"pytest", "py.test", "pygmentize"}
    assert text.startswith("#!/opt/bin/python3\n")
    assert script(False, "")[0] == []
    assert set(names) < set(script(True, "")[0])


def test_modules_of_packages() -> None:
    found = modules_of(("pytest",))
    assert {"pytest", "_pytest", "py", "pluggy", "iniconfig"} <= found
    assert "numpy" not in found
    assert found <= modules_of(True)
    assert modules_of(False) == frozenset()
