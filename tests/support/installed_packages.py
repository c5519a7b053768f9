"""Packages as an installer leaves them: modules, and a folder `*.dist-info` with METADATA and entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PREFIX = "verl_multiturn."


def install(
    site: Path,
    name: str,
    entries: Mapping[str, str | list[str]] | str,
    files: Mapping[str, str] | None = None,
    version: str = "0.1",
    metadata: str | None = None,
) -> Path:
    """Install a package into a folder, and return its folder of metadata.

    Args:
        site: The folder, which is or will be in `sys.path`.
        name: Name of the package.
        entries: Lines such as `lookup = my_tools:Lookup` by group, such as `tools`; a text is the whole file.
        files: Content of the package's files by path.
        version: Its version.
        metadata: Content of METADATA; None for the usual one, "" for no such file.
    """
    for path, text in (files or {}).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    if metadata != "":
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if metadata is None else metadata
        (info / "METADATA").write_text(text, encoding="utf-8")
    if not isinstance(entries, str):
        groups = {group: [lines] if isinstance(lines, str) else lines for group, lines in entries.items()}
        entries = "".join(f"[{PREFIX}{group}]\n" + "\n".join(lines) + "\n" for group, lines in groups.items())
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    return info
