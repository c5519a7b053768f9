"""An agent's changes: which changes count, and which never do."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from tests.support.workspace_attacks import FILES, FIXED, VERDICTS, task
from verl_multiturn.errors import ConfigError, UnjudgedError
from verl_multiturn.verdicts import changes as of_agents
from verl_multiturn.verdicts.changes import WorkChanges
from verl_multiturn.verdicts.judge import Judge
from verl_multiturn.verdicts.task import Task, read_task
from verl_multiturn.verdicts.task_check import check_task
from verl_multiturn.workspaces.tars import TarFiles, write_tar
from verl_multiturn.workspaces.workspace import Workspace

TREE = {path: text.encode() for path, text in FILES.items()}


def one(**more: object) -> Task:
    return read_task(task("pytest", **{"verdict": {**VERDICTS["pytest"], "unguarded": True}, **more}), "row")


def hidden_in(*paths: str, tree: Mapping[str, bytes] = TREE, roots: Sequence[str] = (".",), **more: object) -> Task:
    """Return the task with another tree, and with hidden files, of which those named `test_*.py` are run."""
    tests = [f"{path}::test_add" for path in paths if path.rpartition("/")[2].startswith("test_")]
    verdict = {"kind": "pytest", "files": dict.fromkeys(paths, ""), "tests": tests, "roots": roots}
    files = {path: text.decode() for path, text in tree.items()}
    return one(**{"files": files, "verdict": verdict, "allowed": ["**/*.py"], "gold": {}, **more})


def changes(judged: Task, found: TarFiles) -> WorkChanges:
    return of_agents.changes(judged, found, ("pytest",))


def test_changes_are_what_differs_from_the_rows_tree() -> None:
    found = TarFiles({**TREE, "calc/ops.py": FIXED.encode(), "calc/new.py": b"new", "notes.txt": b"x"})
    del found.files["calc/__init__.py"]
    left = changes(one(), found)
    assert left.changes == {"calc/ops.py": FIXED.encode(), "calc/new.py": b"new", "calc/__init__.py": None}
    assert left.left_out == {"notes.txt": "the task does not allow it"}
    assert left.problem is None


def test_the_bit_that_lets_a_file_be_executed_is_a_change() -> None:
    left = changes(one(), TarFiles(dict(TREE), {"calc/ops.py"}))
    assert left.changes == {"calc/ops.py": TREE["calc/ops.py"]}
    assert left.executable == frozenset({"calc/ops.py"})


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests/test_visible.py", "a test"),
        ("tests/test_ops.py", "a test"),
        ("calc/test_more.py", "a test"),
        ("calc/Tests/helper.py", "a test"),
        ("conftest.py", "configuration of tests"),
        ("calc/CONFTEST.py", "configuration of tests"),
        ("setup.cfg", "configuration of tests"),
        ("sitecustomize.py", "a start-up file"),
        ("sitecustomize/__init__.py", "a start-up file"),
        ("calc/x.pth", "a start-up file"),
        ("calc/ops.pyc", "a compiled file"),
        ("calc/__pycache__/ops.py", "a compiled file"),
        ("calc/ops.cpython-311-x86_64-linux-gnu.so", "a compiled file"),
        (".git/hooks/post-checkout", "a file of git"),
        (".gitattributes", "a file of git"),
        ("x-1.dist-info/entry_points.txt", "an installed package's"),
        ("pytest.py", "it would shadow the module 'pytest'"),
        ("_pytest/__init__.py", "it would shadow the module '_pytest'"),
        ("random.py", "it would shadow the module 'random'"),
        ("json/__init__.py", "it would shadow the module 'json'"),
        (f"calc/{'x' * 201}.py", "its name is too long"),
    ],
)
def test_some_files_are_never_taken_whatever_the_row_allows(path: str, reason: str) -> None:
    left = changes(one(allowed=["**"], gold={}), TarFiles({**TREE, path: b"x"}))
    assert left.left_out == {path: reason}
    assert left.changes == {}


@pytest.mark.parametrize("path", ["calc/random.py", "calc/json/io.py", "calc/protest.py", "more/random.py"])
def test_a_module_of_a_package_may_have_any_name(path: str) -> None:
    left = changes(one(), TarFiles({**TREE, path: b"x"}))
    assert (left.changes, left.left_out) == ({path: b"x"}, {})


PACKAGE = {"__init__.py": b"", "src/lib/__init__.py": b"", "json/a.json": b"", "logging.yaml": b"", "yaml.py": b""}


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("pytest.py", "pytest"),  # the root has an `__init__.py`
        ("_pytest/__init__.py", "_pytest"),
        ("src/random.py", "random"),
        ("src/lib/random.py", "random"),  # a package that is a root
        ("json/__init__.py", "json"),  # a folder of data
        ("logging.py", "logging"),  # beside `logging.yaml`
        ("exceptiongroup.py", "exceptiongroup"),  # of pytest's requirements
        ("pytest_asyncio.py", "pytest_asyncio"),  # a plugin
        ("pytest_asyncio/__init__.py", "pytest_asyncio"),
    ],
)
def test_a_new_module_takes_the_place_of_no_other_one(path: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_agents, "modules_of", lambda packages: frozenset({"pytest", "exceptiongroup"}))
    verdict = {**VERDICTS["pytest"], "plugins": ["pytest_asyncio.plugin"], "roots": ["./src/", "src/lib"]}
    tree = {path: text.decode() for path, text in (TREE | PACKAGE).items()}
    judged = one(files=tree, verdict=verdict, allowed=["**"], gold={})
    left = changes(judged, TarFiles(TREE | PACKAGE | {path: b"x"}))
    assert (left.changes, left.left_out) == ({}, {path: f"it would shadow the module {module!r}"})


@pytest.mark.parametrize("path", ["tools.py", "src/tools/__init__.py", "src/lib/tools.py", "json/b.json", "yaml/a.py"])
def test_a_module_of_the_repositorys_own_counts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_agents, "modules_of", lambda packages: frozenset({"yaml"}))
    tree = {path: text.decode() for path, text in (TREE | PACKAGE).items()}
    judged = one(files=tree, allowed=["**"], gold={})
    found = {
        **TREE,
        **PACKAGE,
        path: b"x",
        "json/a.json": b"changed",
        "logging.yaml": b"changed",
        "yaml.py": b"changed",
    }
    left = changes(judged, TarFiles(found))
    assert left.left_out == {}
    assert left.changes.keys() == {path, "json/a.json", "logging.yaml", "yaml.py"}


def test_a_package_is_not_made_a_folder_that_imports_begin_in() -> None:
    """Pytest would begin the imports of `calc/tests/test_ops.py` in `calc` if that were not a package."""
    tree = TREE | {"calc/json/__init__.py": b"", "calc/json/io.py": b"", "calc/tests/__init__.py": b""}
    judged = hidden_in("calc/tests/test_ops.py", "calc/json/tests/test_io.py", tree=tree)

    def left(deleted: set[str], *made: str) -> WorkChanges:
        found = {path: text for path, text in tree.items() if path not in deleted}
        return changes(judged, TarFiles(found | dict.fromkeys(made, b"x")))

    own, inner = "calc/__init__.py", "calc/json/__init__.py"
    assert left({own}).left_out == {own: "'calc/json' would shadow the module 'json'"}
    assert left({own, inner, "calc/json/io.py"}).left_out == {}
    made = left({own, inner, "calc/json/io.py"}, "calc/random.py")
    assert made.left_out == {own: "'calc/random' would shadow the module 'random'"}
    assert made.changes == {"calc/random.py": b"x", inner: None, "calc/json/io.py": None}
    # The inner package stays one, so the outer one has it still.
    assert left({own, inner}, "calc/json/random.py").left_out.keys() == {own, inner}
    moved = {path for path in tree if path.startswith("calc/")}
    assert left(moved, "more/calc/random.py", "more/calc/__init__.py").left_out == {}


async def test_a_repair_whose_deletion_would_not_count_is_refused() -> None:
    gold = {"calc/ops.py": FIXED, "calc/__init__.py": None}
    judged = hidden_in("calc/test_ops.py", tree=TREE | {"calc/random.py": b""}, gold=gold)
    said = "task 'pytest': gold: 'calc/__init__.py' is never taken: 'calc/random' would shadow the module 'random'"
    with pytest.raises(ConfigError, match=said):
        await check_task(judged, Judge())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("conftest/__init__.py", "configuration of tests"),
        ("calc/conftest/__init__.py", "configuration of tests"),
        ("calc/test_ops/__init__.py", "a test"),
        ("calc/test_values_order/__init__.py", "a test"),  # a name that may be drawn for a twin or a test of our own
        ("calc/ops_test/__init__.py", "a test"),
        ("spec/helpers/__init__.py", "a test"),
        ("spec.py", "it would take the place of the tests' folder 'spec'"),
        ("lib/fixed/__init__.py", "it would take the place of 'lib/fixed.py', which the task does not allow"),
    ],
)
def test_a_new_package_or_module_is_not_found_before_what_never_counts(path: str, reason: str) -> None:
    tree = TREE | {"conftest.py": b"", "lib/fixed.py": b"", "spec/data.json": b""}
    allowed = ["*.py", "calc/**/*.py", "lib/*/*.py", "*/**/__init__.py"]
    judged = hidden_in("calc/test_ops.py", "spec/helpers.py", "spec/test_more.py", tree=tree, allowed=allowed)
    left = changes(judged, TarFiles(tree | {path: b"x"}))
    assert (left.changes, left.left_out) == ({}, {path: reason})


def test_packages_of_the_row_and_those_that_replace_its_modules_may_be_changed() -> None:
    tree = TREE | {"load_test/__init__.py": b"", "load_test/run.py": b""}
    made = {"load_test/__init__.py": b"x", "load_test/run.py": b"x", "load_test/more.py": b"x"}
    found = tree | made | {"calc/ops/__init__.py": b"x"}
    del found["calc/ops.py"]
    left = changes(one(files={path: text.decode() for path, text in tree.items()}), TarFiles(found))
    assert left.left_out == {}
    assert left.changes.keys() == made.keys() | {"calc/ops.py", "calc/ops/__init__.py"}


@pytest.mark.parametrize("path", ["src/random.py", "src/json/__init__.py", "src/pytest.py", "src/lib/random.py"])
def test_a_folder_that_imports_begin_in_may_be_new(path: str) -> None:
    judged = hidden_in("tests/test_ops.py", roots=["src", ".", "./src/lib"])
    left = changes(judged, TarFiles(TREE | {path: b"x", "src/calc/random.py": b"x"}))
    assert left.left_out.keys() == {path}
    assert left.changes == {"src/calc/random.py": b"x"}


def test_a_package_is_not_made_where_imports_would_begin_above_it() -> None:
    """Pytest begins them in `app` if `app/spec` is a package, and in `app/spec` if it is none."""
    tree = TREE | {"app/calendar.py": b"", "app/ops.py": b""}
    judged = hidden_in("app/spec/deep/test_a.py", tree=tree)
    inner, own, outer = "app/spec/deep/__init__.py", "app/spec/__init__.py", "app/__init__.py"

    def left(*made: str) -> WorkChanges:
        return changes(judged, TarFiles(tree | dict.fromkeys(("app/calendar.py", *made), b"x")))

    reason = "'app/calendar' would shadow the module 'calendar'"
    assert left(inner).left_out == {}  # imports begin in `app/spec`
    assert left(own).left_out == {own: reason}
    assert left(own, inner).left_out == {own: reason}
    assert left(outer, own, inner).left_out == {}  # in the tree itself
    assert left(outer).left_out == {}
    hidden = hidden_in("app/spec/test_a.py", "app/calendar.py", tree=tree)  # that module is the row's
    assert changes(hidden, TarFiles(tree | {own: b"x"})).left_out == {}


def test_imports_do_not_begin_in_the_tree_itself_if_it_is_no_root() -> None:
    tree = {"__init__.py": b"", "calendar.py": b"", "app/ops.py": b""}
    reason = "'calendar' would shadow the module 'calendar'"
    packaged = tree | {"app/__init__.py": b""}
    judged = hidden_in("app/test_a.py", tree=packaged, roots=["src"])
    left = changes(judged, TarFiles({path: text for path, text in packaged.items() if path != "__init__.py"}))
    assert left.left_out == {"__init__.py": reason}
    del tree["__init__.py"]
    left = changes(hidden_in("app/test_a.py", tree=tree, roots=["src"]), TarFiles(packaged | {"__init__.py": b""}))
    assert left.left_out == {}  # they begin above it, where nothing lies
    del packaged["__init__.py"]
    left = changes(hidden_in("app/test_a.py", tree=tree, roots=["src"]), TarFiles(packaged))
    assert left.left_out == {"app/__init__.py": reason}
    assert changes(hidden_in("app/test_a.py", tree=tree), TarFiles(packaged)).left_out == {}


def test_a_package_whose_tests_stay_may_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests never count, so their package stays; `tests` is a package in some installed ones, too."""
    monkeypatch.setattr(of_agents, "modules_of", lambda packages: frozenset({"tests"}))
    tree = TREE | {"calc/tests/__init__.py": b"", "calc/tests/test_old.py": b""}
    moved = {path: text for path, text in tree.items() if not path.startswith("calc/") or "tests" in path}
    found = moved | {"src/calc/__init__.py": b"", "src/calc/ops.py": b""}
    for judged in (
        hidden_in("calc/tests/test_ops.py", tree=tree),
        one(files={path: text.decode() for path, text in tree.items()}, verdict=VERDICTS["script"]),
        one(files={path: text.decode() for path, text in tree.items()}, verdict=VERDICTS["calls"]),
    ):
        left = changes(judged, TarFiles(found))
        assert left.left_out == {}
        assert left.changes["calc/__init__.py"] is None


