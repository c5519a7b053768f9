"""`replay_folder`: the work of `verl-multiturn replay`, with the lines that it prints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from verl_multiturn.calls.closing import close_all
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.index.query import one_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.replay.calls import ReplayDifference
from verl_multiturn.rows.reward_numbers import are_equal
from verl_multiturn.verl_bridge.offline.replay.conversations import ReplayResult
from verl_multiturn.verl_bridge.offline.replay.loading import Changes, load_replay
from verl_multiturn.verl_bridge.offline.replay.scores import Scores, UnrepeatableError

_SHOWN = 80


@dataclass
class ReplayTally:
    """The findings of a folder's replay, for its last line."""

    conversations: int = 0
    same: int = 0
    different: int = 0
    skipped: int = 0
    scored: int = 0
    """Conversations whose reward was computed again."""
    from_turn: Counter[int] = field(default_factory=Counter)
    """With changed settings: how many conversations would have gone on otherwise from each turn on."""
    why: Counter[str] = field(default_factory=Counter)
    """Why conversations were skipped, or their rewards not computed again."""
    cpu_s: float = 0.0

    def as_line(self, is_changed: bool) -> dict[str, Any]:
        """Return the last line, a JSON object."""
        each = 1000 * self.cpu_s / max(1, self.conversations - self.skipped)
        line: dict[str, Any] = {
            "conversations": self.conversations,
            "same": self.same,
            "different": self.different,
            "skipped": self.skipped,
            "scored": self.scored,
            "cpu_ms_each": round(each, 2),
        }
        if is_changed:
            line["from_turn"] = {str(turn): count for turn, count in sorted(self.from_turn.items())}
        return line | ({"why": dict(self.why)} if self.why else {})


async def replay_folder(
    folder: Path,
    say: Callable[[str], None],
    *,
    requests: Collection[str] = (),
    changes: Changes = (),
    is_live: bool = False,
    with_scores: bool = True,
) -> dict[str, Any]:
    """Replay the conversations of a run.

    Args:
        folder: The folder of the run, or of its records.
        say: Prints a line.
        requests: Ids of the conversations, or how they begin; empty: all.
        changes: Settings that are changed, with their values as YAML.
        is_live: Whether tools and interactions run again.
        with_scores: Whether rewards are computed again.

    Returns:
        The last line.

    Raises:
        ConfigError: There is nothing to replay, a conversation is not there, or it cannot be replayed here.
    """
    records, tally = Records(folder), ReplayTally()
    if not records.runs:
        raise ConfigError(
            f"{folder}: there is no file run-….json, which says how the run was made; name a run's folder or its "
            "record_dir"
        )
    wanted = _wanted(records, requests)
    for run in records.runs:
        replay = load_replay(run, changes, is_live)
        scores = Scores(replay.config, replay.model.tokenizer) if with_scores else None
        earned = {line["request_id"]: line for line in records.lines() if line["event"] == "score"}
        try:
            for record in _records_of(records, str(run["start"]), wanted):
                began = time.process_time()
                played = await replay.play(record)
                played = await _scored(played, record, scores, earned, tally)
                tally.cpu_s += time.process_time() - began
                _count(played, tally, say, is_changed=bool(changes))
        finally:
            await close_all([*replay.tools.values(), *replay.interactions.values()] if is_live else [])
    for fault in records.faults:
        say(fault)
    if not tally.conversations:
        which = ", ".join(map(show, requests)) or "any conversation"
        raise ConfigError(f"{folder}: there is no record of {which} of a run whose file is there; name others")
    return tally.as_line(bool(changes))


def _wanted(records: Records, requests: Collection[str]) -> set[str]:
    """Return the ids of the conversations that are named, each of which has a record.

    Raises:
        ConfigError: One names no such conversation, or several.
    """
    if not requests:
        return set()
    index = Index(records)
    index.refresh()
    ended = index.table.filter(pc.equal(index.table["event"], "end"))
    known = ended.filter(ended["offset"].is_valid())["request_id"].to_pylist()
    return {one_of("REQUEST", request, known, "recorded conversation") for request in requests}


def _records_of(records: Records, start: str, requests: Collection[str]) -> Iterator[dict[str, Any]]:
    for file in records.files:
        if file.stem.partition("-")[0] == start:
            for placed in records.placed(file):
                if not requests or placed.record["request_id"] in requests:
                    yield placed.record


async def _scored(
    played: ReplayResult,
    record: Mapping[str, Any],
    scores: Scores | None,
    earned: Mapping[str, Mapping[str, Any]],
    tally: ReplayTally,
) -> ReplayResult:
    """Compute the reward of a conversation again, and compare it."""
    line = earned.get(played.request_id, {})
    recorded = line.get("score")
    if scores is None or not played.outputs or played.skipped or recorded is None:
        return played
    try:
        now = await scores.of(record, played.outputs, line.get("verdicts") or {})
    except UnrepeatableError as error:
        tally.why[f"its reward is not computed again: {error}"] += 1
        return played
    tally.scored += 1
    if are_equal((float(recorded), now)):
        return played
    differences = [*played.differences, ReplayDifference(None, "reward", None, recorded, now)]
    return ReplayResult(played.request_id, differences, outputs=played.outputs)


def _count(played: ReplayResult, tally: ReplayTally, say: Callable[[str], None], is_changed: bool) -> None:
    tally.conversations += 1
    if played.skipped:
        tally.skipped += 1
        tally.why[played.skipped] += 1
        say(f"{played.request_id}: skipped: {played.skipped}")
        return
    if not played.differences:
        tally.same += 1
        return
    tally.different += 1
    lines = map(shown, played.differences[:1] if is_changed else played.differences)
    for line in dict.fromkeys(lines):
        say(f"{played.request_id}: {line}")
    if is_changed and (turn := played.differences[0].turn) is not None:
        tally.from_turn[turn] += 1


def shown(difference: ReplayDifference) -> str:
    """Return a difference as a line, without the name of its conversation."""
    turn, name, token, recorded, now = difference
    opening = "the opening, " if name.startswith("replies.") else ""
    where = opening if turn is None else f"turn {turn}, "
    at = "" if token is None else f", token {token}"
    old, new = _differing(recorded, now)
    return f"{where}{name}{at}: {old} in the record, now {new}"


def _differing(old: Any, new: Any) -> tuple[str, str]:
    """Return two values, long texts from a little before the first difference on."""
    if isinstance(old, str) and isinstance(new, str) and max(len(old), len(new)) > _SHOWN:
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        begin = max(0, at - _SHOWN // 4)
        dots = "…" if begin else ""
        old, new = f"{dots}{old[begin : begin + _SHOWN]}", f"{dots}{new[begin : begin + _SHOWN]}"
    return show(old), show(new)
