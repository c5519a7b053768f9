"""Does `verl-multiturn explain` name a fault of a run first, and none in a healthy one?

Synthetic runs of the quickstart's size and learning curve get one fault each. Other sizes, tasks, speeds, scales and
noises show whether the thresholds fit more than one kind of run; so do real healthy runs (`--run`).

Last line: one JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.long.observe.planted_faults import FAULTS, STRAGGLERS
from tests.long.observe.synthetic_records import Size
from tests.long.observe.synthetic_runs import Run
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.explain.finding import Finding
from verl_multiturn.records.read.records import Records

SEEDS = (0, 1, 2)
WITHIN = 0.1
OTHER_SIZES = {
    "small": Size(steps=10, groups=8, size=4, validated=32),
    "large": Size(steps=40, groups=32, size=8, validated=128, every=10),
    "noisy": Size(noise=2.0),
    "slow": Size(steps=30, speed=0.6, best=0.6),
    "fast": Size(speed=2.0),
    "scaled": Size(scale=10.0, floor=-5.0),
    "half": Size(best=0.5, start=0.2),
    "bfloat16": Size(drift=0.008),
}
PLANTED_SIZES = ("small", "noisy", "slow", "scaled")
OTHER_TASKS = {
    "choice": Size(task="choice", start=0.25),
    "game": Size(task="game", turns=5),
    "agent": Size(task="agent"),
    "asynchronous": Size(mode="separate_async"),
    "unvalidated": Size(validated=0),
}


def run(folders: Sequence[str], only_runs: bool = False) -> dict[str, Any]:
    """Explain all runs, print the results, and return the figures.

    Args:
        folders: Folders of real healthy runs.
        only_runs: Leave the synthetic runs out.
    """
    result: dict[str, Any] = {}
    if not only_runs:
        result |= _planted(Size(), "")
        result |= _late()
        result |= {"healthy_alarms": {f"seed {seed}": _alarms(f"seed {seed}", Run(Size(), seed)) for seed in SEEDS}}
        others = OTHER_SIZES | OTHER_TASKS
        result["other_alarms"] = {name: _alarms(name, Run(replace(size), 7)) for name, size in others.items()}
        found = {name: _planted(OTHER_SIZES[name], name) for name in PLANTED_SIZES}
        result["other_planted"] = sum(each["planted"] for each in found.values())
        result["other_named_first"] = sum(each["named_first"] for each in found.values())
        result["other_missed"] = {name: each["missed"] for name, each in found.items() if each["missed"]}
    result["run_alarms"] = {folder: _alarms(folder, Records(Path(folder))) for folder in folders}
    return result


def holds(result: Mapping[str, Any]) -> bool:
    """Return whether each fault was named first, and no healthy run alarms."""
    alarms = [result.get(key, {}) for key in ("healthy_alarms", "other_alarms", "run_alarms")]
    is_well = not any(found for each in alarms for found in each.values())
    return is_well and not result.get("missed") and not result.get("late_wrong")


def _planted(size: Size, name: str) -> dict[str, Any]:
    """Return how many planted faults were named first."""
    missed = {}
    for number, plant in enumerate(FAULTS):
        findings = explain(Run(replace(size), number, plant()))
        first = findings[0] if findings else None
        well = first is not None and (first.symptom, first.kind) == (plant.symptom, "alarm")
        print(f"{'ok' if well else 'NO'} {name} {plant.__name__}: {_shown(first)}", flush=True)
        if not well:
            missed[plant.__name__] = [f"{each.kind} {each.symptom}" for each in findings[:4]]
    return {"planted": len(FAULTS), "named_first": len(FAULTS) - len(missed), "missed": missed}


def _late() -> dict[str, Any]:
    """Return by how much the seconds of late parts are wrong, at most."""
    wrong, errors = {}, {}
    for number, plant in enumerate(STRAGGLERS):
        fault = plant()
        findings = explain(Run(Size(), 100 + number, fault))
        first = findings[0] if findings else None
        if first is None or (first.symptom, first.kind) != ("stragglers", "alarm"):
            wrong[plant.__name__] = _shown(first)
            continue
        seconds = [each["seconds"] for each in first.evidence["worst"]]
        error = max(abs(each - fault.seconds) / fault.seconds for each in seconds)
        errors[fault.part] = round(error, 4)
        if first.evidence["part"] != fault.part or error > WITHIN:
            wrong[plant.__name__] = _shown(first)
        print(f"{'NO' if plant.__name__ in wrong else 'ok'} {plant.__name__}: {_shown(first)}", flush=True)
    return {"late": len(STRAGGLERS), "late_wrong": wrong, "late_error": errors}


def _alarms(name: str, records: Any) -> list[str]:
    findings = explain(records)
    alarms = [f"{each.symptom}: {each.said}" for each in findings if each.kind == "alarm"]
    notes = [each.symptom for each in findings if each.kind == "note"]
    print(f"{'NO' if alarms else 'ok'} healthy {name}: alarms {alarms}, notes {notes}", flush=True)
    return alarms


def _shown(finding: Finding | None) -> str:
    return "nothing" if finding is None else f"{finding.kind} {finding.symptom}: {finding.said}"
