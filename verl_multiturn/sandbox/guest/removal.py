"""The removal of a folder that untrusted code has written. Imports the standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any


def remove_tree(folder: str, failed: Callable[..., Any] | None = None) -> None:
    """Remove a folder however deep it is; files that cannot be removed stay.

    `rmtree` calls itself for each level and holds a file open for it. A few lines of code make a folder that is too
    deep for that.

    Args:
        folder: The folder.
        failed: As `onerror` of `rmtree`.
    """
    import shutil  # here, so that the zygote is smaller with bubblewrap, where nothing is removed

    for _ in range(2):
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, onerror=failed or _ignored)
        if not os.path.lexists(folder):
            return
        _flatten(folder)


def _ignored(*_: Any) -> None:
    pass


def _flatten(folder: str) -> None:
    """Move all folders in a folder directly into it."""
    waiting, number = [folder], 0
    while waiting:
        above = waiting.pop()
        with contextlib.suppress(OSError):
            os.chmod(above, 0o700)
            with os.scandir(above) as entries:
                below = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
            for path in below:
                to = path
                if above != folder:
                    while os.path.lexists(to := f"{folder}{os.sep}{number}"):
                        number += 1
                    os.chmod(path, 0o700)  # its entry `..` is written
                    os.rename(path, to)
                waiting.append(to)
