"""The benchmarks run; their figures are not tested."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import certificate as benchmark
from tests.conftest import ROOT, leave_out_of_the_collector
from verl_multiturn import StopReason

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
    from verl_multiturn.records.reader import Records

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


@pytest.fixture(scope="module")
def rolled() -> Any:
    from benchmarks import honest

    return honest.roll(540)


def test_hard_conversations_raise_no_alarm(rolled: Any) -> None:
    from benchmarks import honest

    alarms, padding = honest.false_alarms(rolled)
    assert alarms == []
    assert padding == -(-len(rolled) // honest.PER_BATCH)
    found = honest.kinds(rolled)
    # Sessions of agents are played, and their rows certified, in test_proxy_forest.py; outages in test_outages.py.
    elsewhere = {StopReason.AGENT_ERROR, StopReason.AGENT_FAILED, StopReason.OUTAGE, StopReason.UNJUDGED}
    assert set(map(str, set(StopReason) - elsewhere)) <= set(found)
    assert all(count > 0 for count in found.values()), found


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("response_mask", lambda old: 1 - old),
        ("rollout_log_probs", lambda old: old - 0.25),
        ("rollout_versions", lambda old: old + 1),
        ("responses", lambda old: old + 1),
    ],
)
def test_a_hard_conversation_that_was_changed_raises_one(
    rolled: Any, column: str, change: Callable[[Any], Any]
) -> None:
    from dataclasses import replace

    from benchmarks import honest

    valid = [each for each in rolled if each.record["valid"]][:100]
    changed = [replace(each, fields={**each.fields, column: change(each.fields[column])}) for each in valid]
    assert len(honest.false_alarms(changed)[0]) == len(changed) == 100


def a_run(folder: Path, rolled: Any, rows: int, unverified: int = 0) -> Path:
    """Write the files that a quickstart leaves behind for these conversations."""
    records = [json.dumps(each.record) for each in rolled if each.record["valid"]]
    (folder / "trajectories.jsonl").write_text("\n".join(records), encoding="utf-8")
    logged = {"rows": rows, "unverified": unverified, "violations": 0, "seconds": 0.1}
    data = {"timing_s/step": 10.0, **{benchmark.PREFIX + name: value for name, value in logged.items()}}
    steps = [{"step": 0, "data": {}}, {"step": 1, "data": data}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)), encoding="utf-8")
    return folder


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["certificate", "--run", str(folder)])
    monkeypatch.setattr(benchmark, "HARD", 36)
    monkeypatch.setattr(benchmark, "TRIALS", 3)
    monkeypatch.setattr(benchmark, "CONVERSATIONS", 30)
    benchmark.main()


def test_the_certificates_figures(
    rolled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    valid = [each for each in rolled if each.record["valid"]]
    run(a_run(tmp_path, rolled, rows=len(valid)), monkeypatch)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    of_several = ["conversation_corruptions", "conversation_caught", "honest", "honest_of_several_rows"]
    assert list(figures) == ["corruptions", "caught", *of_several, "false_alarms", "step_share"]
    assert figures["conversation_corruptions"] == figures["conversation_caught"] >= 10
    assert (figures["honest"], figures["false_alarms"]) == (len(valid) + 45, 0)


@pytest.mark.parametrize(("missing", "unverified"), [(1, 0), (0, 1), (None, 0)])
def test_a_run_whose_trainer_did_not_verify_its_rows_proves_nothing(
    rolled: Any,
    missing: int | None,
    unverified: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    valid = sum(each.record["valid"] for each in rolled)
    folder = a_run(tmp_path, rolled, valid - missing if missing is not None else 0, unverified)
    if missing is None:  # no certificate at all
        (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit, match=f"{unverified} unverified, where {valid} .* proves nothing") as ended:
        run(folder, monkeypatch)
    assert isinstance(ended.value.code, str)  # a message, printed with exit status 1
    assert "{" not in capsys.readouterr().out
