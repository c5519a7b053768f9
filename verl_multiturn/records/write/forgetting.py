"""`forget_user`: every trace of a user's sessions goes from a folder of a gateway's records.

    ids of the sessions ──▶ sessions.lock ──▶ records, lines, joins, snapshots, cache ──▶ sessions' lines ──▶ done

Invariants:
- each file is replaced whole, or not at all; the records of others stay byte by byte where their gzip member holds none
  of the user's;
- the ids lie in the lock file until all is done and reported, so that a repeated command finishes what a kill cut off,
  names the models once more, and no gateway begins before (`locks.hold`);
- stretches that cannot be read go from a file that has traces of the user: they may hold more of them;
- a file that is not ours is never changed. If it names a session, the result says so.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_multiturn.errors import CertificateError
from verl_multiturn.paths import open_regular, whole_file
from verl_multiturn.records.index import cache
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.files import LINES, OPEN, PACKED, SESSIONS, RecordFile, record_files
from verl_multiturn.records.read.lineage import LINEAGE
from verl_multiturn.records.read.lines import LONGEST_LINE, read_object
from verl_multiturn.records.read.members import Member, read_members
from verl_multiturn.records.read.sessions import SessionIndex
from verl_multiturn.records.write.locks import LOCK, HeldError, hold, is_held
from verl_multiturn.records.write.old_files import remove_joined

_HALF = re.compile(r"\..+\.[0-9a-f]{16}|.+\.open\.new")
"""Files that a kill left before they were whole."""
_BLOCK = 1 << 24
Line = dict[str, Any]


@dataclass
class Forgotten:
    """The result of `forget_user`: counts of removed parts, and files that it does not change."""

    sessions: frozenset[str] = frozenset()
    """Ids of the sessions."""
    records: int = 0
    lines: int = 0
    session_lines: int = 0
    """Lines of their beginnings and ends."""
    rewards: int = 0
    join_rows: int = 0
    running: int = 0
    """Entries of the snapshots of running conversations."""
    indices: int = 0
    """Indices in the user's cache, which are made anew."""
    unreadable: int = 0
    """Stretches and lines that could not be read."""
    elsewhere: list[str] = field(default_factory=list)
    """Files of the folder that are not ours, and name a session."""


def forget_user(folder: Path, user: str, report: Callable[[Forgotten], None] = lambda found: None) -> Forgotten:
    """Remove every trace of a user's sessions; the command `sessions forget` calls it.

    Args:
        folder: Folder of the records of a gateway that does not run.
        user: The user, as the sessions' starts have it.
        report: Gets the result before the sessions' ids are given up, as their last trace. What it raises leaves them,
            and so does a kill.

    Raises:
        HeldError: A gateway runs on the folder, or another such command.
        CertificateError: A line is so long that a file cannot be read to its end.
        OSError: A file cannot be read or written. A repeated command goes on.
    """
    with hold(folder / LOCK, alone=True) as lock:
        for path in sorted(folder.glob(f"*{SESSIONS}")):
            if is_held(path):
                raise HeldError(f"{str(path)!r} is written by a gateway that runs; stop it, and try again")
        ids = _pending(lock) | _sessions_of(folder, user)
        found = Forgotten(frozenset(ids))
        if not ids:
            report(found)
            lock.truncate(0)  # half a note
            return found
        _note(lock, ids)
        for path in [*folder.iterdir(), *(folder / joins.FOLDER).glob(".*")]:
            if _HALF.fullmatch(path.name) and path.is_file():
                path.unlink()
        for stem in sorted({RecordFile(path).stem for path in record_files(folder)} | _stems(folder)):
            _forget_stem(folder, stem, ids, found)
        found.join_rows = remove_joined(folder, ids)[0]
        _forget_indices(folder, found)
        found.elsewhere = _elsewhere(folder, ids)
        for path in sorted(folder.glob(f"*{SESSIONS}")):  # last: they say whose sessions these were
            _forget_session_lines(path, ids, found)
        report(found)
        lock.truncate(0)
        os.fsync(lock.fileno())
    return found


