"""The figures of `benchmarks.async_modes`, from the metrics of a run's steps."""

from benchmarks.async_modes import measure


def test_the_figures_of_a_run() -> None:
    async_ = "rollout/async/"
    steps = [
        {"val-core/sums/acc/mean@1": 0.0, "timing_s/testing": 3.0},
        {f"{async_}listings": 10.0, "timing_s/step": 10.0, "timing_s/gen": 4.0, f"{async_}age/max": 1.0,
         f"{async_}wake_ms": 100.0, f"{async_}rows_ms": 90.0},
        {f"{async_}listings": 2.0, f"{async_}rerolled": 0.0, "timing_s/step": 12.0, "timing_s/gen": 0.0,
         "timing_s/testing": 5.0, "val-core/sums/acc/mean@1": 0.96, f"{async_}age/max": 2.0},
    ]  # fmt: skip
    assert measure(steps) == {
        "accuracy": 0.96,
        "seconds_to_0.9": 30.0,
        "wake_ms": 100.0,
        "told_ms": 10.0,
        "listings": 13,  # the asynchronous trainers list once more when a step begins
        "allowed": 34,  # 16 groups in each of two steps, and one for every 2 s of waiting
        "max_age": 2.0,
        "curve": [(3.0, 0.0), (30.0, 0.96)],
    }


def test_a_run_that_never_waits_and_never_gets_there() -> None:
    found = measure([{"rollout/async/listings": 1.0, "timing_s/gen": 0.0, "val-core/sums/acc/mean@1": 0.5}])
    assert (found["wake_ms"], found["told_ms"], found["seconds_to_0.9"]) == (None, None, None)
