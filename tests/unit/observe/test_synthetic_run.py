"""The runs in memory of `benchmarks.explain` have what `explain` reads; its whole tests run with `--all`."""

from tests.long.observe.explain import OTHER_SIZES
from tests.long.observe.planted_faults import FAULTS
from tests.long.observe.synthetic_runs import Run
from verl_multiturn.observe.explain.explanation import explain


def test_a_fault_in_a_small_run_is_named_first() -> None:
    plant = FAULTS[0]
    first = explain(Run(OTHER_SIZES["small"], 11, plant()))[0]
    assert (first.symptom, first.kind) == (plant.symptom, "alarm")
