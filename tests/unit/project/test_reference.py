"""The pages of reference agree with the code. Those of refusals and of records have tests beside their tables."""

import re
from pathlib import Path
from typing import Literal

import pytest

from scripts.reference import API, _values, pages
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written() -> dict[Path, str]:
    return pages()


@pytest.mark.parametrize("name", ["settings", "commands", "api", "benchmark-protocols"])
def test_the_page_is_what_the_code_writes(name: str, written: dict[Path, str]) -> None:
    path = ROOT / "docs" / "reference" / f"{name}.md"
    assert path.read_text(encoding="utf-8") == written[path], "run python -m scripts.reference"


def test_the_values_of_a_setting_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.config.FilterMode", Literal["off", "new"])
    assert _values("FilterMode | None") == "`off`, `new`, `null`"


def test_each_public_name_has_its_place() -> None:
    import verl_multiturn

    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert [name for name in verl_multiturn.__all__ if f"`{name}`" not in page and f".{name}`" not in page] == []
    assert page.count("\n### `verl_multiturn.") >= sum(map(len, API.values()))


def test_each_name_that_a_guide_imports_has_its_place() -> None:
    imported = re.compile(r"^from (verl_multiturn[\w.]*) import (\w+(?:, \w+)*)$", re.MULTILINE)
    texts = [page.read_text(encoding="utf-8") for page in GUIDES]
    found = {name for text in texts for _, names in imported.findall(text) for name in names.split(", ")}
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert len(found) > 20
    listed = set(re.findall(r"^### `verl_multiturn[\w.]*\.(\w+)`$", page, re.MULTILINE))
    assert sorted(found - listed) == []


DOCS = ROOT / "docs"
GUIDES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "reference")
TUTORIAL = DOCS / "write" / "tutorial.md"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_can_be_read_in_one_sitting(page: Path) -> None:
    assert page.stat().st_size <= (16_000 if page == TUTORIAL else 14_000), page


def test_the_guides_together_are_read_in_a_day() -> None:
    assert sum(page.stat().st_size for page in GUIDES) <= 400_000
