"""The fates of a run's conversations, compared with its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.observe.metric_files import read_metrics
from verl_multiturn.records.read.fates import FATES, Fate, count, fates_of
from verl_multiturn.records.read.records import Records

_GROUPS = {
    "evicted": "rollout/async/evicted",
    "failed": "training/rollout_failure/evicted_samples",
    "rerolled": "rollout/async/rerolled",
}
"""Lists of groups in `steps.jsonl`, and the metric that counts them."""
_OF_A_GROUP = {name: {name, "cut", "raised", "cancelled", "lost"} for name in _GROUPS}
"""Fates that a conversation of such a group may have: some had theirs before the group had."""


def compare(out: Path, cuts_known: bool = True) -> dict[str, Any]:
    """Return the fates of a run's conversations, and the contradictions: sentences, none if all is well.

    Args:
        out: Folder of the run.
        cuts_known: Whether the metrics count every cut; cuts of a worker that died are not known.
    """
    records = Records(out / "records")
    begun = Counter(line["request_id"] for line in records.lines() if line["event"] == "begin")
    found = fates_of(records)
    steps = [entry["data"] for entry in read_metrics(out)]
    lines = [line for line in records.steps() if line["event"] == "step"]
    wrong = [*_each_once(begun, found), *_groups(lines, steps, found), *_trained(records, lines)]
    wrong += _counted(
        "raised", _total(steps, "rollout/raised"), found, [fate for fate in found if fate.step is not None]
    )
    if cuts_known:
        wrong += _counted("cut", _total(steps, "rollout/async/cut_samples"), found, [])
    wrong += records.faults
    return {"begun": len(begun), "fates": count(found), "wrong": wrong}


def _each_once(begun: Counter[str], found: Sequence[Fate]) -> list[str]:
    """Return the contradictions to the rule that every conversation that began has one fate, and no other has one."""
    of = Counter(fate.request_id for fate in found)
    wrong = [f"{request_id} began and has no fate" for request_id in begun.keys() - of.keys()]
    wrong += [f"{request_id} has a fate and did not begin" for request_id in of.keys() - begun.keys()]
    wrong += [f"{request_id} has {often} fates" for request_id, often in of.items() if often > 1]
    return wrong + [
        f"{fate.request_id} is {fate.fate}: {fate.why}"
        for fate in found
        if fate.fate not in FATES or fate.fate == "unknown"
    ]


def _groups(lines: Sequence[dict[str, Any]], steps: Sequence[dict[str, float]], found: Sequence[Fate]) -> list[str]:
    """Compare the groups that left with the metrics, and with the fates of their conversations."""
    wrong = []
    for name, metric in _GROUPS.items():
        uids = [uid for line in lines for uid in line[name]]
        if len(uids) != _total(steps, metric):
            wrong.append(f"steps.jsonl has {len(uids)} {name} groups, {metric} counts {_total(steps, metric)}")
        wrong += [
            f"{fate.request_id} of a group that is {name} is {fate.fate}"
            for fate in found
            if fate.uid in uids and fate.fate not in _OF_A_GROUP[name]
        ]
    return wrong


def _trained(records: Records, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Compare the conversations of each step's join with the metric that counts the batch's."""
    joined = {
        (name.step, name.start): len(set(table["request_id"].to_pylist()))
        for name, table in records.joins(["request_id"])
        if not name.validation
    }
    wrong = []
    for line in lines:
        there, said = joined.get((line["step"], line["start"]), 0), int(line["metrics"].get("rollout/trajectories", 0))
        if there != said:
            wrong.append(f"step {line['step']}: {there} conversations are joined, rollout/trajectories is {said}")
    return wrong


def _counted(name: str, said: int, found: Sequence[Fate], sure: Collection[Fate]) -> list[str]:
    """Compare a metric with the conversations that have a fate.

    Events after the last step's metrics are in no metric. So it may have less than there are, but not less than those
    that are `sure`, and never more.
    """
    own = [fate for fate in found if fate.fate == name]
    least = sum(fate.fate == name for fate in sure)
    if least <= said <= len(own):
        return []
    return [f"{len(own)} conversations are {name}, {least} of them before the last step's end; the metrics say {said}"]


def _total(steps: Sequence[dict[str, float]], metric: str) -> int:
    return int(sum(step.get(metric, 0) for step in steps))