def test_many_deleted_packages_are_looked_at_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    dirname = os.path.dirname
    for count in (20, 200):
        packages = [f"p{number}" for number in range(count)]
        tree = {f"{package}/{name}": b"" for package in packages for name in ("__init__.py", "random.py")}
        judged = hidden_in(*(f"{package}/test_a.py" for package in packages), tree=tree)
        names = of_agents.names_of(judged, tree, ())
        calls: list[str] = []
        monkeypatch.setattr(os.path, "dirname", lambda path, calls=calls: calls.append(path) or dirname(path))
        found = of_agents.exposing(dict.fromkeys((f"{package}/__init__.py" for package in packages), None), names)
        monkeypatch.undo()
        assert len(found) == count
        counts.append(len(calls))
    assert counts[1] == 10 * counts[0]


def test_a_new_module_beside_hidden_tests_takes_the_place_of_no_other_one() -> None:
    """Pytest begins imports in the folder of a test, also where only the verdict has it."""
    verdict = {**VERDICTS["pytest"], "files": {**VERDICTS["pytest"]["files"], "calc/hidden/test_more.py": ""}}
    left = changes(one(verdict=verdict), TarFiles({**TREE, "calc/hidden/random.py": b"x"}))
    assert left.left_out == {"calc/hidden/random.py": "it would shadow the module 'random'"}


