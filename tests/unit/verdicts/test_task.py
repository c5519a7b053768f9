"""Tasks: allowed values in a row, and the errors that name others."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.workspace_attacks import VERDICTS, task
from verl_multiturn import ConfigError
from verl_multiturn.verdicts import globs
from verl_multiturn.verdicts.globs import Globs
from verl_multiturn.verdicts.task import read_task


@pytest.mark.parametrize(
    ("glob", "matched", "others"),
    [
        ("calc/*.py", ["calc/ops.py"], ["calc/a/ops.py", "ops.py", "calc/ops.pyc", "xcalc/ops.py"]),
        ("calc/**/*.py", ["calc/ops.py", "calc/a/b/ops.py"], ["calc.py", "lib/calc/ops.py"]),
        ("**/*.py", ["ops.py", "a/b/ops.py"], ["ops.txt"]),
        ("src/**", ["src/a", "src/a/b.c"], ["src", "srcs/a"]),
        ("**/src/**/lib/**/*.py", ["src/lib/a.py", "x/src/y/lib/z/a.py"], ["lib/src/a.py", "src/lib/a.txt"]),
        ("**/a/**", ["a/b", "x/a/a"], ["a", "x/a"]),
        ("**/*a*b.py", ["ab.py", "x/aab/xaxb.py"], ["a/b.py", "ba.py"]),
        ("a?.py", ["ab.py"], ["a/.py", "a.py"]),
        ("a[1].py", ["a[1].py"], ["a1.py"]),
    ],
)
def test_globs(glob: str, matched: list[str], others: list[str]) -> None:
    assert [path for path in [*matched, *others] if Globs([glob]).match(path)] == matched
    assert [path for path in [*matched, *others] if Globs(["none", glob]).match(path)] == matched


def test_a_path_is_looked_at_folder_by_folder_each_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model chooses the names: 45 folders `src/lib` above each file took seconds, names of `a` alone minutes."""
    looks = []
    following = globs._following
    for count in (10, 100):
        seen: list[str] = []
        monkeypatch.setattr(globs, "_following", lambda *args, seen=seen: seen.append(args[2]) or following(*args))
        deep = Globs(["**/src/**/lib/**/*.py", "**/*a*a*a*.py"])
        assert not any(deep.match(f"{'src/lib/' * 45}{'a' * 200}{number}") for number in range(count))
        monkeypatch.undo()
        looks.append(len(seen))
    assert looks == [2 * (90 + 10), 2 * (90 + 100)]


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_row_is_read(verdict: str) -> None:
    assert read_task(task(verdict), "row").verdict.kind == VERDICTS[verdict]["kind"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image": "python:3.12"}, "'python:3.12' is a container's image, and this sandbox has none"),
        ({"verdict": {"kind": "oracle"}}, "'oracle'.*'calls', 'pytest', 'script'"),
        ({"files": {}}, "the task has no tree"),
        ({"files": {"../x.py": ""}}, r"'\.\./x\.py'.*leads out of its folder"),
        ({"files": {"a//x.py": ""}}, "not in its shortest form; write 'a/x.py'"),
        ({"allowed": []}, "allowed"),
        ({"allowed": ["calc/a**.py"]}, r"the glob 'calc/a\*\*\.py': '\*\*' stands for whole folders"),
        ({"variables": {"A=B": "1"}}, "variables: the variable 'A=B': expected a name, without '='"),
        ({"variables": {"A": "1\0"}}, "variables: the variable 'A': .* no NUL character in name or value"),
        ({"gold": {"setup.sh": ""}}, r"'setup\.sh' is not among the allowed paths"),
        ({"verdict": {"kind": "script", "files": {"run.sh": ""}}}, "there is no 'test.sh' among"),
        ({"verdict": {**VERDICTS["calls"], "tests": ["assert 1 == 1"]}}, "calls none of"),
        ({"verdict": {**VERDICTS["calls"], "tests": ["assert ("]}}, "is no Python"),
        ({"verdict": {**VERDICTS["calls"], "functions": {"add": "calc/ops.py"}}}, "functions.add"),
        ({"verdict": {**VERDICTS["pytest"], "tests": ["test_add"]}}, "'test_add' is no name of a test; write it as"),
        ({"verdict": {**VERDICTS["pytest"], "twins": ["a.py::b"]}}, "'a.py::b' is no test of 'tests' or 'kept'"),
        ({"time_s": 3}, "unknown setting"),
    ],
)
def test_a_row_that_cannot_work_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_task(task("calls", **change), "row 7")
    assert str(refused.value).startswith("row 7")
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("method", ["pathlib.Path.read_bytes", "os.scandir"])
def test_a_folder_that_cannot_be_read_is_no_smaller_tree(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(method, Mock(side_effect=OSError("Stale file handle")))
    with pytest.raises(ConfigError, match=r"folder '.*' cannot be read: Stale file handle"):
        read_task(task("calls", folder=str(tmp_path)), "row").tree()


def test_a_folder_is_the_tree_without_its_git_and_its_compiled_files(tmp_path: Path) -> None:
    for path in (".git/HEAD", "calc/__pycache__/ops.pyc", "calc/ops.py", "calc/other.pyc", "run.sh"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("text")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    row = task("calls", folder=str(tmp_path), files={"calc/ops.py": "over it"})
    files, executable = read_task(row, "row").tree()
    assert files == {"calc/ops.py": b"over it", "run.sh": b"text"}
    assert executable == {"run.sh"}
    with pytest.raises(ConfigError, match="'/nowhere' is no folder"):
        read_task(task("calls", folder="/nowhere"), "row").tree()