def _pending(lock: BinaryIO) -> set[str]:
    """Return the ids that commands before this one did not finish."""
    lock.seek(0)
    found: set[str] = set()
    for line in lock.read().splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):  # it was cut off as it noted them, and had removed nothing
            found |= {str(each) for each in orjson.loads(line)}
    return found


def _note(lock: BinaryIO, ids: Collection[str]) -> None:
    # Behind those of a command that was cut off: a kill between the two would lose them.
    lock.write(b"\n" + orjson.dumps(sorted(ids)))
    lock.flush()
    os.fsync(lock.fileno())


def _stems(folder: Path) -> set[str]:
    endings = (PACKED, LINES, OPEN, SESSIONS)
    return {path.name.removesuffix(ending) for ending in endings for path in folder.glob(f"*{ending}")}


def _sessions_of(folder: Path, user: str) -> set[str]:
    """Return the ids of a user's sessions, by their starts and by their records."""
    index = SessionIndex(folder)
    index.refresh()
    ids = {name for name, session in index.sessions.items() if session.user == user}
    written = orjson.dumps(user)
    for path in record_files(folder):
        for text in _texts(path):
            if text is None or written not in text:
                continue
            with contextlib.suppress(CertificateError):
                record = read_object(text)
                session = record.get("session")
                if isinstance(session, dict) and session.get("user") == user:
                    ids.add(str(record.get("request_id")))
    return ids


def _texts(path: Path) -> Iterator[bytes | None]:
    """Yield the records of a file as texts; None: a stretch that cannot be read."""
    if not RecordFile(path).is_packed:
        yield from _lines(path)
        return
    for member in read_members(path):
        if member.lines is None:
            yield None
        else:
            yield from member.lines


def _lines(path: Path) -> Iterator[bytes]:
    with open_regular(path, within=path.parent) as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise CertificateError(f"{str(path)!r} has a line of more than {LONGEST_LINE} bytes; remove it")
            yield line


def _forget_stem(folder: Path, stem: str, ids: Collection[str], found: Forgotten) -> None:
    """Remove sessions from the records, the lines and the snapshot of one stem; its sessions' lines stay."""
    records, lines = folder / f"{stem}{PACKED}", folder / f"{stem}{LINES}"
    plain, snapshot = folder / stem, folder / f"{stem}{OPEN}"
    names = [None if text is None else _id_of(text) for text in _texts(records)] if records.exists() else []
    others = (path for path in (lines, folder / f"{stem}{SESSIONS}") if path.exists())
    is_touched = any(name in ids for name in names) or any(
        _id_of(line) in ids for each in others for line in _lines(each)
    )
    if is_touched and any(name is None or name in ids for name in names):
        _rewrite_records(records, ids, found)
    if is_touched and lines.exists():
        _forget_lines(lines, _places(records) if records.exists() else {}, ids, found)
    if plain.is_file() and not RecordFile(plain).is_packed:
        found.records += _rewrite(plain, lambda line: b"" if _id_of(line) in ids else line)
    if snapshot.exists():
        try:
            held = read_object(snapshot.read_bytes())
            kept = [each for each in held["open"] if each["request_id"] not in ids]
            many = len(held["open"]) - len(kept)
        except (CertificateError, KeyError, TypeError):  # it cannot be read, and nothing runs
            snapshot.unlink()
            found.unreadable += 1
            return
        if many:
            with whole_file(snapshot) as half:
                half.write_bytes(line_of({**held, "open": kept}))
            found.running += many


def _id_of(text: bytes) -> str | None:
    """Return the id of the conversation that a record or a line is about; None: it cannot be read."""
    try:
        value = read_object(text.strip())
    except CertificateError:
        return None
    return str(value.get("request_id", value.get("session_id")))


