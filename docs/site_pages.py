"""A hook of mkdocs: the READMEs of `recipes/` and `examples/` are pages of the site, too.

The documents' links are those of the repository, where `docs/` is a folder among others; on the site its pages are the
root. A link to a file that is no page becomes its text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the READMEs, under the names that they have in the repository."""
    for path in sorted([*_ROOT.glob("recipes/**/README.md"), *_ROOT.glob("examples/README.md")]):
        name = path.relative_to(_ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
        for picture in path.parent.glob("results/*.png"):
            own = picture.relative_to(_ROOT).as_posix()
            files.append(File.generated(config, own, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn the repository's links into the site's."""
    here = page.file.src_uri
    own = here if here.startswith(("recipes/", "examples/")) else f"docs/{here}"

    def turned(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        name, sign, anchor = target.partition("#")
        if not name or ":" in name:
            return link[0]
        named = posixpath.normpath(posixpath.join(posixpath.dirname(own), name))
        place = named.removeprefix("docs/")
        if files.get_file_from_path(place) is None:
            return link[0] if own.startswith("docs/") and named.startswith("docs/") else text
        return f"{mark}[{text}]({os.path.relpath(place, posixpath.dirname(here) or '.')}{sign}{anchor})"

    return "".join(
        part if number % 2 else _LINK.sub(turned, part)
        for number, part in enumerate(re.split(r"(?s)(```.*?```)", markdown))
    )
