"""Every command of the README, the docs and the recipes' READMEs is run as it is there.

It is run in a folder that looks like the repository, with the files that the document requires. The README's are run by
default, the others with `--all`. A command that needs GPUs, takes minutes or runs the tests has a comment; for those
the test checks that the paths they name exist, and a recipe prints its trainer's command.
"""

from __future__ import annotations

import ast
import atexit
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tests.conftest import ROOT
from tests.documents import COMMAND, DOCUMENTS, Block, Command, blocks, commands, mentioned
from tests.recipe_scripts import run_here
from tests.support.warm_python import variables, warm_python
from tests.unit.certificate.test_certificate import converse
from verl_multiturn.cli.commands import COMMANDS, command_of
from verl_multiturn.cli.main import app

pytestmark = pytest.mark.slow

_TREE = (
    "benchmarks",
    "docs",
    "examples",
    "recipes",
    "requirements",
    "scripts",
    "tests",
    "tool_configs",
    "verl_multiturn",
)
_FILES = ("setup.py", "pyproject.toml", "README.md")
# Words that a reader replaces.
_PLACEHOLDER = re.compile(r"\b(NAME|DIR|PATH|FILE|N|TOOLS)\b|…|\[--|\.\.\.|\*")
_STACK = re.compile(r"verl-multiturn (doctor|export)|--model\b|python -m verl\b")

WITH_COMMANDS = [document for document in DOCUMENTS if any(block.is_shell for block in blocks(document))]


def named(document: Path) -> str:
    return str(document).replace("/README.md", "")


def to_run(document: Path, stack: bool) -> list[tuple[Block, list[Command]]]:
    found = []
    for block in blocks(document):
        if block.is_shell:
            run = [c for c in commands(block) if not c.not_run and bool(_STACK.search(c.text)) is stack]
            found.append((block, run))
    return [(block, run) for block, run in found if run]


@cache
def warm_programs() -> str:
    """Return a folder with a `verl-multiturn` that runs in a fork of a process that has imported the stack."""
    folder = tempfile.TemporaryDirectory(prefix="programs-")
    atexit.register(folder.cleanup)
    program = Path(folder.name) / "verl-multiturn"
    program.write_text(f'#!/bin/sh\nexec {warm_python()} -m verl_multiturn.cli "$@"\n')
    program.chmod(0o700)
    return folder.name


def run_all(document: Path, folder: Path, stack: bool) -> list[str]:
    """Run a document's commands in order, and return the failures with their lines."""
    environment = variables() if stack else {**os.environ, "PYTHONWARNINGS": "ignore"}
    path = [*([warm_programs()] if stack else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment |= {"VERL_PLATFORM": "cpu", "COLUMNS": "200", "PATH": os.pathsep.join(path)}
    wrong = []
    for block, found in to_run(document, stack):
        printed = ""
        for command in found:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command.text],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=550,
                check=False,
            )
            printed += done.stdout
            if done.returncode:
                said = done.stdout[-2000:]
                wrong.append(f"{document}:{command.number}: {command.text!r} ended with {done.returncode}: {said}")
        expected = ".*".join(re.escape(piece) for piece in "\n".join(block.output or []).split("…"))
        if not stack and not re.search(expected, printed):
            wrong.append(f"{document}:{block.number}: said to print {block.output}, and printed {printed[-2000:]!r}")
    return wrong


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a function that returns a document's folder and the failures of its commands.

    The folder has the document's files, and its commands have run there.
    """
    import asyncio

    @cache
    def of(document: Path) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp("checkout")
        for name in (*_TREE, *_FILES):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        for block in blocks(document):
            if block.file:
                (folder / block.file).write_text(block.text, encoding="utf-8")
        (folder / "records").mkdir()  # a run leaves this folder behind
        record = asyncio.run(converse(["hello"]))
        (folder / "records" / "host-1.jsonl").write_text(json.dumps(record) + "\n")
        return folder, run_all(document, folder, stack=False)

    yield of
    of.cache_clear()


def readme_first(found: list[Path]) -> list[Any]:
    """Return documents as parameters; all but the README have the mark `long`."""
    return [pytest.param(path, marks=[] if path == Path("README.md") else pytest.mark.long) for path in found]


def documents(stack: bool) -> list[Any]:
    """Return the documents some of whose commands need the stack, or the others."""
    return readme_first([path for path in WITH_COMMANDS if bool(to_run(path, stack=True)) is stack])


@pytest.mark.parametrize("document", documents(stack=False), ids=named)
def test_every_command_works_as_it_stands(document: Path, folders: Any) -> None:
    assert folders(document)[1] == []


@pytest.mark.stack
@pytest.mark.parametrize("document", documents(stack=True), ids=named)
def test_every_command_works_where_some_need_the_stack(document: Path, folders: Any) -> None:
    folder, failures = folders(document)
    assert failures == []
    assert run_all(document, folder, stack=True) == []


def not_run(document: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands of a document that are not run, each with its place."""
    for block in blocks(document):
        for command in commands(block) if block.is_shell else []:
            if command.not_run:
                for part in command.text.split(" && "):
                    yield part, f"{document}:{command.number}: {part}"


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=named)
def test_what_is_not_run_is_there(document: Path) -> None:
    for part, _ in not_run(document):
        check_that_it_exists(part)


