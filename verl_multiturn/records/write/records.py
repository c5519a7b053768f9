"""`RecordWriter`: writes a worker's records in a thread (`background`); the event loop only hands them over.

Invariants:
- no conversation fails or waits because its record could not be written. A record that was not written is counted,
  unless somebody waits for it (`Kept`): then nothing of it is in the files, and it may be handed over again;
- data handed over is in the files a second later, as long as the disk keeps up. A kill tears at most the last gzip
  member, and loses the data handed over since;
- each writer has files of its own, also among processes of one host name and process id.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from verl_multiturn.describe import describe
from verl_multiturn.records import schema
from verl_multiturn.records.json_text import dumps, line_of, plain
from verl_multiturn.records.read.lines import defaults
from verl_multiturn.records.summaries import summary_of
from verl_multiturn.records.write import line_file
from verl_multiturn.records.write.background import CLOSE_S, BackgroundWriter, Losses
from verl_multiturn.records.write.redaction import Decode, Redaction
from verl_multiturn.records.write.share import NO_SHARE, in_share
from verl_multiturn.records.write.size_limit import FolderRoom

MEMBER_RECORDS, MEMBER_BYTES, MEMBER_S = 32, 1_000_000, 1.0
"""A gzip member holds at most so many records, bytes before compression, or seconds of records."""
_MOST_RECORDS, _MOST_LINES = 1_000, 100_000
"""So many records wait to be written; further ones are lost. So many lines are kept while the disk is full."""

SEEN = "a rule of record_redact hits its token ids"
"""Why a record is not kept whose ids would show hidden texts."""

Line = dict[str, Any]
Kept: TypeAlias = Callable[[str | OSError], None]
"""Takes the fate of a record: "" when it is on disk for good (fsync), why it is not kept, or the error of a disk that
has not taken it. After the error nothing of it is in the files, and it may be handed over again."""


class _Item(NamedTuple):
    line: Line
    make: Callable[[], dict[str, Any]] | None
    kept: Kept | None = None
    """Called once, in the writer's thread or that of the caller; it must not raise."""


class _Made(NamedTuple):
    """A record that is made."""

    text: bytes
    item: _Item


