"""`scripts/prose.py` counts the phrases of our dialect where people read, and nowhere else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.prose import hits, texts
from tests.conftest import ROOT

SOURCE = '''"""Say what it is."""


def read(path):
    """Return the rows.

    Whoever calls it is told.
    """
    told = "said"  # nobody reads this
    raise ValueError(f"{path} is no file of ours")
'''


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("What is left is no sample.", ["what", "left", "is no"]),
        ("Whoever asked is told, and nobody\nsays so.", ["whoever", "asked", "tell", "whoever", "say"]),
        ("A row that met an outage stands; for ever it stood judged and touched.",
         ["met", "stand", "whoever", "stand", "judged", "touched"]),
    ],
)  # fmt: skip
def test_phrases_are_found_in_their_order(text: str, phrases: list[str]) -> None:
    assert [phrase for phrase, _ in hits(text)] == phrases


@pytest.mark.parametrize(
    "text",
    [
        "What does it cost?",
        "There is no file, and it is no longer there.",
        "A stand-in is a standard; left-padded; from left to right.",
        "`what is told`, ``nobody`` and\n```python\nsaid = what + left\n```\n",
    ],
)
def test_questions_plain_english_and_code_are_not(text: str) -> None:
    assert list(hits(text)) == []


def test_a_phrase_has_the_line_where_it_begins() -> None:
    assert list(hits("One.\n```\ncode\n```\nIt says\nwhat it is")) == [("say", 4), ("what", 5)]


def test_texts_of_python_are_docstrings_messages_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "read.py"
    path.write_text(SOURCE)
    found = [
        (place, line + below, phrase) for place, text, line in texts(path) for phrase, below in hits(text)
    ]  # fmt: skip
    assert sorted(found) == [
        ("comment", 9, "whoever"),
        ("docstring", 1, "say"),
        ("docstring", 1, "what"),
        ("docstring", 7, "tell"),
        ("docstring", 7, "whoever"),
        ("message", 10, "is no"),
    ]


def test_the_command_ends_with_one_object(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Rows\n\nIt says what is left.\n")
    (tmp_path / "tools.yaml").write_text("tools: []  # asked once\n")
    (tmp_path / "CHANGELOG.md").write_text("It said so.\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text('TEXT = "she said that to him"  # he said\n')
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    command = [sys.executable, "-m", "scripts.prose", "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "page.md:3: say (page)",
        "page.md:3: what (page)",
        "page.md:3: left (page)",
        "tests/test_x.py:1: say (comment)",
        "tools.yaml:1: asked (comment)",
    ]
    counts = json.loads(lines[-1])
    assert counts["total"] == 5
    assert counts["places"] == {"docstring": 0, "comment": 2, "message": 0, "page": 3}
    assert {phrase for phrase, number in counts["phrases"].items() if number} == {"say", "what", "left", "asked"}
