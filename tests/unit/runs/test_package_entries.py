"""`doctor` shows the entry points of installed packages, with the fault of each that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.installed_packages import install
from verl_multiturn.runs.package_entries import examine_packages


def test_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    files = {"plug_seen.py": "class Lookup: pass\n", "plug_torn.py": "import no_such_module\n"}
    named = ["lookup = plug_seen:Lookup", "torn = plug_torn:Lookup", "lost = plug_seen:Lost", "two = plug_seen:Lookup"]
    lines: dict[str, str | list[str]] = {
        "tools": named,
        "recipes": ["maze = plug_seen.maze"],
        "tool": ["x = plug_seen:Lookup"],
    }
    install(site, "plug-seen", lines, files)
    install(site, "rival", {"tools": "plug-seen/two = plug_torn:Lookup"}, version="9")
    monkeypatch.syspath_prepend(str(site))
    found = {finding.what + ("" if finding.ok else "!"): finding for finding in examine_packages()}
    assert found["tool plug-seen/lookup"].found == "plug-seen 0.1, plug_seen:Lookup"
    torn = found["tool plug-seen/torn!"]
    assert torn.found.startswith("plug-seen 0.1, plug_torn:Lookup: plug_torn: cannot be imported (ModuleNotFoundError")
    assert torn.remedy.startswith("only a run that names it needs it: ")
    assert "has no 'Lost'" in found["tool plug-seen/lost!"].found
    assert "plug-seen 0.1 (plug_seen:Lookup) and rival 9 (plug_torn:Lookup)" in found["tool plug-seen/two!"].found
    assert "no folder 'plug_seen.maze' is installed" in found["recipe plug-seen/maze!"].found
    assert "no such group" in found["entry points!"].found
    assert len(found) == 6
    assert not {"plug_seen", "plug_torn"} & set(sys.modules)
