"""The wheel holds all that it needs, and nothing else."""

from __future__ import annotations

import csv
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.wheel import ROOT, build, files_of_the_readme
from verl_multiturn import __version__, install
from verl_multiturn.recipes import list_recipes

pytestmark = pytest.mark.slow

INFO = f"verl_multiturn-{__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel where another build left a module that is gone; setuptools packs all that it finds there."""

    def leave(folder: Path) -> None:
        stale = folder / "build" / "lib" / "verl_multiturn"
        stale.mkdir(parents=True)
        (stale / "deleted.py").touch()

    return build(sys.executable, tmp_path_factory.mktemp("wheel"), "--no-build-isolation", before=leave)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files(folder: str, pattern: str = "*") -> set[str]:
    """Return the files of a folder of the repository, by their paths in it."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def test_it_holds_the_package_the_recipes_and_the_locks_and_nothing_else(wheel: Path) -> None:
    shipped = files("recipes") | files("tool_configs") | files("requirements", "*.lock")
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    wanted = files("verl_multiturn") | {f"verl_multiturn/shipped/{path}" for path in shipped}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == wanted | {f"{INFO}/{name}" for name in about}
        for path in wanted:
            assert archive.read(path) == (ROOT / path.replace("verl_multiturn/shipped/", "")).read_bytes()
        assert max(entry.file_size for entry in archive.infolist()) < 4e6


def test_it_ships_the_recipes_and_writes_none_among_the_packages(site: Path, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from verl_multiturn.recipes import list_recipes; print(*list_recipes())\n"
        "from verl_multiturn.runs.plan import plan_run; print(plan_run('torl', variants=['fsdp2']).out)\n"
        "from verl_multiturn.install import environments; print(*environments())\n"
        "from verl_multiturn.runs.doctor import install_command; print(install_command(gpu=False))"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    recipes, out, environments, command = ran.stdout.splitlines()
    assert recipes.split() == [*list_recipes()]
    assert out == str(tmp_path / "outputs" / "torl-fsdp2")
    assert environments.split() == [*install.environments()]
    assert command.startswith("verl-multiturn install cpu ")


def test_an_environment_gets_the_same_wheel_again(wheel: Path, site: Path, tmp_path: Path) -> None:
    install.pack(site, tmp_path)
    (again,) = tmp_path.iterdir()
    assert again.name == wheel.name

    def record(path: Path) -> list[list[str]]:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            return sorted(csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines()))

    assert record(again) == record(wheel)


def test_the_readme_has_the_tool_that_is_checked_with_the_wheel() -> None:
    assert set(files_of_the_readme()) == {"my_tools.py", "my_tools.yaml"}
