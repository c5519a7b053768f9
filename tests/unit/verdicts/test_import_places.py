"""The rule of which changes decide the imports of tests, called by both users: for a final tree, and for a patch."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from tests.support.workspace_attacks import VERDICTS, task
from tests.unit.task_sets.test_swe_images import ROWS
from verl_multiturn.task_sets.swe.images import task_of_row
from verl_multiturn.verdicts import changes, import_places
from verl_multiturn.verdicts.task import read_task
from verl_multiturn.workspaces.tars import TarFiles

FOLDERS = ("", "lib", "lib/json", "lib/json/deep", "spec", "spec/deep", "json", "PyTest", "test_x")
NAMES = ("__init__.py", "random.py", "json.py", "PyTest.py", "ops.py", "spec.py", "deep.py", "lib.py", "CONFTEST.py")
PATHS = [f"{folder}/{name}" if folder else name for folder in FOLDERS for name in NAMES]


class Both:
    """Both who ask the rule, over one tree, in each of whose folders hidden tests may lie."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.capsys, self.monkeypatch = folder / "repository", capsys, monkeypatch
        self.names = folder / "names.json"
        self.names.write_text(task_of_row("swe_rebench", ROWS["swe_rebench"], "row 1")[1].tests["names.json"])

    def refused(self, tree: set[str], made: set[str], gone: set[str]) -> tuple[set[str], set[str]]:
        """Return the changes that do not count: of a final tree, and of a patch."""
        return self.of_work(tree, made, gone), self.of_patch(tree, made, gone)

    def of_work(self, tree: set[str], made: set[str], gone: set[str]) -> set[str]:
        folders = {path[:end] for path in tree for end, sign in enumerate(path) if sign == "/"}
        hidden = dict.fromkeys((*(f"{folder}/hidden.py" for folder in folders), "hidden.py"), "")
        verdict = {**VERDICTS["pytest"], "files": hidden, "tests": ["hidden.py::test_a"], "unguarded": True}
        row = task("pytest", files=dict.fromkeys(tree, ""), verdict=verdict, allowed=["**"], gold={})
        found = dict.fromkeys(tree - gone, b"") | dict.fromkeys(made, b"x")
        return (made | gone) - changes.changes(read_task(row, "row"), TarFiles(found), ()).changes.keys()

    def of_patch(self, tree: set[str], made: set[str], gone: set[str]) -> set[str]:
        for path in tree:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).touch()
        said = [f" create mode 100644 {path}\n" for path in made] + [f" delete mode 100644 {path}\n" for path in gone]
        with self.monkeypatch.context() as patched:
            patched.chdir(self.folder)
            patched.setattr("sys.stdin", io.StringIO("".join(said)))
            import_places.main(str(self.names))
        return {line.removeprefix("--exclude=") for line in self.capsys.readouterr().out.splitlines()}


@pytest.fixture
def both(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Both:
    return Both(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("seed", range(100))
def test_a_tree_is_ruled_alike_for_work_and_for_a_patch(seed: int, both: Both) -> None:
    draw = random.Random(seed)
    tree = {path for path in PATHS if draw.random() < 0.25} | {"setup.txt"}
    made = {path for path in PATHS if path not in tree and draw.random() < 0.08}
    gone = {path for path in tree - {"setup.txt"} if draw.random() < 0.15}
    of_work, of_patch = both.refused(tree, made, gone)
    assert of_work == of_patch


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        ({"spec.py"}, {"spec.py"}),  # in the place of a folder that tests may lie below
        ({"lib/deep.py"}, {"lib/deep.py"}),
        ({"PyTest.py"}, {"PyTest.py"}),  # a runner's name, where a file system ignores case
        ({"lib/CONFTEST.py", "Test/a.py"}, {"lib/CONFTEST.py", "Test/a.py"}),
        ({"new.py", "lib/new/deep.py"}, set()),
    ],
)
def test_what_a_patch_was_allowed_once(made: set[str], refused: set[str], both: Both) -> None:
    tree = {"ops.py", "spec/a.py", "lib/deep/a.py"}
    assert both.refused(tree, made, set()) == (refused, refused)


@pytest.mark.parametrize(
    ("path", "is_shadow"),
    [
        ("pytest.py", True),  # the root has an `__init__.py`
        ("json/__init__.py", True),  # a folder of data
        ("logging.py", True),  # beside `logging.yaml`
        ("queue/__init__.py", True),
        ("random.py", False),  # the repository's own
        ("lib/random.py", False),
        ("json/more.json", False),
        ("queue.json", False),
        ("conftest/__init__.py", True),  # Python finds a package before a module
        ("lib/test_ops/__init__.py", True),
        ("lib/Ops_Test/__init__.py", True),
        ("lib/test_ops/data.json", False),
    ],
)
def test_a_new_file_of_a_patch_takes_the_place_of_no_module(path: str, is_shadow: bool, both: Both) -> None:
    tree = {"__init__.py", "lib/__init__.py", "json/a.json", "logging.yaml", "random.py"}
    assert both.of_patch(tree, {path}, set()) == ({path} if is_shadow else set())


@pytest.mark.parametrize(
    ("made", "gone", "exposed"),
    [
        ([], ["lib/__init__.py"], ["lib/__init__.py"]),
        (["lib/json.py"], ["lib/__init__.py", "lib/random.py"], ["lib/__init__.py"]),
        (["lib/queue/__init__.py"], ["lib/__init__.py", "lib/random.py"], ["lib/__init__.py"]),
        (["src/lib/__init__.py", "src/lib/random.py"], ["lib/__init__.py", "lib/random.py"], []),  # moved: tests stay
        (["app/spec/__init__.py"], [], ["app/spec/__init__.py"]),
        (["app/spec/__init__.py", "app/spec/deep/__init__.py"], [], ["app/spec/__init__.py"]),
        (["app/spec/deep/__init__.py"], [], []),  # imports would begin in `app/spec`
        (["app/__init__.py", "app/spec/__init__.py"], [], []),  # in the repository itself
        (["app/spec/__init__.py"], ["app/calendar.py"], []),
        (["app/new/__init__.py"], [], []),  # no test lies below it
    ],
)
def test_a_patch_does_not_move_where_imports_begin(
    made: list[str], gone: list[str], exposed: list[str], both: Both
) -> None:
    tree = {"lib/__init__.py", "lib/random.py", "lib/test/__init__.py", "app/calendar.py", "app/spec/deep/test_a.py"}
    assert both.of_patch(tree, set(made), set(gone)) == set(exposed)


def test_a_folder_behind_a_link_is_a_package_where_it_has_an_init(both: Both) -> None:
    (both.folder / "lib").mkdir(parents=True)
    (both.folder / "real").mkdir()
    (both.folder / "real" / "__init__.py").touch()
    (both.folder / "lib" / "json").symlink_to("../real")
    tree = {"lib/__init__.py", "lib/ops.py"}
    assert both.of_patch(tree, set(), {"lib/__init__.py"}) == {"lib/__init__.py"}


def test_a_path_is_no_pattern_of_git(both: Both) -> None:
    assert both.of_patch({"a[1]/b.py"}, {"a[1]/json.py"}, set()) == {r"a\[1]/json.py"}
