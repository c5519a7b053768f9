"""Packages that ship their tests, and the problem statement of a mutated one."""

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.task_sets.swe.draw import statement_of
from verl_multiturn.task_sets.swe.mutations import Mutation, mutations_of
from verl_multiturn.task_sets.swe.packages import Package, is_test, read_package
from verl_multiturn.task_sets.swe.tasks import SweTask
from verl_multiturn.task_sets.swe.trials import needed_packages
from verl_multiturn.verdicts.task import PytestVerdict

toolz = pytest.importorskip("toolz")


def made(*paths: str) -> Package:
    return Package("p", "1", dict.fromkeys(paths, b""))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("p/core.py", False),
        ("p/testing.py", False),
        ("p/tests/core.py", True),
        ("p/test/data.json", True),
        ("p/test_core.py", True),
        ("p/core_test.py", True),
        ("p/conftest.py", True),
        ("tests.py", False),
    ],
)
def test_what_a_test_is(path: str, expected: bool) -> None:
    assert is_test(path) is expected


def test_the_tests_near_a_module_are_those_of_the_nearest_folder() -> None:
    package = made(
        *("p/a.py", "p/tests/test_a.py", "p/tests/test_b.py", "p/tests/helper.py", "p/tests/conftest.py"),
        *("p/sub/c.py", "p/sub/tests/test_c.py", "p/other/d.py", "q.py"),
    )
    assert package.tests == ["p/sub/tests/test_c.py", "p/tests/test_a.py", "p/tests/test_b.py"]
    assert package.near_tests("p/a.py") == ("p/tests/test_a.py", "p/tests/test_b.py")
    assert package.near_tests("p/sub/c.py") == ("p/sub/tests/test_c.py",)
    assert package.near_tests("p/other/d.py") == ("p/tests/test_a.py", "p/tests/test_b.py")
    assert package.near_tests("q.py") == ()
    assert sorted(package.beside(["p/sub/tests/test_c.py"])) == ["p/sub/tests/test_c.py", "p/tests/conftest.py"]


def test_of_many_tests_those_with_the_modules_name_are_near() -> None:
    package = made("p/_a.py", "p/b.py", *(f"p/tests/test_{name}.py" for name in [*range(40), "a_one", "a"]))
    assert package.near_tests("p/_a.py") == ("p/tests/test_a.py", "p/tests/test_a_one.py")
    assert package.near_tests("p/b.py") == ()


def test_an_installed_package_is_read() -> None:
    package = read_package("toolz")
    assert (package.name, package.version) == ("toolz", toolz.__version__)
    assert "toolz/itertoolz.py" in package.sources
    assert "toolz/tests/test_itertoolz.py" in package.tests
    assert not [path for path in package.files if path.endswith(".pyc") or "RECORD" in path]
    assert needed_packages("toolz") == ("pytest",)
    assert needed_packages("sympy") == ("pytest", "mpmath")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-package", r"'no-such-package' is not installed.*pip install no-such-package"),
        ("", r"'' is not installed"),
        ("numpy", r"'numpy' has compiled files \(.*expected one in plain Python"),
        ("rich", r"'rich' [\d.]+ ships no tests"),
    ],
)
def test_a_package_that_cannot_be_used_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_package(name)


def test_the_statement_has_names_and_messages_and_no_place() -> None:
    said = statement_of("p", "1.0", {"t.py::test_a": "assert 1 == 2\n + more", "t.py::test_b": "x" * 400})
    assert said == (
        "2 tests fail in this copy of the Python package p (1.0):\n\n"
        "- t.py::test_a\n  assert 1 == 2\n   + more\n"
        f"- t.py::test_b\n  {'x' * 300}…\n\n"
        "The tests are right, and one place of the package is wrong. Find it and correct it, so that these tests pass "
        "and no other one fails. Changes of tests and of configuration do not count."
    )
    assert statement_of("p", "1", {"a": "b"}).startswith("A test fails in")
    assert "\nand 2 more.\n" in statement_of("p", "1", {str(number): "" for number in range(7)})


def task_of(mutation: Mutation, **changed: object) -> SweTask:
    fields = {"package": "toolz", "version": toolz.__version__, "failing": ("a.py::test_a",), "passing": ()}
    return SweTask.model_validate({**fields, "mutation": mutation, "statement": "", **changed})


def first_mutation() -> Mutation:
    return mutations_of("toolz/itertoolz.py", read_package("toolz").files["toolz/itertoolz.py"])[0]


def test_a_row_becomes_a_task_of_the_verdict() -> None:
    mutation = first_mutation()
    row = task_of(mutation, failing=("toolz/tests/test_core.py::test_a",)).model_dump_json()
    package, task = read_package("toolz"), SweTask.model_validate_json(row).task()
    changed = {path for path, text in task.files.items() if text.encode() != package.files[path]}
    assert (set(task.files), changed) == (set(package.files), {"toolz/itertoolz.py"})
    assert task.files["toolz/itertoolz.py"].encode() == mutation.apply(package.files["toolz/itertoolz.py"])
    assert task.gold == {"toolz/itertoolz.py": package.files["toolz/itertoolz.py"].decode()}
    assert task.allowed == ("tlz/**/*.py", "toolz/**/*.py")
    assert isinstance(task.verdict, PytestVerdict)
    assert "toolz/tests/test_itertoolz.py" in task.verdict.files
    assert "toolz/sandbox/tests/test_core.py" not in task.verdict.files
    hidden = task_of(mutation).task(hide_tests=True)
    assert set(hidden.files) == {path for path in package.files if not is_test(path)}


def test_another_version_than_the_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the row is about toolz '0\.1', and '[\d.]+' is installed"):
        task_of(first_mutation(), version="0.1").task()
    other = Mutation("toolz/itertoolz.py", 1, "constant", "f", 0, 1, "?", "!")
    with pytest.raises(ConfigError, match=r"the files of toolz [\d.]+ are not those of the row"):
        task_of(other).task()
