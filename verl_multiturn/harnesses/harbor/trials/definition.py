"""The content of a task's folder `environment`, as far as a workspace can do it.

Of a Dockerfile these lines are understood: `FROM scratch`, `WORKDIR`, `ENV`, and `COPY` from the folder beside it,
without variables. Anything else needs an image, and is refused. Copied files lie in the task's folder: no path and no
link leads out of it. Imports the standard library only: the worker and Harbor's Python read it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from verl_multiturn.errors import ConfigError


class NeedsImageError(ConfigError):
    """A task needs an image.

    Attributes:
        why: How one sees that.
    """

    def __init__(self, why: str) -> None:
        super().__init__(
            f"environment 'workspace': the task needs an image, which the embedded sandbox cannot run: {why}; name a "
            "container engine, such as 'docker', or write its Dockerfile with FROM scratch, WORKDIR, ENV and COPY alone"
        )
        self.why = why


@dataclass
class Definition:
    """The content of a task's folder `environment`.

    Attributes:
        workdir: The folder in which commands start.
        variables: Environment variables.
        copies: Files and folders beside the Dockerfile, and where they go.
    """

    workdir: str = "/app"
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str, str]] = field(default_factory=list)


def read_definition(
    folder: Path, image: str | None, bases: Collection[str] = (), workdir: str | None = None
) -> Definition:
    """Read a task's folder `environment`.

    Args:
        folder: The folder.
        image: The image that the task names.
        bases: Images in whose place this machine's programs do.
        workdir: The folder that the task's settings name, in the place of the Dockerfile's.

    Raises:
        NeedsImageError: The task needs an image.
    """
    definition = Definition()
    if image and image not in bases:
        raise NeedsImageError(f"its image is {image!r}")
    if (folder / "docker-compose.yaml").exists():
        raise NeedsImageError("it has a docker-compose.yaml")
    if (dockerfile := folder / "Dockerfile").exists():
        text = re.sub(r"^\s*#.*$", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
        for line in filter(None, map(str.strip, text.splitlines())):
            _read_line(definition, folder, line, bases)
    definition.workdir = os.path.normpath(workdir or definition.workdir)
    if _is_root(definition.workdir):
        raise NeedsImageError(f"its commands start in {definition.workdir!r}, expected a folder below the root")
    return definition


def _read_line(definition: Definition, folder: Path, line: str, bases: Collection[str]) -> None:
    instruction, _, value = line.partition(" ")
    instruction = instruction.upper()
    try:
        words = shlex.split(value)
    except ValueError:
        words = []
    if instruction == "FROM" and len(words) == 1 and words[0] in ("scratch", *bases):
        return
    if "$" in value or not words:  # variables that only a builder knows
        raise NeedsImageError(f"its Dockerfile says {line[:200]!r}")
    if instruction == "WORKDIR" and len(words) == 1:
        definition.workdir = str(PurePosixPath(definition.workdir, words[0]))
    elif instruction == "ENV" and all("=" in word for word in words):
        definition.variables |= {name: text for name, _, text in (word.partition("=") for word in words)}
    elif instruction == "COPY" and len(words) == 2 and ".." not in PurePosixPath(words[0]).parts:
        source, target = words[0].lstrip("/") or ".", words[1]  # "/" is the folder beside the Dockerfile
        if not (folder / source).resolve().is_relative_to(folder.resolve()):
            raise NeedsImageError(f"its Dockerfile copies {source!r}, which a link leads out of the task's folder")
        is_file = (folder / source).is_file()
        if target.endswith("/") and is_file:
            target += PurePosixPath(source).name
        target = os.path.normpath(PurePosixPath(definition.workdir, target))
        # A file takes the name of its target, unless a folder is there already.
        folders = {_outermost(path) for path in ("/tmp", definition.workdir, *(to for _, to in definition.copies))}
        if _is_root(target) or (is_file and _outermost(target) == target and target not in folders):
            raise NeedsImageError(f"its Dockerfile says {line[:200]!r}, and a workspace has only folders at the root")
        definition.copies.append((source, target))
    else:
        raise NeedsImageError(f"its Dockerfile says {line[:200]!r}")


def _outermost(path: str) -> str:
    """Return the folder at the root that a path begins with, or the path itself if it lies there."""
    return "/" + os.path.normpath(path).strip("/").partition("/")[0]


def _is_root(path: str) -> bool:
    """Return whether a path is the root itself, or a relative one: a workspace has folders below the root alone."""
    return not path.startswith("/") or os.path.normpath(path).strip("/") == ""
