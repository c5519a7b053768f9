"""`Globs`: which paths a row allows. `*` and `?` match no `/`, and `**`, alone between two `/`, matches any folders.

A model chooses the names of its files, and how deep they lie. So a path is taken folder by folder, each folder is
looked at once, and no part of a name is tried twice (`fnmatch` writes patterns that do not go back).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

_ANY_FOLDERS = "**"


class Globs:
    """Globs of paths.

    Args:
        globs: The globs.

    Raises:
        ValueError: In one of them `**` is a part of a name.
    """

    def __init__(self, globs: Sequence[str]) -> None:
        self._globs = [_parts(glob) for glob in globs]
        self._reached: dict[str, tuple[frozenset[int], ...]] = {
            "": tuple(_skipped(parts, {0}) for parts in self._globs)
        }
        """For each folder and glob, how many parts of the glob may lie before the next name."""

    def match(self, path: str) -> bool:
        """Return whether one of the globs matches a path.

        Args:
            path: The path, without `/` at its beginning or end.
        """
        folder, _, name = path.rpartition("/")
        new = []
        while folder not in self._reached:
            new.append(folder)
            folder = folder.rpartition("/")[0]
        reached = self._reached[folder]
        for folder in reversed(new):
            reached = self._reached[folder] = self._after(reached, folder.rpartition("/")[2])
        ends = self._after(reached, name)
        return any(len(parts) in end for parts, end in zip(self._globs, ends, strict=True))

    def _after(self, reached: Sequence[frozenset[int]], name: str) -> tuple[frozenset[int], ...]:
        """Return the positions after one more name of a path."""
        return tuple(
            _skipped(parts, _following(parts, before, name)) if before else before
            for parts, before in zip(self._globs, reached, strict=True)
        )


def _parts(glob: str) -> list[re.Pattern[str] | None]:
    """Return a pattern for each name of a glob, None for `**`."""
    names = glob.split("/")
    for name in names:
        if _ANY_FOLDERS in name and name != _ANY_FOLDERS:
            raise ValueError(
                f"the glob {glob!r}: '**' stands for whole folders, expected alone between two '/'; write it as in "
                "'calc/**/*.py'"
            )
    # `[` is not a sign of these globs.
    return [None if name == _ANY_FOLDERS else re.compile(fnmatch.translate(name.replace("[", "[[]"))) for name in names]


def _following(parts: Sequence[re.Pattern[str] | None], before: frozenset[int], name: str) -> set[int]:
    found = set()
    for number in before:
        if number == len(parts):
            continue
        part = parts[number]
        if part is None:
            found.add(number)
            if number == len(parts) - 1:
                found.add(number + 1)
        elif part.match(name):
            found.add(number + 1)
    return found


def _skipped(parts: Sequence[re.Pattern[str] | None], reached: set[int]) -> frozenset[int]:
    """Return the positions reached where `**` may match no folder; at the end of a glob it matches some name."""
    found = set(reached)
    for number in sorted(reached):
        while number < len(parts) - 1 and parts[number] is None:
            number += 1
            found.add(number)
    return frozenset(found)
