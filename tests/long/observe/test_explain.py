"""Whole runs: each fault is named first, and nothing alarms in a healthy run.

The faults are planted into small runs; into whole ones with `--all`, as `python -m benchmarks.explain` does.
"""

from dataclasses import replace

import pytest

from tests.long.observe.explain import OTHER_SIZES, OTHER_TASKS, holds, run
from tests.long.observe.planted_faults import FAULTS, STRAGGLERS
from tests.long.observe.synthetic_records import Size
from tests.long.observe.synthetic_runs import Fault, Run
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.observe.explain.finding import Finding
from verl_multiturn.records import schema

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["small", pytest.param("whole", marks=pytest.mark.long)])
def size(request: pytest.FixtureRequest) -> Size:
    return Size() if request.param == "whole" else OTHER_SIZES["small"]


@pytest.fixture(scope="module")
def healthy() -> list[Finding]:
    """Return the findings in a whole healthy run."""
    return explain(Run(Size(), 13))


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: str(plant.__name__))
def test_a_fault_is_named_first(plant: type[Fault], size: Size) -> None:
    first = explain(Run(replace(size), 11, plant()))[0]
    assert (first.symptom, first.kind) == (plant.symptom, "alarm")
    assert 1 <= len(first.requests) <= 3
    assert first.remedy
    assert first.evidence


@pytest.mark.parametrize("plant", STRAGGLERS, ids=lambda plant: str(plant.__name__))
def test_who_made_a_step_late_is_named_with_its_seconds(plant: type[Fault], size: Size) -> None:
    fault = plant()
    first = explain(Run(replace(size), 12, fault))[0]
    assert (first.symptom, first.kind, first.evidence["part"]) == ("stragglers", "alarm", fault.part)  # type: ignore[attr-defined]
    assert all(27.0 < each["seconds"] < 33.0 for each in first.evidence["worst"])


@pytest.mark.parametrize("name", [name for name in OTHER_SIZES | OTHER_TASKS if name != "large"])
def test_nothing_alarms_in_a_healthy_run_of_another_kind(name: str) -> None:
    size = (OTHER_SIZES | OTHER_TASKS)[name]
    assert [each.said for each in explain(Run(replace(size), 13)) if each.kind == "alarm"] == []


def test_nothing_alarms_in_a_healthy_run(healthy: list[Finding]) -> None:
    assert [each.said for each in healthy if each.kind == "alarm"] == []


def test_the_end_of_a_healthy_run_is_noted(healthy: list[Finding]) -> None:
    notes = {each.symptom: each for each in healthy if each.kind == "note"}
    assert {"entropy", "groups_right"} <= notes.keys()
    assert notes["entropy"].evidence["entropy_first"] > 20 * notes["entropy"].evidence["entropy_last"]
    assert notes["groups_right"].evidence["share_last_quarter"] > 0.5


def test_synthetic_records_have_the_form_of_records() -> None:
    for task in ("sums", "game", "agent"):
        run = Run(Size(steps=1, groups=1, size=2, validated=1, task=task, turns=3), 0)
        for record in run.records():
            schema.Record.model_validate(record)
        for step in run.steps():
            schema.StepLine.model_validate(step)
        for line in run.lines():
            schema.ConversationLine.model_validate(line)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_other_seeds_and_sizes_hold() -> None:
    assert holds(run([]))
