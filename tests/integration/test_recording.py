"""Records of the real worker's conversations: every one that began leaves a line of its end, whatever ended it."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.proxy_clients import until

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
]


def make_worker(folder: Path, script: Any = None, custom: dict[str, Any] | None = None, **settings: Any) -> Any:
    from transformers import AutoTokenizer

    from benchmarks.training.oversample_world import Script, ScriptedWorker, write_tool_yaml

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    derived = {"tool_config_path": str(write_tool_yaml(folder))}
    ours = {"derived": derived, "record_dir": str(folder / "records"), **(custom or {})}
    return ScriptedWorker(script or Script(), tokenizer, folder, **{"n": 2, "custom": {"multiturn": ours}, **settings})


async def read(worker: Any, folder: Path) -> Any:
    """Return a reader of the records, once all of them are written."""
    from verl_multiturn.records.read.records import Records
    from verl_multiturn.records.schema import ConversationLine, Record, Snapshot

    await worker._recorder.aclose()
    found = Records(folder / "records")
    for line in (folder / "records").glob("*.lines.jsonl"):
        for text in line.read_text().splitlines():
            ConversationLine.model_validate_json(text)
    for record in found.records():
        Record.model_validate(record)
    for path in (folder / "records").glob("*.open.json"):
        Snapshot.model_validate_json(path.read_text())
    assert found.faults == []
    return found


def events(found: Any) -> Counter[tuple[str, str]]:
    return Counter((line["event"], line.get("why") or "") for line in found.lines())


async def test_a_group_leaves_records_and_lines(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    known = {"data_source": "shop", "reward_model": {"ground_truth": "7"}, "extra_info": {"split": "train"}}
    await worker.run_groups([4], global_steps=3, __rerolled_from__={"row4": "earlier", "row5": "x"}, **known)
    found = await read(worker, tmp_path)
    assert events(found) == {("begin", ""): 2, ("end", ""): 2}
    records = sorted(found.records(), key=lambda record: record["number"])
    assert {line["request_id"] for line in found.lines()} == {record["request_id"] for record in records}
    assert {line["rerolled_from"] for line in found.lines()} == {"earlier"}
    told = {"uid": "row4", "validation": False, "step": 3, "loop": "multiturn_agent", "rerolled_from": "earlier"}
    for number, record in enumerate(records):
        assert {key: record[key] for key in told} == told
        assert record["number"] == number
        assert record["sample"]["messages"] == [{"role": "user", "content": "Use the tool."}]
        assert (record["sample"]["data_source"], record["sample"]["ground_truth"]) == ("shop", "7")
        assert (record["sample"]["index"], record["sample"]["tools"]) == (4, ["wait"])
        assert record["sampling"]["stop_token_ids"]
        kinds = [span["kind"] for span in record["timeline"]]
        assert kinds == ["create", "generation", "call", "generation", "release", "reward", "store"]
        assert [span["turn"] for span in record["timeline"]] == [None, 0, 0, 1, 1, 1, 1]
        assert all(span["start"] <= span["end"] for span in record["timeline"])
        assert record["began"] <= record["ended"]
    assert "__rerolled_from__" not in worker.rows["row4_0_0"]


async def test_a_validation_is_told_by_the_batch(tmp_path: Path) -> None:
    worker = make_worker(tmp_path)
    await worker.run_groups([0], validate=True)
    found = await read(worker, tmp_path)
    assert [record["validation"] for record in found.records()] == [True]
    assert {line["validation"] for line in found.lines()} == {True}


async def test_what_was_cut_cancelled_or_raised_has_a_line_and_is_none_of_the_records(tmp_path: Path) -> None:
    from benchmarks.training.oversample_world import Sample, Script
    from verl_multiturn.errors import ToolContractError
    from verl_multiturn.records.verify.record import verify_record

    class Hanging(Script):
        async def use_tool(self, sample: Sample, call: int) -> None:
            if sample[0] == 2:
                raise ToolContractError("a tool broke its contract")
            if sample[0] == 1 or sample[1] == 2:
                await asyncio.sleep(50.0)

    script = Hanging()
    worker = make_worker(tmp_path, script, over_sample_rate=0.3)
    await worker.run_groups([0])
    groups = asyncio.ensure_future(worker.run_groups([1]))
    await until(
        lambda: (
            sum(count for (each, method), count in script.methods.items() if each[0] == 1 and method == "execute") == 3
        )
    )
    open_ = [(shown["uid"], shown["doing"], shown["turn"]) for shown in map(_shown, worker._recorder._open)]
    assert open_ == [("row1", "call wait", 1)] * 3
    await worker.cancel(["row1"])
    with pytest.raises(asyncio.CancelledError):
        await groups
    await worker.run_groups([2])
    found = await read(worker, tmp_path)
    assert events(found) == {
        ("begin", ""): 9,
        ("end", ""): 2,
        ("cancel", "cut"): 1,
        ("cancel", "cancelled"): 3,
        ("raise", "ToolContractError: a tool broke its contract"): 3,
    }
    assert len(list(found.records())) == 2
    cancelled = [line for line in found.lines() if line["event"] == "cancel"]
    assert [line["offset"] is None for line in cancelled] == [False] * 4
    for line in cancelled:
        record = found.record(line["request_id"])
        assert verify_record(record).violations == []
        told = ("cancelled", "", False, 0.0, [], [], "multiturn_agent")
        names = ("status", "stop_reason", "valid", "score", "rows", "generations", "loop")
        assert tuple(record[name] for name in names) == told
        assert record["sample"]["tools"] == ["wait"]
        assert [call["status"] for call in record["calls"]] == []  # it was in its first one
        roles = ["user", "assistant"]
        assert [message["role"] for message in record["messages"]] == roles
        assert [span["kind"] for span in record["timeline"]][:2] == ["create", "generation"]


def _shown(life: Any) -> Any:
    from verl_multiturn.records.write.recorder import _shown

    return _shown(life)


async def test_a_loop_within_our_worker_begins_no_second_life() -> None:
    from verl_multiturn.rollout.life import current
    from verl_multiturn.verl_bridge.loops.life import follow

    class Heard:
        def __init__(self) -> None:
            self.events: list[str] = []

        def begun(self, life: Any) -> None:
            self.events.append(f"begun {life.id}")

        def over(self, life: Any) -> None:
            self.events.append(f"over {life.id} {life.status}")

    worker, loop = Heard(), Heard()
    with follow({"uid": "u", "session_id": 2, "global_steps": 3}, worker, None, name="a") as life:
        with follow({"uid": "other"}, loop, name="b") as found:
            assert found is life is current()
        assert worker.events == ["begun a"]
    assert (worker.events, loop.events) == (["begun a", "over a finished"], [])
    assert (life.group, life.number, life.step, current()) == ("u", 2, 3, None)
    with follow({"uid": "u"}) as unheard:
        assert current() is unheard
        assert unheard.timeline is None


async def test_a_session_of_an_agent(tmp_path: Path) -> None:
    custom = {"proxy": {"agent": "tests.endpoint_agents:chat"}, "request_timeout_s": 60, "derived": {}}
    worker = make_worker(tmp_path, custom=custom, n=1)
    await worker.run_groups([0], agent_name="proxy_agent", extra_info={})
    found = await read(worker, tmp_path)
    (record,) = found.records()
    assert (record["loop"], record["session"]["end"], record["session"]["reward"]) == ("proxy_agent", "returned", 1.0)
    assert events(found) == {("begin", ""): 1, ("end", ""): 1, ("score", ""): 1}
    assert [line["score"] for line in found.lines() if line["event"] == "score"] == [1.75]
    assert [span["kind"] for span in record["timeline"]].count("generation") == 2


async def test_a_record_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    """Nothing changes the data of a record: neither verl's worker, nor rewards, nor the storing of the rows."""
    from verl_multiturn.records.json_text import line_of
    from verl_multiturn.records.write.encode import record_of

    made = []

    class Twice:
        dropped = 0

        def keep(self, make: Any, line: Any, kept: Any) -> None:
            made.append((early[line["request_id"]], line_of({**make(), "timeline": [], "ended": 0.0})))

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: None

    early: dict[str, bytes] = {}
    worker = make_worker(tmp_path)
    worker._recorder.writer = Twice()
    postprocess = worker._agent_loop_postprocess

    async def look(*args: Any, **kwargs: Any) -> None:
        from verl_multiturn.rollout.life import current

        life = current()
        early[life.id] = line_of({**record_of(life), "timeline": [], "ended": 0.0})
        await postprocess(*args, **kwargs)

    worker._agent_loop_postprocess = look
    info = {"index": 0, "deep": {"list": [1, {"a": 2}]}}
    await worker.run_groups([0, 1], extra_info=info, reward_model={"ground_truth": ["x"]})
    assert len(made) == 4
    assert all(before == after for before, after in made)
    assert json.loads(made[0][0])["sample"]["extra_info"] == info


async def test_a_worker_that_finds_the_disk_full_rolls_out_without_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file in the place of the folder")
    worker = make_worker(tmp_path, custom={"record_dir": str(tmp_path / "taken" / "records")})
    assert worker._recorder is None
    assert "this process keeps no records: " in caplog.text
