"""The files of a folder of records, by their names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import FileKindError

PACKED, PLAIN, LINES, OPEN = ".jsonl.gz", ".jsonl", ".lines.jsonl", ".open.json"
SESSIONS = ".sessions.jsonl"
STEPS = "steps.jsonl"


class RecordFile(NamedTuple):
    """A file of records."""

    path: Path

    @property
    def stem(self) -> str:
        """Stem that a worker's files share; the file's own name where it has no others."""
        return self.path.name.removesuffix(PACKED)

    @property
    def is_packed(self) -> bool:
        """Return whether it is written in gzip members."""
        return self.path.name.endswith(".gz")

    @property
    def has_lines(self) -> bool:
        """Return whether lines lie beside it, as a writer leaves them."""
        return self.is_packed and self.lines.exists()

    @property
    def lines(self) -> Path:
        """File of its lines, which need not exist."""
        return self.path.with_name(self.stem + LINES)

    @property
    def sessions(self) -> Path:
        """File of a gateway's sessions, which need not exist."""
        return self.path.with_name(self.stem + SESSIONS)


def record_files(path: Path) -> list[Path]:
    """Return the files of records in a folder, or the file itself.

    Raises:
        ConfigError: There is no such file or folder.
    """
    try:
        if not path.is_dir():
            if not path.exists():
                raise ConfigError(
                    f"{str(path)!r} cannot be read: it does not exist; expected a file of records, or a folder of them"
                )
            return [path]
        plain = [
            each
            for each in path.glob(f"*{PLAIN}")
            if not each.name.endswith((LINES, SESSIONS)) and each.name != STEPS and not each.name.startswith("metrics")
        ]
        return sorted([*path.glob(f"*{PACKED}"), *plain])
    except OSError as error:
        raise _unreadable(path, error) from error


def folder_of(path: Path) -> Path:
    """Return the folder of the records that a run folder has; any other path as it is.

    Raises:
        ConfigError: It cannot be looked at, or its records lie elsewhere.
    """
    try:
        below = path / "records"
        if not below.is_dir():
            return path
        if not below.resolve().is_relative_to(path.resolve()):
            raise FileKindError(
                f"{str(below)!r} is a link that leads out of {str(path)!r}; name {str(below.resolve())!r} itself"
            )
        return below
    except FileKindError:
        raise
    except (OSError, RuntimeError) as error:  # links in a circle are a RuntimeError
        raise _unreadable(path, error) from error


def beside(file: RecordFile) -> list[Path]:
    """Return the companions of a single file of records: its lines, its sessions, and the file of its run."""
    runs = [path for path in file.path.parent.glob("run-*.json") if file.stem.startswith(f"{path.stem[4:]}-")]
    return [*runs, *(path for path in (file.lines, file.sessions) if path.exists())]


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder; a name that somebody wrote may be a path, and lead elsewhere."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _unreadable(path: Path, error: Exception) -> ConfigError:
    # A name that is too long, or a folder above it that is closed.
    return ConfigError(f"{str(path)!r} cannot be read: {error}; name a file of records, or a folder of them")
