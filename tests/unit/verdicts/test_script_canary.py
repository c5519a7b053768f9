"""Canaries for scripts: where they are put, and which script leaves no place for one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from verl_multiturn.verdicts.changes import names_of
from verl_multiturn.verdicts.script_canary import Canary, CanaryRun, canary_runs, named_program, why_no_place
from verl_multiturn.verdicts.task import ScriptVerdict, Task, UnguardedError, read_task

CANARY = Canary("/tmp/0", 0.25)


def one(script: str, tree: Mapping[str, str], allowed: tuple[str, ...] = ("*",), **more: Any) -> Task:
    verdict = {"kind": "script", "files": {"test.sh": script, **more}}
    return read_task({"name": "t", "files": tree, "allowed": allowed, "verdict": verdict}, "row")


def runs(task: Task) -> list[CanaryRun]:
    assert isinstance(task.verdict, ScriptVerdict)
    tree = task.tree()[0]
    return list(canary_runs(task, task.verdict, tree, names_of(task, tree, ()), CANARY))


@pytest.mark.parametrize(
    "text",
    [
        "print(1)\n",
        "#!/usr/bin/env python3\nprint(1)\n",
        '"""Words."""\nfrom __future__ import annotations\n\nprint(1)\n',
        '"""Words."""; from __future__ import annotations; print(1)\n',
        '"""Words\nof two lines."""\nprint(1)',
        "\ufeffprint(1)\n",
        "this is no Python",
        "",
    ],
)
def test_a_canary_of_python_runs_before_the_program(text: str) -> None:
    changed = runs(one("python3 main.py", {"main.py": text}))[0].changed["main.py"].decode()
    shown = f"import os; os.system = print\n__file__ = 'main.py'\nexec(compile({changed!r}, __file__, 'exec'))"
    result = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    assert lines[0] == "/tmp/0/run 0"
    assert lines[1:] == (["1"] if "print" in text else [])


def test_what_has_a_canary() -> None:
    tree = {
        "main.py": "print(1)\n",
        "run": "#!/bin/bash\necho 1\n",
        "Makefile": "all:\n",
        "a.awk": "{ print }\n",
        "answer.txt": "7\n",
        "kept/main.py": "",
        "tests/test_a.py": "",
    }
    found = runs(one("make && awk -f a.awk answer.txt\n[ -f setup.sh ] && . ./setup.sh", tree))
    first, second, awk = (each.changed for each in found[:2] + found[-2:-1])
    assert len(found) == 5  # the script names make, too; and bash evaluates
    assert first["run"] == b"#!/bin/bash\n/tmp/0/run 4\necho 1\n"
    assert first["Makefile"] == b"CANARY := $(shell /tmp/0/run 0)\nall:\n"
    assert first["a.awk"] == b'BEGIN { system("/tmp/0/run 1") }\n{ print }\n'
    assert first["answer.txt"] == b"/tmp/0/run 2\n7\n"
    assert first.keys() == {"main.py", "run", "Makefile", "a.awk", "answer.txt"}
    assert second["answer.txt"] == b"/tmp/0/run\n"  # all of it is the name of a program
    assert {"setup.sh", "canary"} < second.keys()
    assert awk["answer.txt"] == b'BEGIN { system("/tmp/0/run 2") }\n# 7\n'


def test_programs_may_take_the_place_of_others() -> None:
    second = runs(
        one('export PATH="/app/bin:$PATH"\ngrep 7 answer.txt', {"answer.txt": "7\n"}, ("bin/*", "answer.txt"))
    )[1]
    assert "bin/grep" in second.changed


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('{"a": [1, "x"], "b": {"c": "y"}}', {"a": [1, "/tmp/0/run 0"], "b": {"c": "/tmp/0/run 0"}}),
        ("[a]\nb = x y\nc: 'd'\n\n# e\n", "[a]\nb = /tmp/0/run 0\nc: '/tmp/0/run 0'\n\n# e\n"),
        ("7\n", None),
    ],
)
def test_a_value_may_be_a_command(text: str, changed: object) -> None:
    found = runs(one("grep 7 a", {"a": text}))[2:-1]
    if changed is None:
        assert found == []
    else:
        made = found[0].changed["a"].decode()
        assert (json.loads(made) if isinstance(changed, dict) else made) == changed


def test_a_program_that_is_named_may_be_started_after_a_look_at_its_text() -> None:
    for script, path in (("wc -l main.py", "main.py"), ("wc -l main.pyx answer.txt", ""), ("wc -l kept/a.py", "")):
        task = one(script, {"main.py": "", "answer.txt": "", "kept/a.py": ""})
        tree = task.tree()[0]
        assert isinstance(task.verdict, ScriptVerdict)
        assert named_program(task, task.verdict, tree, names_of(task, tree, ())) == path


@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("sqlite3 :memory: < query", "sqlite3"),
        ("x=$(ruby main.rb)", "ruby"),
        ("if /usr/bin/php main; then true; fi", "php"),
        ("A=1 timeout 5 go run .", "go"),
        ("# sqlite3 :memory:\ngrep go main", ""),
        ("echo java; cat ruby.txt", ""),
        ("bash inner.sh", "lua"),
        ("python3 /tests/check.py", "vim"),
    ],
)
def test_a_program_without_a_canary_is_named(script: str, program: str) -> None:
    task = one(
        script, {"inner.sh": "lua main\n", "main": ""}, ("main",), **{"check.py": "import subprocess\n['vim']\n"}
    )
    if "check.py" not in script:
        task = one(script, {"inner.sh": "lua main\n", "main": ""}, ("main",))
    assert isinstance(task.verdict, ScriptVerdict)
    assert why_no_place(task, task.verdict, task.tree()[0]) == program


@pytest.mark.parametrize(
    ("verdict", "guard"),
    [
        ({"kind": "script", "files": {"test.sh": ""}}, None),
        ({"kind": "script", "files": {"test.sh": ""}, "unguarded": True}, ""),
        ({"kind": "script", "files": {"test.sh": ""}, "reads_only": True}, "reads files only"),
        ({"kind": "script", "files": {"test.sh": ""}, "twins": True}, "guarded by twins"),
        ({"kind": "pytest", "files": {"a.py": ""}, "tests": ["a.py::a"], "kept": ["a.py::b"]}, None),
        (
            {"kind": "pytest", "files": {"a.py": ""}, "tests": ["a.py::a"], "kept": ["a.py::b"], "twins": ["a.py::b"]},
            None,
        ),
        (
            {"kind": "pytest", "files": {"a.py": ""}, "tests": ["a.py::a"], "kept": ["a.py::b"], "twins": ["a.py::a"]},
            "guarded 1 of 2 tests",
        ),
        ({"kind": "calls", "functions": {"f": "a:f"}, "tests": ["assert f() == 1"]}, "guarded 1 of 1 tests"),
    ],
)
def test_rows_without_a_guard_are_refused_unless_they_say_so(verdict: dict[str, Any], guard: str | None) -> None:
    task = read_task({"name": "t", "files": {"a.txt": ""}, "allowed": ["*"], "verdict": verdict}, "row")
    if guard is None:
        with pytest.raises(
            UnguardedError, match=r"^task 't': .*'unguarded: true' into the verdict; use what check_task"
        ):
            task.check_guard()
    else:
        task.check_guard()
        assert task.guard == guard


def test_bash_runs_what_it_calculates_with() -> None:
    changed = [each.changed.get("v.txt", b"").decode() for each in runs(one("r=$((v))", {"v.txt": "0\n"}))]
    assert "canary[$(/tmp/0/run 0)]\n" in changed


def test_a_module_that_a_script_imports_has_a_place_where_it_may_be_made() -> None:
    task = one("PYTHONPATH=lib python3 -c 'import json'", {"d.json": "{}"}, ("d.json", "lib/*.py"))
    assert "lib/json.py" in runs(task)[0].places
