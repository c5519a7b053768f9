"""The documentation is built as a site, and a broken link, anchor or reference ends the build."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.documents import DOCUMENTS

pytestmark = pytest.mark.slow


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stdout) == (0, ""), built.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        folder = page.parent if page.name == "index" else page
        assert (tmp_path / "site" / folder / "index.html").is_file(), page
    assert dead_links(tmp_path / "site") == []


def dead_links(site: Path) -> list[str]:
    """Return the relative links of a built site that lead nowhere, each with its page."""
    found = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # it may be shown under any address
            continue
        for link in re.findall(r'<a [^>]*href="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|/", link):
                target = page.parent / link
                if not (target.is_file() or (target / "index.html").is_file()):
                    found.append(f"{page.relative_to(site)}: {link}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_to_a_file_exists(document: Path) -> None:
    """Check the links of all documents, also of those that are not a page of the site."""
    text = re.sub(r"(?s)```.*?```", "", (ROOT / document).read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        if name.startswith(("https://", "http://")):
            continue
        target = (ROOT / document).parent / name if name else ROOT / document
        assert target.exists(), f"{document}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{document}: {link}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)```.*?```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
