"""The sessions of a gateway, read from the files `*.sessions.jsonl` of a folder: `SessionIndex`.

    start  ──▶ LiveSession     end ──▶ ended, why, completions     reward ──▶ rewards ──▶ earned

Rule of a session's reward: the value of the whole session plus those of its generations. A value is the last reward
without an id, 0 without one, plus the first of each id. A session without a reward line has none. Lines of all files
count, in the order of their times, of their files' names and of their places.

Invariants:
- a line that is torn or not of our form costs itself alone, and adds a fault;
- only whole lines are taken, and what was read is not read again, unless a file was replaced or removed: then all is;
- `reward_of_session` is the only place where reward lines are added up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.describe import one_line, show
from verl_multiturn.errors import CertificateError
from verl_multiturn.paths import open_regular
from verl_multiturn.records.read.files import SESSIONS, RecordFile
from verl_multiturn.records.read.lines import LONGEST_LINE, fitted, read_object
from verl_multiturn.records.schema import SessionLine

DROPPED = "dropped: "
"""How `why` of an `end` begins whose session has no record."""
LARGEST_REWARD = 2.0**970
"""The largest size of a reward: sums of 2^53 of these stay finite."""


class RewardLine(NamedTuple):
    """A reward of a session, in the order in which rewards count."""

    at: float
    file: str
    offset: int
    generation: int | None
    reward: float
    id: str | None


class SessionReward(NamedTuple):
    """The reward of a session by its lines."""

    whole: float
    """The value of the whole session."""
    generations: dict[int, float]
    """The value of each generation that a line rewards."""

    @property
    def score(self) -> float:
        """Return the session's reward."""
        return self.whole + sum(self.generations.values(), 0.0)

    @property
    def parts_text(self) -> str | None:
        """Return the column `parts` of its join: what its completions earned; None where none did."""
        if not self.generations:
            return None
        return json.dumps({"completion_score": sum(self.generations.values(), 0.0)})


@dataclass
class LiveSession:
    """A session of a gateway, as its lines have it."""

    session_id: str
    task: str | None = None
    user: str | None = None
    number: int = 0
    key: str | None = None
    """SHA-256 of its key."""
    file: str = ""
    """Stem of the file that has its start; "": none has."""
    began: float = 0.0
    ended: float | None = None
    why: str = ""
    completions: list[str] = field(default_factory=list)
    rewards: list[RewardLine] = field(default_factory=list)

    @property
    def state(self) -> tuple[float | None, str, int]:
        """Return what changes of it: its end, and how many rewards it has."""
        return self.ended, self.why, len(self.rewards)

    @property
    def is_dropped(self) -> bool:
        """Return whether it ended, and has no record."""
        return self.ended is not None and self.why.startswith(DROPPED)

    @property
    def earned(self) -> SessionReward | None:
        """Return its reward in parts; None without one."""
        return reward_of_session(self.rewards)

    @property
    def reward(self) -> float | None:
        """Return its reward; None without one."""
        found = self.earned
        return None if found is None else found.score


def reward_of_session(rewards: Iterable[RewardLine]) -> SessionReward | None:
    """Return the reward that lines give a session; None: there is no line.

    Args:
        rewards: Its reward lines, in any order.
    """
    last: dict[int | None, float] = {}
    named: dict[tuple[int | None, str], float] = {}
    for line in sorted(rewards, key=lambda line: line[:3]):
        if line.id is None:
            last[line.generation] = line.reward
        else:
            named.setdefault((line.generation, line.id), line.reward)
    if not last and not named:
        return None
    values = dict(last)
    for (generation, _), reward in named.items():
        values[generation] = values.get(generation, 0.0) + reward
    return SessionReward(values.pop(None, 0.0), {key: values[key] for key in sorted(values, key=lambda key: key or 0)})  # type: ignore[misc]


