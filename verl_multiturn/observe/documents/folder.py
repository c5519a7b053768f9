"""`RunDocuments`: the documents of one folder of records, as plain JSON: `show` prints it, the viewer serves it.

run     starts, steps, fates, settings                    group           its conversations side by side
step    a step's numbers and groups                       conversation    its fate, its record and its rows in the join
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl_multiturn.describe import one_line, show
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.points import read_points
from verl_multiturn.observe.documents.join_rows import joined_rows, read_parts
from verl_multiturn.observe.documents.roles import group_means, means_of, roles_of
from verl_multiturn.observe.documents.steps import Key, groups_of, lines_of, step_entries
from verl_multiturn.records.index.index import Index
from verl_multiturn.records.index.query import one_of
from verl_multiturn.records.index.rows import differing, fate_of
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.fates import COUNTED, Fate, counted_as, start_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import by_role, each_once, key_of

SETTINGS = ("settings", "tools", "interactions", "schemas", "template")
"""Fields of a run's file beside its start."""
_OF_START = ("start", "began", "host", "versions", "resumed_from")
_OF_GROUPS = ["request_id", "uid", "number", "row", "role", "validation", "untrained", "group_mean", "group_std"]
_OF_MEMBER = ("request_id", "uid", "stop_reason", "valid", "rows", "turns", "calls", "failed_calls",
              "prompt_tokens", "response_tokens", "sampled_tokens", "seconds", "score")  # fmt: skip


