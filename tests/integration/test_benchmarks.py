"""The benchmarks run; their figures are not tested."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, leave_out_of_the_collector

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


async def test_turn_cost_runs_both_loops() -> None:
    from transformers import AutoTokenizer

    from benchmarks.turn_cost import run_ours, run_verl

    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    for clock in (await run_ours(4, tokenizer), await run_verl(4, tokenizer)):
        assert len(clock.asked) == 4
        assert clock.milliseconds_at(4) > 0


async def test_the_proxy_benchmark_plays_sessions() -> None:
    from benchmarks.proxy import play

    for large in (False, True):
        played = await play(3, 4, 300, large=large, at_once=3)
        assert [len(own) for own in played.taken] == [4, 4, 4]
        assert played.milliseconds(range(1, 4)) > 0


async def test_the_scale_benchmark_runs_conversations_and_sessions(tmp_path: Path) -> None:
    import gc

    from benchmarks.scale import World, growth, per_cpu_second
    from verl_multiturn.records.read.records import Records

    threshold = gc.get_threshold()
    world = World(tmp_path)
    try:
        speed, share = await per_cpu_second(world, 3, 3)
        assert speed > 0
        assert 0 <= share < 1
        assert set(await growth(world.serve, 3, 1, 2)) == {"mb", "grown_mb"}
    finally:
        gc.unfreeze()
        leave_out_of_the_collector()
        gc.set_threshold(*threshold)
        await world.endpoint.aclose()
        await world.runner.records.aclose()  # type: ignore[union-attr]
    assert len(list(Records(tmp_path).records())) == 6


def test_over_sampling_runs_the_real_worker() -> None:
    from transformers import AutoTokenizer

    from benchmarks.oversample import drawn, measured

    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    found = measured(True, tokenizer, batches=1, seed=0, scale=0.01)
    assert found["cut_samples"] == 16 * 3
    assert (found["reward_all"], found["length_all"]) == (pytest.approx(73 / 176), pytest.approx(410.6, abs=0.1))
    expected = drawn(True, tokenizer, batches=8, seed=0)
    assert {key: round(expected[key], 3) for key in ("seconds_without", "seconds_with", "step_time_ratio")} == {
        "seconds_without": 39.167,
        "seconds_with": 19.946,
        "step_time_ratio": 0.509,
    }