class RecordWriter:
    """Writer of a worker's records and lines; see `schema` for the files.

    Args:
        folder: Folder of the records; it is created where it does not exist.
        start: The run's start, `RunFile.start`.
        share: Share of the groups whose records are kept. Groups are kept whole, the same in all processes.
        max_gb: The most GB of records in the folder, those of earlier starts included; None: no limit. Further ones are
            dropped, and their lines are written.
        redact: The parts to hide, see `redaction.Redaction`.
        gather_s: Seconds for which records are gathered into a gzip member.
        decode: Returns the text of token ids. With it, no record is kept whose ids show hidden texts: the line of its
            end has counts alone. None: ids are not looked at.

    Raises:
        OSError: The folder or a file cannot be created.
        ConfigError: A rule of `redact` is not a regular expression.
    """

    def __init__(
        self,
        folder: str | Path,
        start: str,
        *,
        share: float = 1.0,
        max_gb: float | None = None,
        redact: Sequence[str] = (),
        gather_s: float = MEMBER_S,
        decode: Decode | None = None,
    ) -> None:
        self._share, self._redact, self._decode = share, Redaction(redact), decode
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.stem = f"{start}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._records, lines = path / f"{self.stem}.jsonl.gz", path / f"{self.stem}.lines.jsonl"
        self._open = path / f"{self.stem}.open.json"
        lines.open("xb").close()  # fail now, at the start of the run, when the path is wrong
        self._lines = line_file.LineFile(lines, "conversations", _MOST_LINES)
        self._room = FolderRoom(path, max_gb)
        self._losses = Losses("records of conversations", self._records)
        self._background: BackgroundWriter[_Item | None] = BackgroundWriter(
            "records",
            self._write,
            self._losses,
            most=_MOST_RECORDS,
            enough=MEMBER_RECORDS,
            gather_s=gather_s,
            last=self._write_last,
        )
        self._snapshots: deque[list[dict[str, Any]]] = deque(maxlen=1)
        """The last snapshot that is not written; its place in the order is that of a None."""

    @property
    def dropped(self) -> int:
        """Return the number of records that could not be kept."""
        return self._losses.count

    def begin(self, line: Line) -> None:
        """Note that a conversation begins."""
        self._hand(_Item(_with("begin", line), None))

    def cancel(self, line: Line, make: Callable[[], dict[str, Any]] | None = None) -> None:
        """Note that a conversation was cancelled; its `why` has the cause.

        Args:
            line: The line about it.
            make: As in `keep`; None: its record was handed over before.
        """
        self._hand(_Item(_with("cancel", line), make))

    def raised(self, line: Line) -> None:
        """Note that a conversation raised; its `why` has the error."""
        self._hand(_Item(_with("raise", line), None))

    def scored(self, line: Line) -> None:
        """Note the reward of a conversation whose record was handed over."""
        self._hand(_Item(_with("score", line), None))

    @property
    def size(self) -> int:
        """Return how many bytes of records were written."""
        return self._room.written

    def keep(self, make: Callable[[], dict[str, Any]], line: Line, kept: Kept | None = None) -> None:
        """Hand over the record of a conversation that ended.

        Args:
            make: Function that returns the `schema.Record` as a dictionary. It is called in the writer's thread, so
                nothing that it reads may be changed any more.
            line: The line of its end, without `summary`, `offset` and `place`.
            kept: Is called with the record's fate; None: nobody waits for that, and a record that the disk does not
                take is lost.
        """
        self._hand(_Item(_with("end", line), make, kept))

    def snapshot(self, open: list[dict[str, Any]]) -> None:
        """Hand over the running conversations, a list of `schema.Open`. The next one replaces it."""
        self._snapshots.append(open)
        self._background.put(None, large=False)

    def remove(self) -> None:
        """Remove the file of lines, of a writer that nothing was handed over to."""
        self._lines.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Write the data handed over, and stop, within `CLOSE_S`."""
        self._background.close()

    async def aclose(self) -> None:
        """Do as `close` does, while the event loop goes on."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._background.aclose(), CLOSE_S)

    def _hand(self, item: _Item) -> None:
        why = self._background.put(item, large=item.make is not None)
        if why and item.kept is not None:
            item.kept(OSError(errno.EAGAIN, why))
        elif why and item.make is not None:
            self._background.put(_without_record(item, why), large=False)

    def _write(self, items: Sequence[_Item | None]) -> None:
        """Write a member of records, or several small ones, and after each member the lines up to it."""
        member: list[_Made] = []
        waiting: list[_Item] = []
        for item in items:
            if item is None:
                self._write_snapshot()
                continue
            waiting.append(item)
            if item.make is None:
                continue
            made = self._made(item)
            if made is not None:
                member.append(made)
            if sum(len(each.text) for each in member) >= MEMBER_BYTES:
                self._write_up_to(member, waiting)
                member, waiting = [], []
        self._write_up_to(member, waiting)

    def _write_up_to(self, member: Sequence[_Made], items: Sequence[_Item]) -> None:
        """Write a member of records, then the lines of these and of other conversations, and report the fates."""
        error = self._write_member(member)
        again = [] if error is None else [made.item for made in member if made.item.kept is not None]
        try:
            self._write_lines([item.line for item in items if item not in again])
        finally:  # whoever waits is not forgotten, even by a mistake of ours
            for item in items:
                if item.kept is not None:
                    no_record = "" if "offset" in item.line else item.line.get("why") or NO_SHARE
                    item.kept(error if error is not None and item in again else no_record)

    def _made(self, item: _Item) -> _Made | None:
        """Make a record and fill in the line of its end; None: the record is not kept."""
        line, make = item.line, item.make
        assert make is not None
        try:
            record = plain(make())
            is_seen = self._decode is not None and self._redact.is_seen(record, self._decode)
            record = self._redact(record)
            if line["event"] == "end":
                line["summary"] = summary_of(record)
            if is_seen:
                line["summary"] = {**summary_of(record), "data_source": None, "index": None}
                line["why"] = SEEN
                return None
            if not in_share(record["uid"], self._share):
                return None
            text = dumps(record)
        except Exception as error:  # an error of a record must not end a run
            self._turn_into_drop(item, f"it could not be made: {describe(error)}")
            return None
        if self._room.is_full():
            self._turn_into_drop(item, "record_max_gb is reached")
            return None
        return _Made(text, item)

    def _turn_into_drop(self, item: _Item, why: str) -> None:
        """Count a record as lost, and note it in the line of its end."""
        self._losses.add(why)
        item.line.update(_without_record(item, why).line)

    def _write_member(self, member: Sequence[_Made]) -> OSError | None:
        """Write records; return the error where they are not written: those that nobody waits for are lost then."""
        if not member:
            return None
        try:
            data = gzip.compress(b"".join(made.text for made in member), compresslevel=6, mtime=0)
            offset = line_file.append(self._records, data)
            if any(made.item.kept is not None for made in member):
                try:
                    line_file.sync(self._records)
                except OSError:
                    os.truncate(self._records, offset)
                    raise
        except Exception as error:  # beside the disk's, such as that of too little memory
            for made in member:
                if made.item.kept is None:
                    self._turn_into_drop(made.item, describe(error))
                else:
                    self._losses.add(describe(error), 0)
            return error if isinstance(error, OSError) else OSError(errno.EIO, describe(error))
        self._room.took(len(data))
        for place, made in enumerate(member):
            made.item.line.update(offset=offset, place=place)
        self._losses.end()
        return None

    def _write_lines(self, lines: Sequence[Line]) -> None:
        self._lines.hold([line_of(_lean(self._hidden(line))) for line in lines])
        with suppress(OSError):  # they are late, and written with the next ones
            self._lines.write()

    def _hidden(self, line: Line) -> Line:
        """Return a line as the rules leave it; the cause of `cancel` is a word of ours."""
        return line if line["event"] == "cancel" else self._redact(line)

    def _write_snapshot(self) -> None:
        if not self._snapshots:  # a later one was written
            return
        shot = {"at": time.time(), "open": self._snapshots.pop(), "dropped": self.dropped, "cpu_s": time.thread_time()}
        new = self._open.with_suffix(".new")
        try:
            new.write_bytes(line_of(shot))
            new.replace(self._open)
        except OSError:  # the next one is due in two seconds
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _write_last(self) -> None:
        """Write the lines that are late, and that nothing runs any more."""
        self._lines.end()
        if self._open.exists():
            self._snapshots.append([])
            self._write_snapshot()


def _without_record(item: _Item, why: str) -> _Item:
    """Return the line of a conversation whose record is lost, in the place of both."""
    if item.line["event"] == "cancel":  # its fate is known without its record
        return _Item(item.line, None)
    return _Item({**item.line, "event": "drop", "why": why}, None)


def _lean(line: Line) -> Line:
    """Return a line without the entries that have their defaults; they would be most of it."""
    lean = {name: value for name, value in line.items() if value != _DEFAULTS.get(name, _NONE)}
    if (summary := lean.get("summary")) is not None:
        lean["summary"] = {name: value for name, value in summary.items() if value != _SUMMARY.get(name, _NONE)}
    return lean


_NONE = object()
_DEFAULTS, _SUMMARY = defaults(schema.ConversationLine), defaults(schema.Summary)


def _with(event: str, line: Mapping[str, Any]) -> Line:
    return {"event": event, "at": time.time(), **line}