class RunDocuments:
    """The documents of one folder, or of one file.

    Args:
        records: Its records.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.index = Index(records)
        self._faults: dict[str, None] = {}

    def refresh(self) -> bool:
        """Read the data written since; return whether there was any."""
        rebuilds, has_changed = self.index.rebuilds, self.index.refresh()
        if self.index.rebuilds != rebuilds:
            self._faults.clear()
        return has_changed

    def faults(self) -> list[str]:
        """Return the parts that could not be read, a sentence each."""
        return list(self._faults | self.index.faults | dict.fromkeys(self.records.faults))

    def fault(self, what: str) -> None:
        """Note a part that could not be read."""
        self._faults[one_line(what)] = None

    def run(self) -> dict[str, Any]:
        """Return the known data of the whole run.

        Returns:
            `starts`; `steps`, each as `step_entries` has it; `evaluations` of checkpoints; `fates` of `training` and of
            `validation`, and `stops`: how many conversations had each fate and stop reason; `open`, how many were
            running when the workers last looked; `has_trainer`; `settings` of each start.
        """
        ended = {end["start"]: end for end in self.records.ends()}
        ends = {name: (end["at"], end["error"]) for name, end in ended.items()}
        starts = [
            {name: run[name] for name in _OF_START}
            | {"is_evaluation": "evaluation" in run["settings"]}
            | dict(zip(("ended", "error"), ends.get(run["start"], (None, None)), strict=True))
            for run in self.records.runs
        ]
        table = self.index.table
        fates = _counted(table)
        points = [point for folder in self.records.folders for point in read_points(folder.parent, self.fault)]
        return {
            "starts": starts,
            "steps": list(self._entries().values()),
            "evaluations": [point.model_dump() for point in points],
            "fates": {kind: fates[kind] for kind in ("training", "validation")},
            "stops": _stops(table),
            "has_trainer": self.records.has_trainer,
            "open": sum(
                len(shot["open"]) for shot in self.records.snapshots() if start_of(shot["file"], ended) not in ended
            ),
            "settings": [{name: run.get(name) for name in ("start", *SETTINGS)} for run in self.records.runs],
        }

    def _entries(self) -> dict[Key, dict[str, Any]]:
        """Return the entries of the steps."""
        index = self.index
        conversations = pa.concat_tables([index.table, index.nameless])
        return step_entries(conversations, lines_of(self.records.steps()), index.figures(), index.undone())

    def step(self, step: int) -> dict[str, Any]:
        """Return the known data of a step and of the validation after it.

        Args:
            step: Number of the step.

        Returns:
            `parts`, one for the step and one for the validation: the trainer's line, numbers, and `groups`; and
            `begun`, how many conversations began in the step, and their fates.

        Raises:
            ConfigError: Nothing is known of the step.
        """
        lines, entries = lines_of(self.records.steps()), self._entries()
        known = {key: entry for key, entry in entries.items() if key in lines or entry["basis"] == "trained"}
        if not any(key[0] == step for key in known):
            steps = sorted({key[0] for key in known})
            there = f"there are {steps[0]} to {steps[-1]}" if steps else "there is none"
            raise ConfigError(f"--step {step}: nothing is known of this step; {there}")
        parts = []
        for key, entry in known.items():
            if key[0] == step:
                said = {name: value for name, value in lines.get(key, {}).items() if name != "rows"}
                groups = self._groups(key)
                parts.append({"event": entry["event"], **said, **_figures(entry), "groups": groups})
        table = self.index.table
        begun = table.filter(pc.equal(pc.coalesce(table["step"], table["trained_step"]), step))
        return {"step": step, "parts": parts, "begun": {"count": len(begun), "fates": _counted(begun)["all"]}}

    def _groups(self, key: Key) -> list[dict[str, Any]]:
        """Return the groups of a step or a validation, by its joins."""
        index, rows = self.index, []
        for path in index.joins_of(*key):
            with contextlib.suppress(*joins.UNREADABLE):  # the index reports it
                name = joins.parse_name(path.name)
                assert name is not None
                rows += each_once(joins.read_one(path, name, _OF_GROUPS)).to_pylist()
        own = pa.concat_tables([index.table, index.nameless]).select(["request_id", "uid", "number", "score", "roles"])
        own = own.filter(pc.is_in(own["uid"], pa.array({row["uid"] for row in rows}, pa.string())))
        return groups_of(rows, {key_of(row): by_role(row["score"], row["roles"]) for row in own.to_pylist()})

    def group(self, uid: str) -> dict[str, Any]:
        """Return the conversations of a group, side by side.

        Args:
            uid: Its uid, or the beginning of one.

        Returns:
            `uid`, `step` that trained it, `mean` and `std` of its scores, and its `conversations`. Where there are
            roles, `roles` has mean, deviation and scores of each.

        Raises:
            ConfigError: There is no such group, or several.
        """
        table = self.index.table
        uid = one_of("--group", uid, filter(None, pc.unique(table["uid"]).to_pylist()), "group")
        rows = table.filter(pc.equal(table["uid"], uid)).to_pylist()
        rows.sort(key=lambda row: (row["number"], row["request_id"]))
        members, joined = [], []
        for row in rows:
            self.record(row)
            own = self.joined(row)
            joined += [{name: each[name] for name in ("role", "group_mean", "group_std")} for each in own]
            members.append(_member(row, own))
        nameless = self.index.nameless
        others = nameless.filter(pc.equal(nameless["uid"], uid)).to_pylist()
        first = next((row for row in [*rows, *others] if row["join"] is not None), None)
        of_first = [] if first is None else [{**first, "role": None}]
        said = group_means(means_of(joined or of_first), [by_role(row["score"], row["roles"]) for row in rows])
        return {"uid": uid, "step": None if first is None else first["trained_step"], **said, "conversations": members}

    def conversation(self, request_id: str) -> dict[str, Any]:
        """Return the known data of a conversation.

        Args:
            request_id: Its request id, or the beginning of one.

        Returns:
            `request_id`; `fate`; `record`, None where none was kept or can be read; `joined`, its rows in the join.

        Raises:
            ConfigError: There is no such conversation, or several.
        """
        table = self.index.table
        request_id = one_of("REQUEST", request_id, table["request_id"].to_pylist(), "conversation")
        row = table.filter(pc.equal(table["request_id"], request_id)).to_pylist()[0]
        record = self.record(row)
        joined = [{**each, "parts": read_parts(each)} for each in self.joined(row)]
        return {"request_id": request_id, "fate": _fate(fate_of(row)), "record": record, "joined": joined}

    def record(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the record of a row; None: there is none, or it cannot be read."""
        if row["offset"] is None:
            return None
        stem = self.index.stem(row["file"])
        found = self.records.record_at(stem, row["offset"], row["place"] or 0)
        if found is not None and found["request_id"] == row["request_id"]:
            if found["status"] == "finished":  # for a cancelled one a line adds nothing
                self._correct(row, found)
            return found
        what = "cannot be read" if found is None else f"is that of {found['request_id']!r}"
        self.fault(f"{stem}, offset {row['offset']}: the record of {row['request_id']!r} {what}")
        return None

    def _correct(self, row: dict[str, Any], record: Mapping[str, Any]) -> None:
        """Correct a row's values from its line by its record, and report it: any program may have written the line."""
        if found := differing(row, record):
            said = ", ".join(f"{name} {show(row[name], 60)} for {show(value, 60)}" for name, value in found.items())
            what = f"the line of request {row['request_id']!r} says {said}; the record is taken"
            self.fault(f"{self.index.stem(row['file'])}, offset {row['offset']}: {what}")
            row.update(found)

    def joined(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of a conversation in the join that counts."""
        if row["join"] is None:
            return []
        return list(joined_rows(self.index.join(row["join"]), {row["request_id"]}, self.fault))


def _figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a step that its own line does not have."""
    names = ("rows", "conversations", "score", "groups", "equal_groups", "trained_tokens", "untrained")
    return {name: entry[name] for name in names}


def _counted(table: pa.Table) -> dict[str, dict[str, int]]:
    """Return how many conversations of the index have each fate, as `fates.count` does, by kind and of `all`."""
    kinds: dict[str, Counter[str]] = {"training": Counter(), "validation": Counter(), "all": Counter()}
    names = ["fate", "undone", "validation"]
    for row in table.select(names).group_by(names).aggregate([([], "count_all")]).to_pylist():
        for kind in ("validation" if row["validation"] else "training", "all"):
            kinds[kind][counted_as(row["fate"], bool(row["undone"]))] += row["count_all"]
    return {kind: {name: found[name] for name in COUNTED if found[name]} for kind, found in kinds.items()}


def _stops(table: pa.Table) -> dict[str, int]:
    """Return how many conversations ended for each reason, the most frequent first."""
    counted = table.group_by("stop_reason").aggregate([([], "count_all")]).to_pylist()
    counted.sort(key=lambda row: -row["count_all"])
    return {row["stop_reason"]: row["count_all"] for row in counted if row["stop_reason"] is not None}


def _fate(fate: Fate) -> dict[str, Any]:
    said = fate._asdict()
    return {**said, "fate_step": said.pop("step")}


def _member(row: Mapping[str, Any], joined: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a conversation of a group: its summary, fate and score, its parts, and the mean of its advantages."""
    advantages = [float(value) for each in joined if each["advantages"] is not None for value in each["advantages"]]
    parts = (read_parts(each) for each in reversed(joined))
    return {
        **{name: row[name] for name in _OF_MEMBER},
        **_fate(fate_of(row)),
        "score": row["score"],
        "parts": next(filter(None, parts), None),
        "advantage": math.fsum(advantages) / len(advantages) if advantages else None,
        **roles_of(row, joined),
    }
