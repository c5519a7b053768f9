import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from tests.support.sample_records import BEGAN, sample_record, sample_run, sample_run_file, sample_session
from verl_multiturn.cli.main import app
from verl_multiturn.observe.convert.atif import file_name, trajectory, write_atif
from verl_multiturn.observe.convert.otel import write_otel
from verl_multiturn.observe.convert.parquet import COLUMNS, write_parquet
from verl_multiturn.observe.convert.perfetto import write_perfetto
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.spans import calls_of, spans_of

HOSTILE = "\x00\u202e</script><img onerror=alert(1)>\ud83d"
CLEAN = HOSTILE.replace("\ud83d", "\ufffd")


class Held:
    """Records that a test holds in memory."""

    def __init__(self, *records: dict[str, Any], lines: Any = (), clocks: Any = (), steps: Any = ()) -> None:
        self._records, self._lines, self._clocks, self._steps = records, lines, clocks, steps
        self.runs = [sample_run_file()]
        self.evaluations: set[str] = set()

    def records(self) -> Any:
        return iter(self._records)

    def lines(self) -> Any:
        return iter(self._lines)

    def steps(self) -> Any:
        return list(self._steps)

    def clocks(self) -> Any:
        return list(self._clocks)

    def joins(self, columns: Any) -> Any:
        return []

    def sessions(self) -> dict[str, Any]:
        return {}


def test_a_conversation_is_a_row_of_scouts_table(tmp_path: Path) -> None:
    assert write_parquet(RunSource(Held(sample_record())), tmp_path / "db") == 1
    table = pq.read_table(tmp_path / "db" / "transcripts.parquet")
    assert table.schema.equals(COLUMNS)
    (row,) = table.to_pylist()
    messages = json.loads(row.pop("messages"))
    assert messages[1]["tool_calls"] == [
        {"id": "call_0_0", "function": "calculator", "arguments": {"expression": "547 + 292"}, "type": "function"}
    ]
    assert messages[2] == {"role": "tool", "content": "839", "tool_call_id": "call_0_0", "function": "calculator"}
    assert {name: row[name] for name in ("transcript_id", "task_set", "task_id", "task_repeat", "message_count")} == {
        "transcript_id": "r-0",
        "task_set": "sums",
        "task_id": "7",
        "task_repeat": 0,
        "message_count": 4,
    }
    assert (row["total_time"], row["limit"], row["error"], row["score"]) == (3.0, None, None, None)
    assert row["prompt_lengths"] == [6]
    assert row["ids"] == [[1, 11, 12, 13, 14, 15, 21, 22, 23, 2, 31, 32, 33, 41, 42, 2]]
    assert row["mask"] == [[0] * 6 + [1] * 4 + [0] * 3 + [1] * 3]
    assert row["versions"] == [[-1] * 6 + [3] * 4 + [-1] * 3 + [4] * 3]
    assert [round(each, 4) for each in row["logprobs"][0][6:10]] == [-0.1, -0.25, -1.5, -0.001]


def test_a_session_has_a_list_for_each_row(tmp_path: Path) -> None:
    write_parquet(RunSource(Held(sample_session())), tmp_path)
    (row,) = pq.read_table(tmp_path / "transcripts.parquet").to_pylist()
    assert row["ids"] == [[1, 11, 12, 21, 2], [1, 51, 52, 53, 61, 2]]
    assert row["prompt_lengths"] == [3, 4]


def test_a_conversation_in_atif() -> None:
    line = {"event": "score", "request_id": "r-0", "score": 1.0}
    found = trajectory(sample_record(), RunSource(Held(sample_record(), lines=[line])))
    steps = found["steps"]
    assert [(step["step_id"], step["source"], step["message"]) for step in steps] == [
        (1, "user", "547 + 292 ="),
        (2, "agent", ""),
        (3, "agent", "Answer: 839"),
    ]
    assert steps[1]["tool_calls"][0]["arguments"] == {"expression": "547 + 292"}
    assert steps[1]["observation"] == {"results": [{"content": "839", "source_call_id": "call_0_0"}]}
    assert steps[1]["metrics"]["completion_token_ids"] == [21, 22, 23, 2]
    assert steps[2]["metrics"]["logprobs"] == [-0.5, -0.75, 0.0]
    assert steps[2]["metrics"]["extra"]["verl_multiturn"] == {"versions": [4, 4, 4], "mask": [1, 1, 1], "turn": 1}
    ours = found["extra"]["verl_multiturn"]
    assert (ours["score"], ours["uid"], ours["rows"][0]["prompt_length"]) == (1.0, "group-0", 6)
    assert (found["schema_version"], found["session_id"], found["trajectory_id"]) == ("ATIF-v1.7", "group-0", "r-0")


