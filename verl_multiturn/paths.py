"""Paths as people write them: `~/data` is the home folder's, wherever it occurs.

    command line  `--out=~/runs`, `data.train_files=[~/a.parquet,~/b.parquet]`      `word_at_home`
    YAML files    tools, interactions, a run's whole configuration                  `at_home`

A shell expands `~` at the beginning of a word alone, and verl, Hydra and Python never do.

A folder that somebody else made may hold anything under any name: `open_regular` opens plain files alone. A file of
ours that others may read meanwhile is written by `whole_file`.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from verl_multiturn.errors import ConfigError

_HOME = "~/"
_ITEM = re.compile(r"([\[,]\s*['\"]?)(~/[^,'\"\]]*)")
"""A path below the home folder in a list of values."""
_WHOLE = re.compile(r"(['\"]?)(~/.*)", re.DOTALL)
_VALUE = re.compile(r"(--[\w-]+|[+~]*[\w./@:-]+)=")
"""Part of a word before its value."""
MOST_BYTES = 1 << 25
"""Bytes that a file which is read whole may have: a run's file, an evaluation's, a snapshot."""
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileKindError(ConfigError, OSError):
    """A name of a file that is none: a pipe, a socket, a device, a folder, or a link that leads elsewhere."""


def cache_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the user's cache in which a part of this package keeps files; it may not be there yet.

    Args:
        name: Of the part, such as `bm25`.
        environment: Environment variables. A relative XDG_CACHE_HOME is ignored, as its standard requires.

    Raises:
        RuntimeError: No home folder is known.
    """
    named = environment.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "verl-multiturn" / name


def at_home(value: Any) -> Any:
    """Return a value of a YAML file in which each text that begins with `~/` is the path that it means.

    Args:
        value: A text, a mapping or a list, to any depth; any other value is returned as it is.
    """
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith(_HOME) else value
    if isinstance(value, Mapping):
        return {key: at_home(item) for key, item in value.items()}
    return [at_home(item) for item in value] if isinstance(value, list) else value


def word_at_home(word: str) -> str:
    """Return a word of the command line in which `~/` is the home folder: alone, as a value, in a list of values.

    Example: `--out=~/a` returns `--out=/home/me/a`. Hydra's `~key`, which removes a key, stays.
    """
    begins = word.startswith(_HOME)
    if not begins and (found := _VALUE.match(word)) is None:
        return word
    head = "" if begins or found is None else found[0]
    value = word[len(head) :]
    if value.startswith("["):
        return head + _ITEM.sub(_expanded, value)
    whole = _WHOLE.fullmatch(value)
    return word if whole is None else head + _expanded(whole)


def _expanded(found: re.Match[str]) -> str:
    return found[1] + os.path.expanduser(found[2])


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the place to write a file at until it is whole, and put it where it belongs; readers see no half of it.

    Each call gives another place, also in one process. Where something raises, the old file of the name remains.

    Args:
        path: Where the file belongs.

    Raises:
        OSError: It cannot be put there.
    """
    half = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def open_regular(path: Path, within: Path | None = None) -> BinaryIO:
    """Open a plain file for reading, never another kind of file in its place. It never waits.

    Args:
        path: The file. A link to one is followed.
        within: The file, with all links followed, must lie in this folder; None: anywhere.

    Raises:
        FileKindError: It is not a plain file, or lies elsewhere.
        OSError: It does not exist, or cannot be opened.
    """
    try:
        found = path.stat()  # opening a device may already do something
    except FileNotFoundError:
        if path.is_symlink():
            raise FileKindError(f"{str(path)!r} is a link that leads nowhere; expected a plain file") from None
        raise
    _refuse_other_kinds(path, found)
    _refuse_elsewhere(path, path, within)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_other_kinds(path, os.fstat(number))  # another one may be there by now
        here = Path("/proc/self/fd", str(number))
        _refuse_elsewhere(path, here if here.exists() else path, within)
        return os.fdopen(number, "rb")
    except BaseException:  # nothing else closes it
        os.close(number)
        raise


def read_regular(path: Path, within: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a plain file; see `open_regular`.

    Args:
        path: The file.
        within: The folder in which it must lie; None: anywhere.
        most: Bytes that it may have.

    Raises:
        FileKindError: It is not a plain file, lies elsewhere, or is larger.
        OSError: It does not exist, or cannot be read.
    """
    with open_regular(path, within) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise FileKindError(f"{str(path)!r} has more than {most} bytes; expected a file of a run")
    return text


def _refuse_elsewhere(path: Path, place: Path, within: Path | None) -> None:
    if within is not None and not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(within)):
        raise FileKindError(f"{str(path)!r} leads out of {str(within)!r}; put the file itself there")


def _refuse_other_kinds(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "of an unknown kind")
        raise FileKindError(f"{str(path)!r} is {kind}; expected a plain file")