class Counted(dict[str, bytes]):
    """A tree that counts how often somebody goes through all of it."""

    walks = 0

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return super().__iter__()


def test_the_rows_tree_is_not_walked_through_for_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    for count in (3, 30):
        tree = Counted(TREE)
        monkeypatch.setattr(Task, "tree", lambda _, tree=tree: (tree, set()))
        changes(one(), TarFiles({f"calc/new/{number}.py": b"" for number in range(count)}))
        walks.append(tree.walks)
    assert walks[0] == walks[1]


async def test_what_a_model_left_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def tree(_: Task) -> tuple[dict[str, bytes], set[str]]:
        threads.add(threading.get_ident())
        return dict(TREE), set()

    async def attempt(*_: object) -> tuple[float, str]:
        return 0.0, "no"

    monkeypatch.setattr(Task, "tree", tree)
    workspace = create_autospec(Workspace, instance=True)
    workspace.get.return_value = write_tar(TREE)
    judge = Judge()
    monkeypatch.setattr(judge, "attempt", attempt)
    assert (await judge.judge(one(), workspace)).why == "no"
    assert threads
    assert threading.get_ident() not in threads


async def test_a_row_that_cannot_work_is_not_judged(tmp_path: Path) -> None:
    """An agent that raised `ConfigError` would be paid 0."""
    workspace = create_autospec(Workspace, instance=True)
    workspace.get.return_value = write_tar(TREE)
    with pytest.raises(UnjudgedError, match=r"task 'pytest' cannot be judged: .*gone' is no folder"):
        await Judge().judge(one(folder=str(tmp_path / "gone")), workspace)