_RECIPE = re.compile(r"bash recipes/\S+\.sh")


@pytest.mark.stack  # verl's own configuration files are composed
@pytest.mark.parametrize(
    "document",
    readme_first([path for path in WITH_COMMANDS if any(_RECIPE.search(part) for part, _ in not_run(path))]),
    ids=named,
)
def test_a_recipe_that_is_not_run_prints_its_command(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's command, so that the recipe takes the variants and options that the document gives."""
    monkeypatch.chdir(ROOT)
    for part, where in not_run(document):
        if _RECIPE.search(part):
            printed = run_here(part, "--print")
            assert printed.exit_code == 0, f"{where}: {printed.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_what_is_mentioned_is_there(document: Path) -> None:
    for text in mentioned(document):
        check_that_it_exists(text)


def check_that_it_exists(text: str) -> None:
    """Check that the script, the module or the subcommand with its options exists."""
    words = [word for word in shlex.split(text) if not re.fullmatch(r"\w+=.*", word) or word.startswith("-")]
    program, *rest = words
    if program.endswith("python") and rest[:1] == ["-m"]:
        module = rest[1].partition("=")[0]
        if module.startswith("verl_multiturn."):  # by its file: to find it otherwise imports its package, and verl
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), text
        else:
            found = module if module.startswith("benchmarks") else module.partition(".")[0]
            assert importlib.util.find_spec(found) is not None, text
    elif program in ("bash", "sh") or program.endswith("python"):
        script = next((word for word in rest if not word.startswith("-")), "")
        # A script without a folder belongs to another project.
        assert "/" not in script or (ROOT / script).is_file() or _PLACEHOLDER.search(script), text
    elif program == "verl-multiturn":
        command: Any = typer.main.get_command(app)
        if rest and not rest[0].startswith("-"):
            assert rest[0] in COMMANDS, text
            command = command_of(rest.pop(0))
        while rest and hasattr(command, "commands"):
            assert rest[0] in command.commands, text
            command = command.commands[rest.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, text


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_code_that_is_no_file_can_be_read(document: Path) -> None:
    for block in blocks(document):
        where = f"{document}:{block.number}"
        if block.language == "python" and document != Path("docs/understand/architecture.md"):
            ast.parse(block.text, where)
        elif block.language in ("yaml", "json"):
            yaml.safe_load(block.text)
        elif not block.is_shell:
            # A command in a block that is not marked as shell would not be run.
            for line in block.lines:
                assert not COMMAND.match(line) or _PLACEHOLDER.search(line), f"{where}: {line!r}; call the block bash"


def test_the_checks_see_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.documents.ROOT", tmp_path)
    document = Path("README.md")
    (tmp_path / document).write_text(
        """
```bash
false
exit 3   # takes minutes
# on 8 GPUs
exit 4 \\
    'a # b'
echo one && \\
    echo two
```

```text
one
thr…
```
<!-- runs the tests -->
```bash
exit 5
```
```bash
echo fine # no comment of that kind
```
"""
    )
    assert [[(c.text, c.not_run) for c in commands(block)] for block in blocks(document) if block.is_shell] == [
        [("false", False), ("exit 3", True), ("exit 4 'a # b'", True), ("echo one && echo two", False)],
        [("exit 5", True)],
        [("echo fine", False)],
    ]
    first, second = run_all(document, tmp_path, stack=False)
    assert first.startswith("README.md:3: 'false' ended with 1")
    assert second.startswith("README.md:3: said to print ['one', 'thr…'], and printed 'one\\ntwo\\n'")
    for text in ("python -m benchmarks.no_such", "verl-multiturn chek-tool x", "verl-multiturn validate x --modle y"):
        with pytest.raises(AssertionError):
            check_that_it_exists(text)
