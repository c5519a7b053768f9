"""A benchmark whose right answer is that nothing was found is a test; its command calls the same functions."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

SEARCHES = sorted(ROOT.glob("tests/long/*/*.py"))
COMMANDS = {path.stem: path for path in ROOT.glob("benchmarks/*/*.py")}
ASKED = [path for path in SEARCHES if path.stem in COMMANDS]


def test_there_are_thirty() -> None:
    assert len(ASKED) >= 30


@pytest.mark.parametrize("path", ASKED, ids=lambda path: str(path.stem))
def test_a_command_is_a_few_lines_that_call_the_search(path: Path) -> None:
    text = COMMANDS[path.stem].read_text()
    assert f"tests.long.{path.parent.name}" in text
    assert path.parent.name == COMMANDS[path.stem].parent.name or path.stem.startswith("interaction_")
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize("path", ASKED, ids=lambda path: str(path.stem))
def test_a_search_is_a_test_with_its_full_parameter(path: Path) -> None:
    """One that has no parameter is a test as it is."""
    tests = [other.read_text() for other in path.parent.glob("test_*.py")]
    own = [text for text in tests if re.search(rf"\b{path.stem}\b", text)]
    assert own or path.stem.startswith("interaction_")  # `interactions` calls these
    assert any("mark.long" in text for text in own or tests) or path.stem == "masked_gradient"
