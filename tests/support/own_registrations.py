"""The files of `docs/write/plugins.md`: a loss, rows, a sampler and a filter, each with the settings below it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

_PAGE = ROOT / "docs" / "write" / "plugins.md"
_FILE = re.compile(r"```python\n# (\w+)\.py\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


def write_files(folder: Path) -> dict[str, list[str]]:
    """Write the page's files into a folder, and return the settings of each one by the file's stem."""
    found = _FILE.findall(_PAGE.read_text(encoding="utf-8"))
    for stem, code, _ in found:
        assert len(code.splitlines()) <= 40, stem
        (folder / f"{stem}.py").write_text(code, encoding="utf-8")
    return {stem: words.split() for stem, _, words in found}
