"""Rows of SWE data sets with images as Harbor's tasks: columns, grading, and their scripts played without an image."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.tasks.write import HarborTask, write_folder
from verl_multiturn.task_sets.swe.grade import grade
from verl_multiturn.task_sets.swe.images import task_of_row
from verl_multiturn.verdicts import import_places
from verl_multiturn.workspaces.settings import WorkspaceSettings
from verl_multiturn.workspaces.tars import read_tar, write_tar
from verl_multiturn.workspaces.threads import ThreadWorkspace, open_workspace

TREE = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": "from calc import add\ndef test_zero(): assert add(0, 0) == 0\n",
    ".gitignore": "*.log\n",
}
GOLD = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TESTS = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,2 +1,3 @@
 from calc import add
+def test_add(): assert add(2, 3) == 5
 def test_zero(): assert add(0, 0) == 0
"""
ROWS: dict[str, dict[str, Any]] = {
    "swe_gym": {
        "instance_id": "Org__calc-1",
        "problem_statement": "add is wrong",
        "patch": GOLD,
        "eval_script": "cd /testbed\npython -m pytest -rA",
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
        "PASS_TO_PASS": '["tests/test_calc.py::test_zero"]',
    },
    "swe_rebench": {
        "instance_id": "Org__calc-1",
        "problem_statement": "add is wrong",
        "patch": GOLD,
        "test_patch": TESTS,
        "install_config": {
            "install": None,
            "test_cmd": "python -m pytest -rA -p no:cacheprovider",
            "log_parser": "parse_log_pytest",
        },
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero"],
    },
    "r2e_gym": {
        "repo_name": "calc",
        "commit_hash": "0123456789abcdef",
        "docker_image": "namanjain12/calc_final:0123456789abcdef",
        "problem_statement": "words [ISSUE]\nadd is wrong\n[/ISSUE]",
        "expected_output_json": '{"TestCalc.test_add": "PASSED"}',
    },
}
IMAGES = {
    "swe_gym": "docker.io/xingyaoww/sweb.eval.x86_64.org_s_calc-1:latest",
    "swe_rebench": "swerebench/sweb.eval.x86_64.org_1776_calc-1",
    "r2e_gym": "namanjain12/calc_final:0123456789abcdef",
}


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_a_row_becomes_a_task(tmp_path: Path, kind: str) -> None:
    name, task = task_of_row(kind, ROWS[kind], "row 1")
    write_folder(tmp_path / name, task)
    dockerfile = (tmp_path / name / "environment" / "Dockerfile").read_text()
    assert dockerfile.startswith(f"FROM {IMAGES[kind]}\n")
    assert "RUN bash /var/tmp/one_commit.sh" in dockerfile
    assert (tmp_path / name / "tests" / "Dockerfile").read_text().startswith(f"FROM {IMAGES[kind]}\nCOPY . /tests\n")
    settings = (tmp_path / name / "task.toml").read_text()
    assert 'environment_mode = "separate"' in settings
    assert 'network_mode = "no-network"' in settings
    assert "[[verifier.collect]]" in settings
    assert "\n\nadd is wrong\n\n" in (tmp_path / name / "instruction.md").read_text()
    assert "[ISSUE]" not in task.instruction
    assert (tmp_path / name / "solution" / "solve.sh").exists() == (kind != "r2e_gym")


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("swe_gym", {"eval_script": None}, "row 1: it has no eval_script, expected the columns of SumanthRH/SWE-Gym"),
        ("swe_gym", {"problem_statement": "", "FAIL_TO_PASS": None}, "it has no problem_statement, FAIL_TO_PASS"),
        ("swe_gym", {"FAIL_TO_PASS": "[]"}, "its FAIL_TO_PASS names no test"),
        ("swe_gym", {"FAIL_TO_PASS": "no JSON"}, "row 1: Expecting value"),
        ("swe_gym", {"image_name": "x\nRUN evil"}, "expected plain names"),
        ("swe_rebench", {"install_config": {"log_parser": "parse_log_go"}}, "its log parser is 'parse_log_go'"),
        ("swe_rebench", {"test_patch": "+++ b/data.json"}, "its test_patch changes no Python file"),
        ("swe_rebench", {"install_config": {"log_parser": "parse_log_pytest"}}, "row 1: 'test_cmd'"),
        ("r2e_gym", {"expected_output_json": "{}"}, "its expected_output_json names no test"),
        ("r2e_gym", {"docker_image": ""}, "it has no docker_image"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(kind: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task_of_row(kind, {**ROWS[kind], **change}, "row 1")


def test_what_git_says_of_a_patch_becomes_options(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    names = tmp_path / "names.json"
    names.write_text(task_of_row("swe_rebench", ROWS["swe_rebench"], "row 1")[1].tests["names.json"])
    said = (
        " create mode 100644 lib/random.py\n delete mode 100644 lib/__init__.py\n mode change 100644 => 100755 a.py\n"
        " create mode 100644 json.py\n create mode 100644 conftest/__init__.py\n create mode 100644 conftest.py\n"
    )
    script = str(Path(import_places.__file__))
    command = [sys.executable, "-I", "-S", script, str(names)]
    done = subprocess.run(command, cwd=tmp_path, input=said, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        f"--exclude={path}" for path in ("conftest.py", "conftest/__init__.py", "json.py", "lib/__init__.py")
    ]


def test_logs_are_graded() -> None:
    names = {"form": "names", "passed": ["a.py::one", "a.py::two[x]"]}
    assert grade("PASSED a.py::one\n\x1b[32ma.py::two[x] PASSED\x1b[0m [ 50%]\n", names) == 1
    assert grade("PASSED a.py::one\nFAILED a.py::two[x] - assert 1\n", names) == 0
    assert grade("PASSED a.py::one\n", names) == 0
    summary = {"form": "summary", "statuses": {"A.one": "PASSED", "two - reason": "FAILED"}}
    log = "== short test summary info ==\nPASSED r2e_tests/a.py::A::one\nFAILED r2e_tests/a.py::two - other\n"
    assert grade(log, summary) == 1
    assert grade(f"{log}PASSED r2e_tests/a.py::three\n", summary) == 0
    assert grade("nothing", summary) == 0


def image(workspace: ThreadWorkspace) -> None:
    """Make the content of an image of such a data set: the repository with its later commits."""
    workspace.put(write_tar({path: text.encode() for path, text in TREE.items()}), "/tmp/testbed")
    done = workspace.run(
        "mkdir -p /tmp/var/tmp /tmp/logs/artifacts /tmp/logs/verifier && cd /testbed && git init -q && git add -A && "
        "git commit -qm base && sed -i 's/a - b/a + b/' calc.py && git commit -qam 'the solution' && git tag later && "
        'git reset -q --hard HEAD~1 && echo built > made.log && test -z "$(git status --short)"'
    )
    assert done.exit_code == 0, done.output


def play(task: HarborTask, command: str, patch: str | None = None) -> tuple[str, dict[str, bytes]]:
    """Play a task's scripts around a command of an agent; return its git's history, and the files of the reward.

    A patch is that of an agent whose git is its own.
    """
    settings = WorkspaceSettings(packages=("pytest",), folders=("testbed", "var"), timeout_s=120)
    with open_workspace(settings) as workspace:
        image(workspace)
        script = task.environment["one_commit.sh"].replace("/root", "/tmp/root")
        assert workspace.run(script).exit_code == 0
        look = "git log --all --format=%s; git log --all -S'a + b' --format=%h; cat made.log"
        known = workspace.run(look, cwd="/testbed")
        workspace.run(command, cwd="/testbed")
        workspace.run(task.collect)
        left = read_tar(workspace.get("work.patch", path="/tmp/logs/artifacts")).files
        left = left if patch is None else {"work.patch": patch.encode()}
    with open_workspace(settings) as workspace:
        image(workspace)
        workspace.put(write_tar({path: text.encode() for path, text in task.tests.items()}), "/tmp/tests")
        workspace.put(write_tar(left), "/tmp/logs/artifacts")
        workspace.run("bash /tests/test.sh")
        return known.output, read_tar(workspace.get("reward.txt", path="/tmp/logs/verifier")).files


HOOK = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(): return True"
FORGED = "print('PASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_zero')"


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("sed -i 's/a - b/a + b/' calc.py; git commit -qam mine; echo 0 > tests/test_new.py", b"1\n"),
        (
            "sed -i 's/a - b/a + b/' calc.py; chmod +x calc.py; head -c 99 /dev/zero > 'é 0'",
            b"1\n",
        ),
        ("true", b"0\n"),
        (f"echo {shlex.quote(HOOK)} > conftest.py", b"0\n"),
        (f"echo {shlex.quote(FORGED)} > pytest.py", b"0\n"),
        ("ln -sf /etc/hostname calc.py", b"0\n"),
        ("rm -rf .git", None),  # no patch, no reward: Harbor's bridge reports that the agent has failed
    ],
)
def test_the_scripts_work_without_an_image(command: str, reward: bytes | None) -> None:
    _, task = task_of_row("swe_rebench", ROWS["swe_rebench"], "row 1")
    known, files = play(task, command)
    assert known == "The repository as it is\nbuilt\n"
    assert files == ({} if reward is None else {"reward.txt": reward})


PRINTS = "".join(f"+print({line!r})\n" for line in FORGED.removeprefix("print('").removesuffix("')").split("\\n"))
MOVED = "--- a/calc.py\n+++ b/pytest.py\n@@ -1,2 +1,2 @@\n-def add(a, b):\n-    return a - b\n" + PRINTS
MADE = "--- /dev/null\n+++ b/pytest.py\n@@ -0,0 +1,2 @@\n" + PRINTS
MENDED = "--- a/calc.py\n+++ b/calc.py\n@@ -2 +2 @@\n-    return a - b\n+    return a + b\n"
LINK = "--- /dev/null\n+++ b/link\n@@ -0,0 +1 @@\n+/etc/hostname\n\\ No newline at end of file\n"


@pytest.mark.parametrize(
    "patch",
    [
        "diff --git a/calc.py b/pytest.py\nsimilarity index 60%\nrename from calc.py\nrename to pytest.py\n" + MOVED,
        "diff --git a/calc.py b/pytest.py\nsimilarity index 60%\nrename old calc.py\nrename new pytest.py\n" + MOVED,
        "diff --git a/calc.py b/pytest.py\nsimilarity index 60%\ncopy from calc.py\ncopy to pytest.py\n" + MOVED,
        "diff --git a/pytest.py b/pytest.py\nnew file mode 0\n" + MADE,
        MADE,
        MADE.replace("/dev/null", "a/pytest.py"),
        "diff --git a/calc.py b/calc.py\nnew mode  120000\n" + MENDED,
        MENDED + "diff --git a/link b/link\nnew file mode 0120000\n" + LINK,
    ],
)
def test_a_patch_of_another_form_is_no_work(patch: str) -> None:
    """The task's own command writes none; git would apply it, and names in it no new file, or no link."""
    _, task = task_of_row("swe_rebench", ROWS["swe_rebench"], "row 1")
    assert play(task, "true", patch)[1] == {"reward.txt": b"0\n"}
