"""The parts of `benchmarks.async_speed` that need no engine: the latencies, the slow tool, and a run's measurements."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import slow_calculator
from benchmarks.async_speed import ends_of_steps, summary
from benchmarks.async_speed_inputs import write_rows, write_tools
from benchmarks.async_speed_measures import Turn, calls_of, engine_of, measure, prefilling_of, token_times, turns_of
from benchmarks.slow_calculator import latency_s
from verl_multiturn.tools.loading.registry import load_tools


def test_the_latency_is_fixed_and_lognormal() -> None:
    assert latency_s(3, 1, 0) == pytest.approx(0.230125, abs=1e-6)
    drawn = [latency_s(row, sample, 0) for row in range(1000) for sample in range(8)]
    assert statistics.median(drawn) == pytest.approx(1, abs=0.05)
    assert statistics.quantiles(drawn, n=20)[-1] == pytest.approx(7.2, abs=0.5)  # exp(1.2 * 1.645)
    assert max(drawn) == 30
    assert len({latency_s(row, sample, call) for row in (0, 1) for sample in (0, 1) for call in (0, 1)}) == 8


async def test_conversations_of_a_row_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(slow_calculator, "latency_s", lambda row, sample, call: 100 * row + 10 * sample + call)

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    write_tools(tmp_path / "tools.yaml", tmp_path / "journal.jsonl", samples=2)
    tool: Any = load_tools(tmp_path / "tools.yaml")["calculator"]
    for name, row in (("a", 4), ("b", 4), ("c", 5), ("again", 4)):
        await tool.create(name, row=row)
    for name in ("a", "b", "c", "again", "b"):
        answer = await tool.execute(name, {"expression": "2 + 3"})
        assert answer.text == "5"
    for name in ("a", "b"):
        await tool.release(name)
    assert waited == [400, 410, 500, 400, 411]
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [(line["id"], line["row"], line["sample"], len(line["calls"])) for line in lines] == [
        ("a", 4, 0, 1),
        ("b", 4, 1, 2),
    ]
    for line in lines:
        times = [line["create"], *(time for call in line["calls"] for time in call), line["release"]]
        assert times == sorted(times)


def test_rows_tell_the_tool_their_number(tmp_path: Path) -> None:
    import pyarrow.parquet

    settings = write_rows(tmp_path, 3, seed=0)
    assert settings == [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        "data.shuffle=False",
    ]
    rows = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["extra_info"]["tools_kwargs"] for row in rows] == [
        {"calculator": {"create_kwargs": {"row": number}}} for number in range(3)
    ]


def metrics(**more: float) -> dict[str, float]:
    return {
        "timing_s/gen": 1.5,
        "timing_s/old_log_prob": 0.5,
        "timing_s/adv": 0.1,
        "timing_s/update_actor": 1.4,
        "timing_s/update_weights": 0.25,
        "rollout/certificate/rows": 64,
        "rollout/certificate/violations": 0,
        "rollout/calls/run_s/p50": 1.0,
        **more,
    }


def test_what_a_run_measured() -> None:
    steps = [metrics(), metrics(**{"rollout/async/age/max": 3, "rollout/async/rerolled": 2, "timing_s/gen": 2.5})]
    journal: list[dict[str, Any]] = [
        {"id": "a", "create": 100.0, "calls": [[101.0, 103.0]], "release": 104.0},
        {"id": "b", "create": 100.5, "calls": [], "release": 104.0},
    ]
    assert measure(steps, [104.0, 110.0], journal) == {
        "seconds": 10.0,
        "seconds_second_half": 6.0,
        "step_s": [4.0, 6.0],
        "idle": 0.4,
        "training_s": 2.0,
        "sync_s": 0.25,
        "rest_s": 0.75,
        "max_age": 3,
        "called": 0.5,
        "calls_p50_s": 1.0,
        "calls_p95_s": None,
        "rerolled": 2,
        "masked_share": None,
        "prompts_lost": 0,
        "rows": 128,
        "violations": 0,
    }


def test_turns_come_from_the_journal_and_the_records() -> None:
    journal: list[dict[str, Any]] = [
        {"id": "a", "create": 10.0, "calls": [[11.0, 13.0]], "release": 13.5},
        {"id": "overlapping", "create": 10.0, "calls": [[11.0, 14.0], [11.5, 13.0]], "release": 15.0},
        {"id": "cancelled", "create": 10.0, "calls": [], "release": 12.0},
    ]
    records = [
        {"request_id": name, "generations": [{"tokens": tokens, "row": 0} for tokens in counts]}
        for name, counts in (("a", [2, 1]), ("overlapping", [1, 1, 1]))
    ]
    turns = turns_of(journal, records)
    assert turns == [Turn(True, 10.0, 11.0, 2), Turn(False, 13.0, 13.5, 1)]
    engine = engine_of(turns)
    assert (engine["call_tokens"], engine["answer_tokens"]) == (2.0, 1.0)


def test_the_last_attempt_tells_how_often_a_conversation_called() -> None:
    journal: list[dict[str, Any]] = [
        {"row": 2, "sample": 1, "create": 9.0, "calls": [[10.0, 11.0]]},
        {"row": 0, "sample": 0, "create": 1.0, "calls": [[2.0, 3.0], [4.0, 5.0]]},
        {"row": 2, "sample": 1, "create": 2.0, "calls": []},
        {"row": 2, "sample": 0, "create": 2.0, "calls": []},
    ]
    assert calls_of(journal, 2) == [[2, None], [None, None], [0, 1]]


def test_token_times_follow_from_how_many_ran() -> None:
    """A step takes 0.1 s and 0.05 s for each request: 10 tokens take 1.5 s alone, 2 s for two, 3 s for four."""
    turns = [Turn(False, 0.0, 1.5, 10)]
    turns += [Turn(False, 2.0, 4.0, 10)] * 2
    turns += [Turn(False, 5.0, 8.0, 10)] * 4
    assert token_times(turns) == pytest.approx((0.1, 0.05))
    # Two that overlap: each has 5 tokens alone and 5 beside the other, so that 1.57 ran on average.
    turns = [Turn(False, 0.0, 1.75, 10), Turn(False, 0.75, 2.5, 10), Turn(False, 3.0, 4.5, 10)]
    assert token_times(turns) == pytest.approx((0.10625, 0.04375))
    # Turns that take longer alone than beside others: the line would fall.
    assert token_times([Turn(False, 0.0, 2.0, 10), *[Turn(False, 3.0, 4.0, 10)] * 3]) == pytest.approx((0.125, 0.0))


def test_prefilling_is_what_first_turns_take_without_a_token() -> None:
    """A token takes 0.1 s. A batch of two groups of one waits 1.5 s for its first token: 0.75 s for each of the two."""
    journal = [{"row": row, "create": float(row // 2 * 100)} for row in range(4)]
    turns = [Turn(True, 0.0, 2.5, 10), Turn(True, 0.0, 3.5, 20), Turn(True, 100.0, 103.5, 20)]
    turns += [Turn(True, 100.0, 104.0, 25), Turn(False, 200.0, 201.0, 10)]
    assert prefilling_of(turns, journal, 2, 1) == pytest.approx(
        {"prefill_s": 0.75, "decode_s": 0.1, "decode_s_each": 0.0}
    )


def test_the_summary_compares_with_sync() -> None:
    keys = (
        "idle", "max_age", "training_s", "sync_s", "rest_s", "called", "calls_p50_s", "calls_p95_s", "rerolled",
        "masked_share", "prompts_lost", "rows", "violations",
    )  # fmt: skip
    rest: dict[str, Any] = dict.fromkeys(keys, 0)
    results = {
        "sync": {"seconds": 90.0, "seconds_second_half": 40.0, **rest},
        "separate_async": {"seconds": 30.0, "seconds_second_half": 10.0, **rest},
    }
    found = summary(results)
    assert found["speedup"] == 3.0
    assert found["colocated"] is None
    assert found["second_half"] == {"colocate_async": None, "separate_async": 4.0}
    assert found["seconds"] == {"sync": 90.0, "separate_async": 30.0}


def test_steps_end_when_their_metrics_are_written(tmp_path: Path) -> None:
    code = "import sys, time; file = open(sys.argv[1], 'w', buffering=1); print('{}', file=file); time.sleep(0.3)"
    code += "; print('{}', file=file); time.sleep(0.3)"
    began = time.time()
    ends = ends_of_steps(subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "m")]), tmp_path / "m")
    assert len(ends) == 2
    assert began < ends[0] <= ends[1]
    with pytest.raises(SystemExit, match="exit status 3"):
        ends_of_steps(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]), tmp_path / "none")