@pytest.mark.parametrize(
    ("text", "allowed", "said"),
    [
        ("", ["**/*.py"], "has 20.* files and folders"),
        ("x" * 3_585, ["**/*.py"], "is a tar of 7.* bytes; at most 20000 and 67108864 can be read"),
        ("x" * 3_585, ["calc/*.py"], ""),  # the data lie elsewhere
    ],
)
async def test_a_tree_of_which_no_repair_could_be_read_is_refused(text: str, allowed: list[str], said: str) -> None:
    count = 16_000 if text else 19_999
    files = FILES | {f"data/{number}": text for number in range(count)}
    judged = one(files=files, allowed=allowed, gold={"calc/ops.py": FIXED})
    assert re.search(said, why := of_agents.why_uncollected(judged, judged.tree()[0]))
    assert bool(said) == bool(why)
    if said:
        with pytest.raises(ConfigError, match=f"task 'pytest': the repair: what lies .*{said}"):
            await check_task(judged, Judge())


async def test_tests_that_may_take_longer_than_a_command_are_named() -> None:
    workspace = create_autospec(Workspace, instance=True)
    workspace.get.return_value = write_tar(TREE)
    said = r"task 'pytest' cannot be judged: task 'pytest': timeout_s 601, expected at most 600"
    with pytest.raises(UnjudgedError, match=said):
        await Judge().judge(one(timeout_s=601), workspace)


