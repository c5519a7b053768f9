"""The figures of `benchmarks.async_modes`, from the metrics of a run's steps."""

from typing import Any

from benchmarks.async_modes import measure, wake_parts
from benchmarks.wake_parts import ends_of, parts_of


def test_the_figures_of_a_run() -> None:
    async_ = "rollout/async/"
    steps = [
        {"val-core/sums/acc/mean@1": 0.0, "timing_s/testing": 3.0},
        {f"{async_}listings": 10.0, "timing_s/step": 10.0, "timing_s/gen": 4.0, f"{async_}age/max": 1.0,
         f"{async_}wake_ms": 100.0, f"{async_}rows_ms": 90.0},
        {f"{async_}listings": 0.0, "timing_s/step": 0.0, "timing_s/gen": 0.0, f"{async_}wake_ms": 10.0,
         f"{async_}rows_ms": 0.0},
        {f"{async_}listings": 0.0, "timing_s/step": 0.0, "timing_s/gen": 0.0, f"{async_}wake_ms": 20.0,
         f"{async_}rows_ms": 10.0},
        {f"{async_}listings": 2.0, f"{async_}rerolled": 0.0, "timing_s/step": 12.0, "timing_s/gen": 0.0,
         "timing_s/testing": 5.0, "val-core/sums/acc/mean@1": 0.96, f"{async_}age/max": 2.0},
    ]  # fmt: skip
    assert measure(steps) == {
        "accuracy": 0.96,
        "seconds_to_0.9": 30.0,
        "wake_ms": 92.0,  # the 95th percentile of 10, 20, 100
        "wake_p50_ms": 20.0,
        "told_ms": 10.0,
        "listings": 13,  # the asynchronous trainers list once more when a step begins
        "allowed": 66,  # 16 groups in each of four steps, and one for every 2 s of waiting
        "max_age": 2.0,
        "curve": [(3.0, 0.0), (30.0, 0.96)],
    }


def test_a_run_that_never_waits_and_never_gets_there() -> None:
    found = measure([{"rollout/async/listings": 1.0, "timing_s/gen": 0.0, "val-core/sums/acc/mean@1": 0.5}])
    assert [found[key] for key in ("wake_ms", "wake_p50_ms", "told_ms", "seconds_to_0.9")] == [None] * 4


def test_where_the_wait_for_a_batch_goes() -> None:
    def record(step: int, end: float, reward: float, store: float, validation: bool = False) -> dict[str, Any]:
        spans = [("generation", 0.0, end), ("reward", end, reward), ("store", reward, store)]
        timeline = [{"kind": kind, "start": start, "end": stop} for kind, start, stop in spans]
        return {"step": step, "validation": validation, "timeline": timeline}

    records = [
        record(1, 10.0, 10.001, 10.002),  # long before
        record(1, 10.9, 11.0, 11.1),
        record(1, 11.0, 11.02, 11.15),
        record(1, 12.0, 12.5, 13.0, validation=True),
        {"step": 1, "validation": False, "timeline": []},
    ]
    ends = ends_of(records)
    assert {step: len(own) for step, own in ends.items()} == {1: 3}
    assert parts_of(ends[1]) == (20.0, 130.0, 2, 60.0, 115.0)
    steps = [
        {"training/global_step": 1, "rollout/async/wake_ms": 170.0, "rollout/async/rows_ms": 150.0},
        {"training/global_step": 2},
    ]
    assert wake_parts(steps, ends) == {
        "wake": 170.0,
        "reward": 20.0,
        "rows": 130.0,
        "told": 20.0,
        "together": 2.0,
        "reward_each": 60.0,
        "rows_each": 115.0,
    }
    assert wake_parts(steps[1:], ends) is None
