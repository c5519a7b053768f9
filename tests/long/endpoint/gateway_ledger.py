"""`Ledger`: all that a gateway acknowledged to its clients, compared with the files that it has after kills.

    2xx of end_session ─▶ ended     2xx of set_reward ─▶ rewarded     no answer ─▶ doubtful     Ledger.compare(folder)

It reads records and lines by itself, since readers leave out doubled ones; the reward is that of the readers.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import rewards_of


class RewardName(NamedTuple):
    """A reward that counts once: its session, the completion (None: the whole session) and its id."""

    session_id: str
    generation: int | str | None
    """The number of the completion, or the part of its id that all protocols share; "": any."""
    id: str


@dataclass
class Comparison:
    """Faults that were found, a sentence each."""

    lost: list[str] = field(default_factory=list)
    """Acknowledged, and not there, or with another value."""
    twice: list[str] = field(default_factory=list)
    """There more than once, or counted more than once."""
    unknown: list[str] = field(default_factory=list)
    """There, and nobody sent it."""

    @property
    def figures(self) -> dict[str, int]:
        """Return how many there are of each kind."""
        return {"lost": len(self.lost), "twice": len(self.twice), "unknown": len(self.unknown)}


class Ledger:
    """The clients' own list: each reward has an id, and a value that a sum of binary fractions holds exactly."""

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        """Completions of each session whose end was acknowledged."""
        self.rewarded: dict[RewardName, float] = {}
        self.doubtful: dict[RewardName, float] = {}
        """Sent without an answer: each may count once, or not at all."""

    def end(self, session_id: str, completions: int) -> None:
        """Note an end that was acknowledged."""
        self.ended[session_id] = completions

    def reward(self, name: RewardName, value: float, is_acknowledged: bool) -> None:
        """Note a reward that was sent, with or without an answer."""
        (self.rewarded if is_acknowledged else self.doubtful)[name] = value

    def compare(self, folder: Path) -> Comparison:
        """Return the faults of a gateway's folder; all its gateways have ended."""
        found = Comparison()
        self._records(folder, found)
        self._rewards(folder, found)
        return found

    def _records(self, folder: Path, found: Comparison) -> None:
        there = Counter[str]()
        sizes: dict[str, int] = {}
        for record in stored_records(folder):
            there[record["request_id"]] += 1
            sizes[record["request_id"]] = len(record["generations"])
        found.twice += [f"session {name} has {count} records" for name, count in there.items() if count > 1]
        ends = Counter(line["session_id"] for line in _lines(folder) if line["event"] == "end")
        found.twice += [f"session {name} has {count} ends" for name, count in ends.items() if count > 1]
        for name, completions in self.ended.items():
            if not there[name]:
                found.lost.append(f"session {name} ended, and has no record")
            elif sizes[name] != completions:
                found.lost.append(f"session {name} ended with {completions} completions, and has {sizes[name]}")
            if not ends[name]:
                found.lost.append(f"session {name} ended, and has no line of its end")

    def _rewards(self, folder: Path, found: Comparison) -> None:
        there: dict[RewardName, float] = {}
        lines = list(_lines(folder))
        completions = {line["session_id"]: line.get("completions") for line in lines if line["event"] == "end"}
        for line in lines:
            if line["event"] != "reward":
                continue
            name = self._named(line, completions.get(line["session_id"]))
            if name not in self.rewarded and name not in self.doubtful:
                found.unknown.append(f"{name}: nobody sent it")
            there.setdefault(name, line["reward"])
        for name, value in self.rewarded.items():
            if there.get(name) != value:
                found.lost.append(f"{name}: {value} was acknowledged, and {there.get(name)} is there")
        counted: dict[str, float] = defaultdict(float)
        for name, value in there.items():
            counted[name.session_id] += value
        scores = rewards_of(Records(folder))
        for session_id in self.ended.keys() & counted.keys():
            score = scores[session_id].score if session_id in scores else None
            if score != counted[session_id]:
                fault = (
                    f"session {session_id} has the reward {score}; its rewards, each once, are {counted[session_id]}"
                )
                (found.twice if score is not None and score > counted[session_id] else found.lost).append(fault)

    def _named(self, line: dict[str, Any], completions: list[str] | None) -> RewardName:
        """Return the name of a line's reward, by which clients know it.

        Args:
            line: The line.
            completions: Those of its session; None: the session has no end, and its ids say which reward it is.
        """
        session_id, generation, own = line["session_id"], line.get("generation"), str(line.get("id"))
        found = RewardName(session_id, generation, own)
        for known in (found, found._replace(generation="")):
            if known in self.rewarded or known in self.doubtful:
                return known
        if generation is None:
            return found
        if completions is None:
            known = (
                each for each in (*self.rewarded, *self.doubtful) if (each.session_id, each.id) == (session_id, own)
            )
            return next(known, found)
        return found._replace(generation=completions[generation] if generation < len(completions) else generation)


def stored_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of whole gzip members; a kill tears the last one of a file."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        data = path.read_bytes()
        while data:
            member = zlib.decompressobj(wbits=31)
            try:
                text = member.decompress(data)
            except zlib.error:
                break
            if not member.eof:
                break
            yield from map(json.loads, text.splitlines())
            data = member.unused_data


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines about sessions; one that a kill tore was not acknowledged."""
    for path in sorted(folder.glob("*.sessions.jsonl")):
        for text in path.read_bytes().split(b"\n"):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line