class SessionIndex:
    """The sessions of a folder of a gateway's records, read anew as files grow; it holds no file open.

    Args:
        folders: Folders of records, or single files of records.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._clear()

    def _clear(self) -> None:
        self.sessions: dict[str, LiveSession] = {}
        """By session id. One without a `file` has no start: its file was removed, or is another's."""
        self.faults: dict[str, None] = {}
        """Lines that were skipped: a sentence each."""
        self.files_of: dict[str, set[str]] = {}
        """Stems of the files that have a line about a session, by its id."""
        self.newest: dict[str, float] = {}
        """The latest time of a file's lines, by its stem."""
        self._keys: dict[str, str] = {}
        self._read: dict[Path, tuple[int, int, int]] = {}
        """Device, inode, and the position up to which it was read, by file."""

    def by_key(self, key: str) -> LiveSession | None:
        """Return the session of a key, by the key's SHA-256 in hexadecimal; None: no line has it."""
        found = self._keys.get(key)
        return None if found is None else self.sessions[found]

    @property
    def files(self) -> list[Path]:
        """Return the files of sessions that are there, in the order of their names."""
        found: list[Path] = []
        for folder in self._folders:
            own = folder.glob(f"*{SESSIONS}") if folder.is_dir() else [RecordFile(folder).sessions]
            found += [path for path in own if path.exists()]
        return sorted(found)

    def read_to(self, path: Path) -> int:
        """Return the position up to which a file was read; what is behind it is torn, or under way."""
        return self._read.get(path, (0, 0, 0))[2]

    def refresh(self) -> set[str]:
        """Read the lines written since; return the ids of sessions that they are about.

        Where a file was replaced or removed all is read anew, and all ids are returned, those that went away as well.
        """
        changed = self.grow()
        return self._read_all() if changed is None else changed

    def grow(self) -> set[str] | None:
        """Do as `refresh` does where files only grew; else return None, since all has to be read anew."""
        grown = {path: self._grown(path) for path in self._read}
        if None in grown.values():
            return None
        changed: set[str] = set()
        for path in self.files:
            if grown.get(path, True):
                changed |= self.read_on(path)
        return changed

    def _read_all(self) -> set[str]:
        changed = set(self.sessions)
        self._clear()
        for path in self.files:
            changed |= self.read_on(path)
        return changed

    def read_on(self, path: Path) -> set[str]:
        """Read the lines written since in one file; return the ids of sessions that they are about."""
        changed: set[str] = set()
        try:
            changed.update(self._read_on(path))
        except (CertificateError, OSError) as error:
            self._fault(f"{path}: it cannot be read to its end: {error}")
        return changed

    def _grown(self, path: Path) -> bool | None:
        """Return whether a file has more than was read; None: it is gone, or another."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        device, inode, position = self._read[path]
        if (found.st_dev, found.st_ino) != (device, inode) or found.st_size < position:
            return None
        return found.st_size > position

    def _read_on(self, path: Path) -> Iterator[str]:
        stem = path.name.removesuffix(SESSIONS)
        with open_regular(path, within=path.parent) as file:
            found = os.fstat(file.fileno())
            position = self.read_to(path)
            file.seek(position)
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise CertificateError(f"the line at byte {position} has more than {LONGEST_LINE} bytes")
                if not line.endswith(b"\n"):  # torn, or being written: the next append ends it
                    break
                if line.strip():
                    try:
                        value = line_of_session(line)
                    except CertificateError as error:
                        self._fault(f"{path}, offset {position}: a line is left out: {error}")
                    else:
                        yield self._enter(value, stem, path, position)
                position += len(line)
                self._read[path] = found.st_dev, found.st_ino, position

    def _enter(self, line: dict[str, Any], stem: str, path: Path, position: int) -> str:
        name = str(line["session_id"])
        session = self.sessions.setdefault(name, LiveSession(name))
        self.files_of.setdefault(name, set()).add(stem)
        self.newest[stem] = max(self.newest.get(stem, 0.0), line["at"])
        event = line["event"]
        if event == "start":
            if session.file:
                self._fault(f"{path}, offset {position}: a line is left out: session {show(name, 60)} began before")
                return name
            session.file, session.began = stem, line["at"]
            session.task, session.user = line["task_id"], line["user"]
            session.number, session.key = line["number"], line["key"]
            if session.key is not None:
                self._keys.setdefault(session.key, name)
        elif event == "end":
            if session.ended is not None:
                self._fault(f"{path}, offset {position}: a line is left out: session {show(name, 60)} ended before")
                return name
            session.ended, session.why, session.completions = line["at"], line["why"], line["completions"]
        else:
            given = (line["generation"], line["reward"], line["id"])
            session.rewards.append(RewardLine(line["at"], stem, position, *given))
        return name

    def _fault(self, what: str) -> None:
        self.faults[one_line(what)] = None


def line_of_session(text: bytes) -> dict[str, Any]:
    """Return a line about a session in the form of `schema.SessionLine`; `SessionIndex` and `verify` call it.

    Raises:
        CertificateError: It is torn, does not fit, or lacks what its event needs.
    """
    line = fitted(SessionLine, read_object(text.strip()))
    if line["event"] == "start" and line["task_id"] is None:
        raise CertificateError("a start has no task_id")
    if line["event"] == "reward" and (line["reward"] is None or not abs(line["reward"]) <= LARGEST_REWARD):
        raise CertificateError(f"reward is {show(line['reward'], 60)}; expected a number up to 2^970")
    return line
