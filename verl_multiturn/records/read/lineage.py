"""`models_that_learned`: which models learned from some conversations, by the `lineage.jsonl` of their trainings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.records.read.lines import read_lines, read_object

LINEAGE = "lineage.jsonl"
_IDS = ("request_id", "session_id", "session")
"""Entries of a line that name the conversation that a row came from."""


class LearnedModel(NamedTuple):
    """A training that learned from some conversations."""

    lineage: Path
    """Its `lineage.jsonl`."""
    rows: int
    """Rows of its training file that came from them."""
    sessions: int
    """How many of the conversations it learned from."""

    @property
    def folder(self) -> Path:
        """Return the folder of the training, in which its model lies: `lineage.jsonl` is in its folder `data`."""
        above = self.lineage.parent
        return above.parent if above.name == "data" else above


def models_that_learned(folders: Iterable[Path], request_ids: Collection[str]) -> list[LearnedModel]:
    """Return the trainings that learned from some conversations; `sessions forget` calls it.

    Args:
        folders: Folders in which, or below which, trainings lie.
        request_ids: Ids of the conversations.

    Raises:
        ConfigError: A folder does not exist, or a `lineage.jsonl` cannot be read.
    """
    found: dict[Path, LearnedModel] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{str(folder)!r} is no folder; name folders of trainings with --models")
        for path in sorted(folder.rglob(LINEAGE)):
            own = [line for line in _lines(path) if _named(line) & set(request_ids)]
            if own:
                names = set().union(*map(_named, own)) & set(request_ids)
                found[path.resolve()] = LearnedModel(path, len(own), len(names))
    return list(found.values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for line in read_lines(path):
            yield read_object(line.text)
    except (CertificateError, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; name the folder of a training") from error


def _named(line: dict[str, Any]) -> set[str]:
    return {each for name in _IDS for each in _texts(line.get(name))}


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [each for each in value or () if isinstance(each, str)]