async def test_a_verdict_that_waits_for_others_loses_none_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, is_late = [], True

    async def attempt(*_: object) -> tuple[float, str]:
        begun.append(1)
        while is_late:  # noqa: ASYNC110 - until it is cancelled
            await asyncio.sleep(1)
        return 0.0, "no"

    async def judged() -> str:
        return (await judge.judge_left(one(), WorkChanges())).why

    judge = Judge(at_once=1, verdict_s=0.01)
    monkeypatch.setattr(judge, "attempt", attempt)
    await judge._slots.acquire()
    waiting = asyncio.create_task(judged())
    await asyncio.sleep(0.1)
    assert (waiting.done(), begun) == (False, [])
    judge._slots.release()
    with pytest.raises(UnjudgedError, match=r"task 'pytest': its verdict took longer than 0\.01 s; use a machine"):
        await waiting
    judge._wait_s, judge._verdict_s = 0.01, None
    await judge._slots.acquire()
    with pytest.raises(UnjudgedError, match=r"task 'pytest': its verdict waited longer than 0\.01 s; use a machine"):
        await judged()
    judge._slots.release()
    is_late = False
    assert await judged() == "no"


def test_a_link_in_the_place_of_a_source_deletes_it() -> None:
    files = {path: content for path, content in TREE.items() if not path.startswith("calc/ops")}
    left = changes(one(), TarFiles(files, left_out={"'calc/ops.py'": "a symbolic link"}))
    assert (left.changes, left.left_out) == ({"calc/ops.py": None}, {"'calc/ops.py'": "a symbolic link"})


def test_a_folder_in_the_place_of_a_file_that_stays_is_left_out() -> None:
    files = {**TREE, "README.md/ops.py": b"x"}
    del files["README.md"]
    left = changes(one(), TarFiles(files))
    assert (list(left.changes), list(left.left_out)) == ([], ["README.md/ops.py"])


def test_a_folder_in_the_place_of_a_file_that_is_deleted_counts() -> None:
    files = {**TREE, "calc/ops.py/ops.py": b"x"}
    del files["calc/ops.py"]
    assert changes(one(), TarFiles(files)).changes == {"calc/ops.py": None, "calc/ops.py/ops.py": b"x"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (TarFiles({**TREE, **{f"calc/m{n}.py": b"" for n in range(201)}}), "201 changed files of 0 bytes"),
        (TarFiles({**TREE, "calc/ops.py": bytes(2**21 + 1)}), "1 changed files of 2097153 bytes"),
        (TarFiles(dict(TREE), problem="it has more than 20000 entries"), "it has more than 20000 entries"),
    ],
)
def test_too_much_counts_for_nothing(found: TarFiles, said: str) -> None:
    left = changes(one(), found)
    assert left.changes == {}
    assert said in (left.problem or "")
