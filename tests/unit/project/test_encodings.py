"""Text is read and written as UTF-8, whatever the machine's locale is: every call has the encoding."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import ROOT
from tests.support.encodings import calls_without_encoding

FOLDERS = ("verl_multiturn", "recipes", "scripts", "examples")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_call_names_its_encoding(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in calls_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "call",
    [
        "open(p)",
        "open(p, 'w')",
        "open(p, mode='a')",
        "open(p, mode)",
        "Path(p).read_text()",
        "p.read_text(errors='replace')",
        "p.write_text(text)",
        "path.open()",
        "p.open('w')",
        "p.open(newline='', mode='r')",
        "os.fdopen(1, 'w')",
        "subprocess.run(words, text=True)",
        "subprocess.call(words, universal_newlines=True)",
        "subprocess.getoutput('ls')",
        "tempfile.NamedTemporaryFile('w')",
        "io.TextIOWrapper(stream)",
    ],
)
def test_what_depends_on_the_locale_is_found(call: str) -> None:
    assert [ast.unparse(found) for found in calls_without_encoding(call)] == [call]


@pytest.mark.parametrize(
    "call",
    [
        "open(p, 'rb')",
        "open(p, encoding='utf-8')",
        "p.read_text('utf-8')",
        "p.write_text(text, 'utf-8')",
        "p.open('rb')",
        "index.open()",
        "PIL.Image.open(source)",
        "tarfile.open(p, 'w')",
        "os.open(p, flags)",
        "subprocess.run(words)",
        "subprocess.run(words, **settings)",
        "tempfile.TemporaryFile()",
        "ToolResponse(text=answer)",
    ],
)
def test_what_does_not_is_not(call: str) -> None:
    assert list(calls_without_encoding(call)) == []
