"""What `verl-multiturn show` says of a run, as plain JSON.

    run             starts, a line for each step and validation, fates, faults
    step            what the trainer said of it, its groups, and why rows were not trained
    group           its conversations side by side
    conversation    its fate, its record and what the trainer made of its rows

What a folder does not have is null: records may be there without joins, and joins without records.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow.compute as pc

from verl_multiturn.describe import one_line, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.points import read_points
from verl_multiturn.records import joins
from verl_multiturn.records.fates import Fate, count, fates_of, start_of
from verl_multiturn.records.reader import Records
from verl_multiturn.records.scores import Reward, key_of, rewards_of
from verl_multiturn.reward_numbers import are_equal

_NO_LISTS = ["request_id", "uid", "number", "row", "validation", "step", "update", "score", "parts", "otc_factor",
             "group_mean", "group_std", "trained", "untrained"]  # fmt: skip
_LEFT = ("evicted", "filtered", "failed", "discarded", "rerolled")
_SHOWN = 3


class Shown:
    """A run's folders, as `verl-multiturn show` reads them.

    Args:
        records: The folders.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    @cached_property
    def fates(self) -> dict[str, Fate]:
        """The fate of each conversation, by request id."""
        return {fate.request_id: fate for fate in fates_of(self._records)}

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        """The lines of steps and validations; one that was done again is as it was the last time."""
        return list({(line["step"], line["event"]): line for line in self._records.steps()}.values())

    @cached_property
    def _rewards(self) -> dict[str, Reward]:
        """What each conversation earned, by its key."""
        return rewards_of(self._records)

    def run(self) -> dict[str, Any]:
        """Return what is to be said of the whole run."""
        ended = {end["start"]: end for end in self._records.ends()}
        runs = [
            {name: run[name] for name in ("start", "began", "host", "versions", "resumed_from")}
            | {"ended": ended.get(run["start"], {}).get("at"), "error": ended.get(run["start"], {}).get("error")}
            for run in self._records.runs
        ]
        rows = self._rows_of_steps({})
        fates = self.fates.values()
        faults: list[str] = []
        points = [point for folder in self._records.folders for point in read_points(folder.parent, faults.append)]
        return {
            "kind": "run",
            "folders": [str(folder) for folder in self._records.folders],
            "starts": runs,
            "steps": [
                self._step_line(line, rows) for line in sorted([*self._lines, *_unsaid(self._lines, rows)], key=_order)
            ],
            "evaluations": [point.model_dump() for point in points],
            "fates": {"training": count(fates, validation=False), "validation": count(fates, validation=True)},
            "open": sum(
                len(snapshot["open"])
                for snapshot in self._records.snapshots()
                if start_of(snapshot["file"], ended) not in ended
            ),
            "faults": [*self._records.faults, *map(one_line, faults)],
        }

    def step(self, step: int) -> dict[str, Any]:
        """Return what is to be said of a step, and of the validation after it.

        Raises:
            ConfigError: Nothing is known of the step.
        """
        lines = [line for line in self._lines if line["step"] == step]
        rows = self._rows_of_steps({"step": step})
        if not lines and not rows:
            known = sorted({line["step"] for line in self._lines} | {row["step"] for row in self._rows_of_steps({})})
            there = f"there are {known[0]} to {known[-1]}" if known else "there is none"
            raise ConfigError(f"--step {step}: nothing is known of this step; {there}")
        begun = [fate for fate in self.fates.values() if fate.begun == step]
        parts = []
        for validation in (False, True):
            own = [line for line in lines if (line["event"] == "validation") == validation]
            found = [row for row in rows if row["validation"] == validation]
            if own or found:
                parts.append(self._step_part(own[-1] if own else None, found))
        return {
            "kind": "step",
            "step": step,
            "parts": parts,
            "begun": {"count": len(begun), "fates": count(begun)},
            "faults": self._records.faults,
        }

    def group(self, uid: str) -> dict[str, Any]:
        """Return what is to be said of a group; the beginning of its uid is enough.

        Raises:
            ConfigError: There is no such group, or several.
        """
        uid = one_of("--group", uid, {fate.uid for fate in self.fates.values() if fate.uid}, "group")
        members = sorted(
            (fate for fate in self.fates.values() if fate.uid == uid), key=lambda fate: (fate.number, fate.request_id)
        )
        rows = self._by_request(self._rows({"uid": uid}))
        known = {summary["request_id"]: summary for summary in self._summaries(uid)}
        conversations = [
            self._member(fate, known.get(fate.request_id), rows.get(fate.request_id, [])) for fate in members
        ]
        first = next((row for own in rows.values() for row in own), None)
        return {
            "kind": "group",
            "uid": uid,
            "step": None if first is None else first["step"],
            "mean": None if first is None else first["group_mean"],
            "std": None if first is None else first["group_std"],
            "conversations": conversations,
            "faults": self._records.faults,
        }

    def conversation(self, request_id: str) -> dict[str, Any]:
        """Return what is to be said of a conversation; the beginning of its request id is enough.

        Raises:
            ConfigError: There is no such conversation, or several.
        """
        request_id = one_of("REQUEST", request_id, self.fates, "conversation")
        try:
            record = self._records.record(request_id)
        except ConfigError:  # it was cut, it raised, or its record was not kept
            record = None
        return {
            "kind": "conversation",
            "request_id": request_id,
            "fate": _fate(self.fates[request_id]),
            "record": record,
            "joined": self._rows({"request_id": request_id}),
            "faults": self._records.faults,
        }

    def _summaries(self, uid: str) -> list[dict[str, Any]]:
        table = self._records.summaries()
        own = map(self._records.corrected, table.filter(pc.equal(table["uid"], uid)).to_pylist())
        return [{name: row[name] for name in _OF_SUMMARY} for row in own]

    def _rows(self, where: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of joins with these values; of each conversation those of the join that counts."""
        return [
            _plain(row)
            for name, table in self._records.joins(None, where)
            for row in table.to_pylist()
            if self._rewards[key_of(row)].join == name
        ]

    def _rows_of_steps(self, where: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of joins with these values, without their lists, of the joins that count."""
        tables = list(self._records.joins(_NO_LISTS, where))
        counting = joins.counting((name for name, _ in tables), self._records.evaluations)
        return [row for name, table in tables if name in counting for row in table.to_pylist()]

    @staticmethod
    def _by_request(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            found[str(row["request_id"])].append(row)
        return found

    def _step_line(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        validation = line["event"] == "validation"
        own = [row for row in rows if row["step"] == line["step"] and row["validation"] == validation]
        return {
            **{name: line[name] for name in ("event", "step", "start", "began", "ended", "phases", "join")},
            **self._figures(own),
            **{name: len(line[name]) for name in _LEFT},
        }

    def _figures(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return numbers of the rows of a step or a validation."""
        groups = self._groups(rows)
        scores = [score for group in groups for score in group["scores"] if score is not None]
        return {
            "rows": len(rows),
            "conversations": len({(row["uid"], row["number"]) for row in rows}),
            "score": math.fsum(scores) / len(scores) if scores else None,
            "groups": len(groups),
            "equal_groups": sum(group["equal"] for group in groups),
            "trained_tokens": sum(row["trained"] or 0 for row in rows),
            "untrained": dict(Counter(row["untrained"] for row in rows if row["untrained"]).most_common()),
        }

    def _groups(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        by_uid: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            by_uid[row["uid"]].append(row)
        found = []
        for uid, own in by_uid.items():
            numbers = {key_of(row): row["number"] for row in own}
            scores = [self._rewards[key].score for key in sorted(numbers, key=lambda key: (numbers[key], key))]
            known = [score for score in scores if score is not None]
            equal = len(known) > 1 and are_equal(known)
            kept = {"uid": uid, "mean": own[0]["group_mean"], "std": own[0]["group_std"], "equal": equal}
            untrained = dict(Counter(row["untrained"] for row in own if row["untrained"]))
            found.append({**kept, "scores": scores, "untrained": untrained})
        return found

    def _step_part(self, line: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what is to be said of a step or a validation.

        Args:
            line: Its line in `steps.jsonl`; None: there is none.
            rows: Its rows in the join.
        """
        event = line["event"] if line is not None else "validation" if rows[0]["validation"] else "step"
        said = {} if line is None else {name: value for name, value in line.items() if name not in ("event", "rows")}
        return {"event": event, **said, **self._figures(rows), "groups": self._groups(rows)}

    def _member(
        self, fate: Fate, summary: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        advantages = [value for row in rows for value in row["advantages"] or ()]
        known = dict.fromkeys(_OF_SUMMARY) if summary is None else dict(summary)
        return {
            **known,
            **_fate(fate),
            "score": self._rewards.get(fate.request_id, Reward()).score,
            "parts": next((row["parts"] for row in reversed(rows) if row["parts"]), None),
            "advantage": math.fsum(advantages) / len(advantages) if advantages else None,
        }


def summed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last line of `verl-multiturn show`: what is shown, of how many conversations, and the faults."""
    kind = document["kind"]
    if kind == "run":
        conversations = sum(sum(counted.values()) for counted in document["fates"].values())
    elif kind == "step":
        conversations = sum(part["conversations"] for part in document["parts"])
    else:
        conversations = len(document["conversations"]) if kind == "group" else 1
    return {"kind": kind, "conversations": conversations, "faults": len(document["faults"])}


_OF_SUMMARY = ["request_id", "uid", "stop_reason", "valid", "rows", "turns", "calls", "failed_calls",
               "prompt_tokens", "response_tokens", "sampled_tokens", "seconds", "score"]  # fmt: skip


def one_of(where: str, given: str, known: Iterable[str], what: str) -> str:
    """Return the one name that is this one, or begins with it."""
    names = set(known)
    if given in names:
        return given
    found = sorted(name for name in names if given and name.startswith(given))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{where} {show(given)}: {len(found)} ids begin so, such as {', '.join(map(show, found[:_SHOWN]))}; "
            "write more of it"
        )
    one = f"; one that is there is {show(min(names))}" if names else ""
    raise ConfigError(f"{where} {show(given)}: there is no such {what} among {len(names)}{one}")


def _unsaid(lines: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return lines for the steps and validations that only a join knows."""
    said = {(line["step"], line["event"] == "validation") for line in lines}
    found = sorted({(row["step"], row["validation"]) for row in rows} - said)
    unknown: dict[str, Any] = {
        "start": None,
        "began": None,
        "ended": None,
        "phases": {},
        "join": "",
        **{name: [] for name in _LEFT},
    }
    return [{"event": "validation" if validation else "step", "step": step, **unknown} for step, validation in found]


def _order(line: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the place of a line: a validation comes after the step of its number."""
    return line["step"], line["event"] == "validation"


def _fate(fate: Fate) -> dict[str, Any]:
    said = fate._asdict()
    return {**said, "fate_step": said.pop("step")}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a join with its reward's parts read."""
    parts = row.get("parts")
    try:
        return {**row, "parts": None if parts is None else json.loads(parts)}
    except (ValueError, RecursionError):  # a join of a stranger
        return {**row, "parts": None}
