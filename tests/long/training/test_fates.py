"""Each conversation has one fate: how they are counted and compared with a run's metrics, and in real runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.long.training import fates
from tests.long.training.fates_count import compare
from tests.long.training.mistaken_calculator import MistakenCalculator, drawn
from tests.support.sample_records import START, sample_record
from verl_multiturn.records.read.joins import JoinedRow, table_of
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.step_writer import StepWriter


class Folder:
    """The folder of a run, written as workers and trainer write it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        (out / "records").mkdir(parents=True)
        self.worker = RecordWriter(out / "records", START)
        self.trainer = StepWriter(out / "records", START)
        run = {"schema": 2, "start": START, "began": 1.0, "host": "h", "versions": {}, "settings": {}}
        self.trainer.run(lambda: run)
        self.logged: list[str] = []

    def conversation(self, request_id: str, uid: str, number: int = 0, ends: bool = True) -> dict[str, Any]:
        record = sample_record(request_id=request_id, uid=uid, number=number)
        line = {name: record[name] for name in ("request_id", "uid", "number", "validation", "step")}
        self.worker.begin(line)
        if ends:
            self.worker.keep(lambda: record, line)
        return line

    def step(self, step: int, trained: list[tuple[str, str]], metrics: dict[str, float], **groups: Any) -> None:
        rows = [JoinedRow(request_id, uid, 0, 0, False, step, score=1.0, trained=3) for request_id, uid in trained]
        self.trainer.join(False, step, lambda: table_of(rows))
        metrics = {"rollout/trajectories": len(trained), "training/global_step": step, **metrics}
        line = {"event": "step", "step": step, "began": 1.0, "ended": 2.0, "phases": {}, "metrics": metrics}
        self.trainer.line({**line, **groups})
        self.logged.append(json.dumps({"step": step, "data": metrics}) + "\n")

    def close(self) -> Path:
        self.worker.close()
        self.trainer.other({"event": "end", "start": START, "at": 9.0})
        self.trainer.close()
        (self.out / "metrics.jsonl").write_text("".join(self.logged))
        return self.out


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Make a run in which each fate came about once, and whose metrics agree."""
    made = Folder(tmp_path / "run")
    made.conversation("t1", "a")
    made.conversation("t2", "b")
    made.conversation("e", "old")
    made.conversation("f", "bad")
    made.worker.raised({**made.conversation("r", "bad", 1, ends=False), "why": "ToolContractError: x"})
    made.worker.cancel({**made.conversation("late", "slow", ends=False), "why": "cancelled"})
    made.worker.cancel({**made.conversation("cut", "a", 1, ends=False), "why": "cut"})
    made.conversation("lost", "open", ends=False)
    made.step(1, [("t1", "a")], {"rollout/async/cut_samples": 1})
    counts = {"rollout/async/evicted": 1, "training/rollout_failure/evicted_samples": 1, "rollout/async/rerolled": 1}
    made.step(
        2, [("t2", "b")], {**counts, "rollout/raised": 1}, evicted=["old"], failed=["bad"], rerolled={"slow": "new"}
    )
    return made


FATES = {"trained": 2, "evicted": 1, "failed": 1, "rerolled": 1, "cut": 1, "raised": 1, "lost": 1}


def test_a_run_in_which_all_is_well(folder: Folder) -> None:
    assert compare(folder.close()) == {"begun": 8, "fates": FATES, "wrong": []}


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("rollout/async/evicted", "steps.jsonl has 1 evicted groups, rollout/async/evicted counts 2"),
        ("rollout/async/rerolled", "steps.jsonl has 1 rerolled groups, rollout/async/rerolled counts 2"),
        (
            "training/rollout_failure/evicted_samples",
            "steps.jsonl has 1 failed groups, training/rollout_failure/evicted_samples counts 2",
        ),
        (
            "rollout/raised",
            "1 conversations are raised, 1 of them before the last step's end; the metrics say 2",
        ),
        (
            "rollout/async/cut_samples",
            "1 conversations are cut, 0 of them before the last step's end; the metrics say 2",
        ),
    ],
)
def test_a_metric_that_says_otherwise(folder: Folder, metric: str, said: str) -> None:
    folder.step(3, [], {metric: 1})
    assert compare(folder.close())["wrong"] == [said]


def test_what_a_dead_worker_has_cut_is_not_compared(folder: Folder) -> None:
    folder.step(3, [], {"rollout/async/cut_samples": 5})
    assert compare(folder.close(), cuts_known=False)["wrong"] == []


def test_a_conversation_with_a_fate_that_did_not_begin(folder: Folder) -> None:
    folder.step(3, [("strange", "x")], {})
    assert compare(folder.close())["wrong"] == ["strange has a fate and did not begin"]


def test_a_conversation_that_began_twice(folder: Folder) -> None:
    folder.conversation("t1", "a")
    (wrong,) = compare(folder.close())["wrong"]
    assert "that of request 't1' first: it has them twice" in wrong


def test_a_group_that_was_thrown_away_and_trained(folder: Folder) -> None:
    folder.step(3, [("e", "old")], {})
    assert compare(folder.close())["wrong"] == ["e of a group that is evicted is trained"]


def test_a_join_that_is_not_there(folder: Folder) -> None:
    out = folder.close()
    next((out / "records" / "join").glob("step-000002-*")).unlink()
    wrong = compare(out)["wrong"]
    assert "step 2: 0 conversations are joined, rollout/trajectories is 1" in wrong


def test_the_figures_of_a_world_and_of_all(folder: Folder) -> None:
    world = fates.World("sync", ("trained", "cut", "filtered"))
    found = fates.judge(world, folder.close(), 7)
    assert found == {"begun": 8, "fates": FATES, "wrong": 0, "missing": ["filtered"], "seconds": 7}
    whole = fates.summary({"one": found, "two": {**found, "missing": [], "wrong": 2}})
    assert (whole["begun"], whole["wrong"], whole["missing"]) == (16, 2, {"one": ["filtered"]})
    assert whole["fates"]["trained"] == 4


def test_the_worlds_cover_the_modes_and_what_can_happen() -> None:
    assert {world.mode for world in fates.WORLDS.values()} == {"sync", "colocate_async", "separate_async"}
    brought = {fate for world in fates.WORLDS.values() for fate in world.brings}
    assert brought == {"trained", "raised", "cut", "lost", "rerolled", "evicted", "failed"}
    assert {fates.WORLDS[name].mode for name in fates.SHORT} == {"sync", "colocate_async", "separate_async"}
    words = fates.WORLDS["colocate_drop"].words(Path("tools.yaml"))
    assert "actor_rollout_ref.rollout.over_sample_rate=0.25" in words
    assert "++actor_rollout_ref.rollout.custom.multiturn.staleness_strategy=drop" in words


def test_the_tool_makes_its_mistake_in_some_conversations() -> None:
    schema = json.loads(
        json.dumps({"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}})
    )
    from verl_multiturn.tools.schema import ToolSchema

    tool = MistakenCalculator({"mistakes": 0.5, "median_s": 0.0}, ToolSchema.read(schema, "schema"))
    answers = [asyncio.run(tool.execute(str(i), {"expression": "1+1"})) for i in range(40)]
    wrong = [i for i, answer in enumerate(answers) if answer == 5]
    assert wrong == [i for i in range(40) if drawn(str(i), "mistake") < 0.5]
    assert 0 < len(wrong) < 40


@pytest.mark.long
@pytest.mark.stack
@pytest.mark.engine
@pytest.mark.timeout(7200)
def test_each_conversation_of_real_runs_has_one_fate(tmp_path: Path) -> None:
    """Which fates a world brings about depends on how fast the machine is."""
    found = fates.run_all(list(fates.WORLDS), 6, 0, tmp_path)
    assert found["begun"] > 0
    assert found["wrong"] == 0
