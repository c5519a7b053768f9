"""`remove_old`: the oldest files of a gateway's records, removed whole.

Invariants:
- a file is as young as the last line about one of its sessions, wherever that line is: a reward that comes late keeps
  its session;
- a file that has lines about the sessions of another goes with it or after it: no session loses its reward;
- a file that its gateway writes stays;
- the sessions' lines go last, so that what a kill interrupts is found again and finished.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_multiturn.records.read import joins
from verl_multiturn.records.read.fates import start_of
from verl_multiturn.records.read.files import LINES, OPEN, PACKED, SESSIONS
from verl_multiturn.records.read.sessions import SessionIndex
from verl_multiturn.records.write.locks import is_held
from verl_multiturn.records.write.run_file import path_of


class Removed(NamedTuple):
    """The result of `remove_old`."""

    files: list[str]
    """Names of the files."""
    sessions: frozenset[str]
    """Ids of the sessions that are gone."""


def remove_old(folder: Path, before: float) -> Removed:
    """Remove the files of a gateway's records in which nothing happened since a time; a gateway calls it in a thread.

    Args:
        folder: Folder of the records.
        before: The time (`time.time`), in seconds since 1970.

    Raises:
        OSError: A file cannot be removed; a later call goes on.
    """
    index = SessionIndex(folder)
    index.refresh()
    old = _old(index, before)
    if not old:
        return Removed([], frozenset())
    gone = {name for name, session in index.sessions.items() if session.file in old}
    starts = {start_of(stem, _starts(folder)) for stem in old}
    files = remove_joined(folder, gone)[1]
    for stem in sorted(old):
        for ending in (PACKED, LINES, OPEN, SESSIONS):
            path = folder / f"{stem}{ending}"
            if path.exists():
                path.unlink(missing_ok=True)
                files.append(path.name)
    files += _remove_runs(folder, starts)
    return Removed(files, frozenset(gone))


def remove_joined(folder: Path, request_ids: Collection[str]) -> tuple[int, list[str]]:
    """Remove the rows of conversations from the joins of a folder; a join without a row is removed itself.

    Args:
        folder: Folder of the records.
        request_ids: Ids of the conversations.

    Returns:
        How many rows were removed, and the names of the joins that went.

    Raises:
        OSError: A join cannot be read or written; it stays as it was.
    """
    count, files = 0, []
    wanted = pa.array(request_ids, pa.string())
    for path in sorted((folder / joins.FOLDER).glob("*.parquet")):
        name = joins.parse_name(path.name)
        if name is None:
            continue
        try:
            with joins.open_join(path) as file:
                table = pq.read_table(file)
            found = pc.is_in(table["request_id"].cast(pa.string()), wanted)
        except (ValueError, KeyError, pa.ArrowException):  # no join of ours, which readers refuse by name
            continue
        many = pc.sum(found).as_py() or 0
        if not many:
            continue
        count += many
        kept = table.filter(pc.invert(found))
        if len(kept):
            joins.write(folder, path.name, kept)
        else:
            path.unlink()
            files.append(f"{joins.FOLDER}/{path.name}")
    return count, files


def _old(index: SessionIndex, before: float) -> set[str]:
    """Return the stems of the files that may go."""
    paths = {path.name.removesuffix(SESSIONS): path for path in index.files}
    # Of one without a line, when it was written.
    newest = {stem: index.newest.get(stem) or path.stat().st_mtime for stem, path in paths.items()}
    for session in index.sessions.values():
        if session.file in newest:
            rewarded = max((reward.at for reward in session.rewards), default=0.0)
            newest[session.file] = max(newest[session.file], session.ended or 0.0, rewarded)
    old = {stem for stem, path in paths.items() if newest[stem] < before and not is_held(path)}
    while True:
        needed = {
            stem
            for name, stems in index.files_of.items()
            if (file := index.sessions[name].file) in paths and file not in old
            for stem in stems & old
        }
        if not needed:
            return old
        old -= needed


def _starts(folder: Path) -> list[str]:
    return [path.stem.removeprefix("run-") for path in folder.glob("run-*.json")]


def _remove_runs(folder: Path, starts: set[str]) -> list[str]:
    """Remove the files of starts of which no other file is there any more; return their names."""
    joined = {name.start for path in (folder / joins.FOLDER).glob("*") if (name := joins.parse_name(path.name))}
    written = {path.name.partition("-")[0] for path in folder.iterdir()}
    removed = []
    for start in sorted(starts - joined - written):
        path = path_of(folder, start)
        if path.exists():
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