def test_a_message_that_no_generation_explains_has_no_tokens() -> None:
    record = sample_record()
    record["generations"].pop()
    assert ["metrics" in step for step in trajectory(record, RunSource(Held(record)))["steps"]] == [False] * 3


def test_an_answer_that_the_model_read_in_part_is_there_as_a_whole() -> None:
    record = sample_record()
    record["calls"][0] |= {"truncated": True, "text": "839 and more"}
    (result,) = trajectory(record, RunSource(Held(record)))["steps"][1]["observation"]["results"]
    assert (result["content"], result["extra"]) == ("839", {"verl_multiturn": {"whole": "839 and more"}})


@pytest.mark.parametrize(
    "request_id", ["../x", "", ".", "..", ".hidden", "a/b", "a\\b", "x" * 300, "a\x00b", "\u202e", "\ud83d"]
)
def test_a_request_id_names_no_file_elsewhere(request_id: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", file_name(request_id))


def test_a_request_id_that_is_a_name_names_its_file() -> None:
    assert file_name("a-1_b.c") == "a-1_b.c"


def read_traces(path: Path) -> list[Any]:
    """Return the traces of a file, read by opentelemetry-proto."""
    found = []
    for line in path.read_bytes().splitlines():
        raw = json.loads(line)
        for span in raw["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            for key in {"traceId", "spanId", "parentSpanId"} & span.keys():
                span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
        found.append(json_format.ParseDict(raw, ExportTraceServiceRequest()).resource_spans[0])
    return found


def test_a_conversation_is_a_trace(tmp_path: Path) -> None:
    assert write_otel(RunSource(Held(sample_record())), tmp_path / "traces.jsonl") == 1
    (trace,) = read_traces(tmp_path / "traces.jsonl")
    assert trace.schema_url == "https://opentelemetry.io/schemas/1.41.0"
    root, first, call, last = trace.scope_spans[0].spans
    assert [span.name for span in (root, first, call, last)] == [
        "invoke_agent multi_turn_agent",
        "chat Qwen/Qwen3-4B",
        "execute_tool calculator",
        "chat Qwen/Qwen3-4B",
    ]
    assert root.start_time_unix_nano == round(BEGAN * 1e9)
    assert call.end_time_unix_nano - call.start_time_unix_nano == 500_000_000
    assert {span.parent_span_id for span in (first, call, last)} == {root.span_id}
    named = {each.key: each.value for each in call.attributes}
    assert named["gen_ai.tool.call.id"].string_value == "call_0_0"
    assert json.loads(named["gen_ai.tool.call.arguments"].string_value) == {"expression": "547 + 292"}
    assert {each.key: each.value for each in last.attributes}["gen_ai.usage.output_tokens"].int_value == 3


def test_a_workers_clock_is_set_right(tmp_path: Path) -> None:
    lines = [{"event": "begin", "request_id": "r-0", "file": "worker"}]
    source = RunSource(Held(sample_record(), lines=lines, clocks=[{"file": "worker", "offset_s": 3.0}]))
    write_otel(source, tmp_path / "traces.jsonl")
    (trace,) = read_traces(tmp_path / "traces.jsonl")
    assert trace.scope_spans[0].spans[0].start_time_unix_nano == round((BEGAN + 3.0) * 1e9)


def test_parallel_calls_stand_in_lanes(tmp_path: Path) -> None:
    record = sample_record()
    record["timeline"].append({"kind": "call", "name": "b", "turn": 0, "start": BEGAN + 1.2, "end": BEGAN + 1.6})
    write_perfetto(RunSource(Held(record)), tmp_path / "trace.json")
    events = [
        event for event in json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"] if event["ph"] == "b"
    ]
    assert [(event["name"], event["id"][-2:], event["ts"]) for event in events] == [
        ("conversation 0", "/0", 0.0),
        ("generation", "/1", 0.0),
        ("call calculator", "/1", 1e6),
        ("call b", "/2", 1.2e6),
        ("generation", "/1", 1.5e6),
    ]


def test_a_call_belongs_to_the_span_that_ends_when_it_was_answered() -> None:
    record = sample_record()
    late = {**record["calls"][0], "id": "late", "at": BEGAN + 2.0}
    record["calls"].append(late)
    record["timeline"].append({"kind": "call", "name": "calculator", "turn": 0, "start": BEGAN + 1, "end": BEGAN + 2})
    found = calls_of(record, spans_of(record))
    assert [call and call["id"] for call in found] == [None, "call_0_0", "late", None]


def test_without_a_timeline_spans_are_made_of_the_times() -> None:
    record = sample_record(timeline=[])
    record["calls"][0]["queue_s"] = 0.25
    assert [(span["kind"], span["start"] - BEGAN, span["end"] - BEGAN) for span in spans_of(record)] == [
        ("generation", 0.0, 1.0),
        ("generation", 0.0, 1.0),
        ("wait", 0.75, 1.0),
        ("call", 1.0, 1.5),
    ]


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    record = sample_record(request_id=HOSTILE, uid=HOSTILE, error=HOSTILE, score=math.nan, loop=HOSTILE)
    record["messages"][0]["content"] = record["messages"][2]["content"] = HOSTILE * 1000
    record["messages"][1]["tool_calls"][0]["function"]["arguments"] = {HOSTILE: math.inf}
    record["calls"][0] |= {"text": HOSTILE, "tool": HOSTILE, "metrics": {HOSTILE: math.nan}}
    record["timeline"][1]["name"] = HOSTILE
    record["sample"] |= {"data_source": HOSTILE, "index": HOSTILE}
    source = RunSource(Held(record))
    write_parquet(source, tmp_path / "db")
    write_atif(source, tmp_path / "atif")
    write_otel(source, tmp_path / "traces.jsonl")
    write_perfetto(source, tmp_path / "trace.json")
    (row,) = pq.read_table(tmp_path / "db" / "transcripts.parquet").to_pylist()
    assert (row["transcript_id"], row["task_set"], row["error"]) == (CLEAN, CLEAN, CLEAN)
    (path,) = (tmp_path / "atif").iterdir()
    assert json.loads(path.read_bytes())["trajectory_id"] == CLEAN
    (trace,) = read_traces(tmp_path / "traces.jsonl")
    assert trace.scope_spans[0].spans[2].name == f"execute_tool {CLEAN}"
    assert json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    for file in tmp_path.rglob("*.json*"):
        assert "NaN" not in file.read_text(encoding="utf-8")


def test_a_run_is_converted_at_the_command_line(tmp_path: Path) -> None:
    sample_run(tmp_path / "records")
    shown = CliRunner().invoke(app, ["convert", str(tmp_path), "--parquet", "--atif", "--otel", "--perfetto"])
    assert shown.exit_code == 0
    out = tmp_path / "converted"
    assert json.loads(shown.stdout.splitlines()[-1]) == {
        "conversations": 18,
        "faults": 0,
        "parquet": str(out / "transcripts"),
        "atif": str(out / "atif"),
        "otel": str(out / "traces.jsonl"),
        "perfetto": str(out / "perfetto.json"),
    }
    (first, *_) = pq.read_table(out / "transcripts").to_pylist()
    assert (first["score"], first["success"], first["trained_step"], first["trained_tokens"]) == ("1.0", True, 1, 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "nothing to write"), (["--otel", "--out", "/proc/none"], "cannot write there")],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    sample_run(tmp_path / "records")
    shown = CliRunner().invoke(app, ["convert", str(tmp_path), *arguments])
    assert (shown.exit_code, said in shown.stderr) == (2, True)


def test_the_folder_of_records_is_converted_into_that_of_the_run(tmp_path: Path) -> None:
    sample_run(tmp_path / "records")
    with next((tmp_path / "records").glob("*.lines.jsonl")).open("a") as file:
        file.write("{\n" * 30)
    shown = CliRunner().invoke(app, ["convert", str(tmp_path / "records"), "--otel"])
    assert shown.exit_code == 0
    said = json.loads(shown.stdout.splitlines()[-1])
    assert (said["otel"], said["faults"]) == (str(tmp_path / "converted" / "traces.jsonl"), 30)
    assert len(shown.stderr.splitlines()) == 21
    assert shown.stderr.splitlines()[0].startswith(f"not read: {tmp_path / 'records'}/")
    assert shown.stderr.splitlines()[-1] == "not read: 10 more of these"