def _rewrite_records(path: Path, ids: Collection[str], found: Forgotten) -> None:
    """Write a packed file of records anew, without some."""
    with open_regular(path, within=path.parent) as file, whole_file(path) as half, half.open("wb") as new:
        for member in read_members(path):
            if member.lines is None:
                found.unreadable += 1
                continue
            texts = member.lines
            names = [_id_of(text) for text in texts]
            kept = [text for text, name in zip(texts, names, strict=True) if name is not None and name not in ids]
            found.records += sum(name is not None and name in ids for name in names)
            found.unreadable += names.count(None)
            if len(kept) == len(texts):
                file.seek(member.offset)
                new.write(file.read(member.end - member.offset))
            elif kept:
                new.write(gzip.compress(b"\n".join([*kept, b""]), compresslevel=6, mtime=0))
        _flush(new)


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Return where the record of each conversation lies in a packed file: offset of its member, number in it."""
    found: dict[str, tuple[int, int]] = {}
    members: Iterator[Member] = read_members(path)
    for member in members:
        for place, text in enumerate(member.lines or ()):
            if (name := _id_of(text)) is not None:
                found.setdefault(name, (member.offset, place))
    return found


def _forget_lines(path: Path, places: dict[str, tuple[int, int]], ids: Collection[str], found: Forgotten) -> None:
    """Write a file of lines anew, without some; those that stay name the places of their records as they are now."""

    def kept(text: bytes) -> bytes:
        try:
            line = read_object(text.strip())
        except CertificateError:
            found.unreadable += 1
            return b""
        name = str(line.get("request_id"))
        if name in ids:
            return b""
        if line.get("offset") is None:
            return text
        place = places.get(name)
        if place == (line["offset"], line.get("place") or 0):
            return text
        line = {key: value for key, value in line.items() if key not in ("offset", "place")}
        return line_of(line if place is None else {**line, "offset": place[0], "place": place[1]})

    before = found.unreadable
    found.lines += _rewrite(path, kept) - (found.unreadable - before)


def _forget_session_lines(path: Path, ids: Collection[str], found: Forgotten) -> None:
    if not any(_id_of(line) in ids for line in _lines(path)):
        return

    def kept(text: bytes) -> bytes:
        try:
            line = read_object(text.strip())
        except CertificateError:
            found.unreadable += 1
            return b""
        if str(line.get("session_id")) not in ids:
            return text
        if line.get("event") == "reward":
            found.rewards += 1
        else:
            found.session_lines += 1
        return b""

    _rewrite(path, kept)


def _rewrite(path: Path, kept: Callable[[bytes], bytes]) -> int:
    """Write a file of lines anew; return how many lines went. Where none did and none changed, the file stays."""
    before = list(_lines(path))
    after = [kept(line) if line.strip() else line for line in before]
    if after != before:
        with whole_file(path) as half, half.open("wb") as new:
            new.writelines(line if not line or line.endswith(b"\n") else line + b"\n" for line in after)
            _flush(new)
    return sum(not line for line in after)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _forget_indices(folder: Path, found: Forgotten) -> None:
    """Remove what this user's cache has of the folder and of its single files."""
    for path in [folder, *record_files(folder)]:
        with contextlib.suppress(OSError):  # there is no cache
            place = cache.kept_at(path)
            for each in [place, *place.parent.glob(f".{place.name}.*")]:
                if each.exists():
                    each.unlink()
                    found.indices += 1


def _elsewhere(folder: Path, ids: Collection[str]) -> list[str]:
    """Return the files of a folder that are not ours and name a session."""
    wanted = re.compile(b"|".join(re.escape(each.encode()) for each in sorted(ids)))
    longest = max(map(len, ids)) * 4
    found = []
    for path in sorted(folder.rglob("*")):
        is_ours = path.parent == folder and (path.name.endswith((PACKED, LINES, OPEN, SESSIONS)) or path.name == LOCK)
        if is_ours or path.name == LINEAGE or path.is_symlink() or not path.is_file():
            continue
        with open_regular(path, within=folder) as file:
            rest = b""
            while block := file.read(_BLOCK):
                if wanted.search(rest + block):
                    found.append(str(path.relative_to(folder)))
                    break
                rest = block[-longest:]
    return found
