"""Do other programs read what `verl-multiturn convert` writes, and read the same numbers?

A synthetic run with texts that attack readers, or a real one (`--run`), is converted into every form.

- DuckDB, pandas and jq add the tokens up; so does this program, from the records themselves.
- Scout's `scout db validate` and its reader take the table, Harbor's own model takes every trajectory.
- opentelemetry-proto reads the traces. The spans of a trace, and of the Perfetto file, add up to the seconds of the
  conversation's timeline, and the parts of its critical path to its seconds.

Packages that are not of this project run in environments of their own: name their Python (`--duckdb`, `--scout`,
`--harbor`), or let `--make FOLDER` make them. A missing one is `not run`, and never ok.

Last line: one JSON object.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.long.observe.synthetic_records import BEGAN, Size, write_records
from tests.long.observe.synthetic_runs import Run
from tests.support.sample_records import sample_record, sample_session
from verl_multiturn.observe.convert.atif import write_atif
from verl_multiturn.observe.convert.otel import write_otel
from verl_multiturn.observe.convert.parquet import TOKENS, write_parquet
from verl_multiturn.observe.convert.perfetto import write_perfetto
from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.explain.lateness import critical_path
from verl_multiturn.observe.spans import spans_of
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.rows import columns

NOT_RUN = "not run"
WITHIN_S = 1e-3
PACKAGES = {"duckdb": ["duckdb", "pandas", "pyarrow"], "scout": ["inspect_scout"], "harbor": ["harbor"]}
HOSTILE = (
    "\x00",
    "\u202e",
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "\ud83d",
    "\x1b[2J",
)

DUCKDB = """
import duckdb, json, sys
row = duckdb.sql(f'''select {", ".join(f"sum(list_sum(flatten({name})))" for name in sys.argv[2:])},
    sum(len(flatten(ids))), count(*) from read_parquet('{sys.argv[1]}')''').fetchall()[0]
print(json.dumps(dict(zip([*sys.argv[2:], "tokens", "conversations"], row))))
"""
PANDAS = """
import json, sys
import pandas as pd
table = pd.read_parquet(sys.argv[1])
def total(name):
    return sum(float(row.sum(dtype="float64")) for rows in table[name] for row in rows)
found = {name: total(name) for name in sys.argv[2:]}
found |= {"tokens": sum(len(row) for rows in table["ids"] for row in rows), "conversations": len(table)}
print(json.dumps(found))
"""
SCOUT = """
import asyncio, json, sys
from inspect_scout import transcripts_from
from inspect_scout._transcript.types import TranscriptContent
async def main():
    count = messages = 0
    async with transcripts_from(sys.argv[1]).reader() as reader:
        async for info in reader.index():
            found = await reader.read(info, TranscriptContent(messages="all"))
            count, messages = count + 1, messages + len(found.messages)
    print(json.dumps({"read": count, "messages": messages}))
asyncio.run(main())
"""
HARBOR = """
import json, pathlib, sys
from harbor.models.trajectories import Trajectory
accepted, problems = 0, []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    try:
        Trajectory.model_validate_json(path.read_bytes())
        accepted += 1
    except Exception as error:
        problems.append(f"{path.name}: {error}"[:300])
print(json.dumps({"accepted": accepted, "refused": len(problems), "problems": problems[:3]}))
"""


def run(folder: str | None, pythons: Mapping[str, str | None]) -> dict[str, Any]:
    """Convert, run all programs, and return their results.

    Args:
        folder: Folder of a real run; None makes a synthetic one.
        pythons: By name of `PACKAGES`, the Python that has them; None: not installed.
    """
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            _write(Path(made) / "run")
        return _examined(Path(folder or Path(made) / "run"), Path(made) / "out", pythons)


def _write(folder: Path) -> None:
    Run(Size(), 0).write(folder)
    records = [sample_session(request_id="session", uid="a")]
    for number, text in enumerate(HOSTILE):
        record = sample_record(request_id=f"hostile-{number}{text}", uid=text, stop_reason="finished")
        record["messages"][2]["content"] = record["calls"][0]["text"] = text
        record["calls"][0] |= {"tool": text, "name": text, "arguments": {text: text}, "metrics": {text: math.nan}}
        record["timeline"][1]["name"] = text
        record["sample"] |= {"data_source": text, "index": text, "ground_truth": [text]}
        records.append(record)
    large = sample_record(request_id="../../large", uid="large")
    large["messages"][2]["content"] = large["calls"][0]["text"] = "\u202ea<b>" * 1_000_000
    parallel = sample_record(request_id="parallel", uid="parallel")
    parallel["timeline"] += [
        {"kind": "call", "name": "calculator", "turn": 0, "start": BEGAN + 1.2, "end": BEGAN + 1.4 + 0.1 * each}
        for each in range(3)
    ]
    write_records(folder, "20261126T101500_000001", [*records, large, parallel])


def _examined(folder: Path, out: Path, pythons: Mapping[str, str | None]) -> dict[str, Any]:
    records = Records(folder)
    source = RunSource(records)
    count = write_parquet(source, out / "transcripts")
    write_atif(source, out / "atif")
    write_otel(source, out / "traces.jsonl")
    write_perfetto(source, out / "perfetto.json")
    ours = _ours(records)
    names = list(TOKENS)
    table = str(out / "transcripts" / "transcripts.parquet")
    result: dict[str, Any] = {"conversations": count, "ours": ours}
    for name, program in (("duckdb", DUCKDB), ("pandas", PANDAS)):
        found = _asked(pythons["duckdb"], program, table, *names)
        result[name] = found if isinstance(found, str) else _same(found, ours)
    result["jq"] = _same(_jq(out / "atif"), ours) if shutil.which("jq") else NOT_RUN
    result["scout"] = _scout(pythons["scout"], out / "transcripts", count)
    harbor = _asked(pythons["harbor"], HARBOR, str(out / "atif"))
    result["harbor"] = harbor if isinstance(harbor, str) else ("ok" if harbor["accepted"] == count else harbor)
    seconds = {record["request_id"]: _seconds(record) for record in records.records()}
    result["otel"] = _otel(out / "traces.jsonl", seconds)
    result["perfetto"] = _perfetto(out / "perfetto.json", seconds)
    result["critical_path_error_s"] = _path_error(records)
    asked = [result[name] for name in ("duckdb", "pandas", "jq", "scout", "harbor", "otel", "perfetto")]
    result["not_run"] = sum(each == NOT_RUN for each in asked)
    result["ok"] = all(each in ("ok", NOT_RUN) for each in asked) and result["critical_path_error_s"] <= WITHIN_S
    return result


def _ours(records: Records) -> dict[str, float]:
    """Return the sums of all token columns, from the records themselves."""
    sums: dict[str, float] = defaultdict(float)
    for record in records.records():
        sums["conversations"] += 1
        for row in record["rows"]:
            full = columns(row)
            sums["tokens"] += len(full["ids"])
            for name, column in TOKENS.items():
                sums[name] += math.fsum(each for each in full[column] if math.isfinite(each))
    return dict(sums)


def _same(found: dict[str, float], ours: dict[str, float]) -> str | dict[str, Any]:
    """Return `ok`, or the differences: integers in nothing, sums of float32 by their rounding."""
    wrong = {
        name: [found.get(name), value]
        for name, value in ours.items()
        if not math.isclose(float(found.get(name, math.nan)), value, rel_tol=1e-6 if name == "logprobs" else 0.0)
    }
    return wrong or "ok"


def _asked(python: str | None, program: str, *arguments: str) -> Any:
    """Return a program's JSON output; the end of its errors where it fails."""
    if python is None:
        return NOT_RUN
    done = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-1000:] or "failed"


def _jq(folder: Path) -> dict[str, float]:
    """Return the sums that jq makes of the trajectories."""
    rows = ".extra.verl_multiturn.rows[]"
    sums = [f'"{name}": ([{rows}.{column}[]] | add // 0)' for name, column in TOKENS.items()]
    program = f'{{{", ".join(sums)}, "tokens": ([{rows}.ids[]] | length), "conversations": 1}}'
    add = "reduce inputs as $each ({}; reduce ($each | to_entries[]) as $one (.; .[$one.key] += $one.value))"
    paths = sorted(folder.glob("*.json"))
    each = "".join(
        subprocess.run(
            ["jq", "-c", program, *paths[begin : begin + 500]], capture_output=True, text=True, check=True
        ).stdout
        for begin in range(0, len(paths), 500)
    )
    total = subprocess.run(["jq", "-nc", add], input=each, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(total.stdout)
    return found


def _scout(python: str | None, folder: Path, count: int) -> Any:
    if python is None:
        return NOT_RUN
    command = [str(Path(python).parent / "scout"), "db", "validate", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or "error" in done.stdout.lower():
        return (done.stdout + done.stderr)[-1000:]
    found = _asked(python, SCOUT, str(folder))
    return "ok" if isinstance(found, dict) and found["read"] == count else found


def _seconds(record: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a conversation's spans by kind, and of the whole."""
    sums: dict[str, float] = defaultdict(float)
    spans = spans_of(record)
    for span in spans:
        sums[span["kind"]] += span["end"] - span["start"]
    sums["whole"] = max([record["ended"], *(span["end"] for span in spans)]) - record["began"]
    return dict(sums)


def _otel(path: Path, seconds: dict[str, dict[str, float]]) -> str | dict[str, Any]:
    """Return `ok` if opentelemetry-proto reads all traces, and their spans add up."""
    worst, spans, read = 0.0, 0, 0
    for line in path.read_bytes().splitlines():
        raw = json.loads(line)
        found = raw["resourceSpans"][0]["scopeSpans"][0]["spans"]
        for span in found:  # Protobuf's JSON has bytes as base64, OTLP's as hexadecimal digits
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in span:
                    span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
        message = json_format.ParseDict(raw, ExportTraceServiceRequest())
        ExportTraceServiceRequest.FromString(message.SerializeToString())
        own = message.resource_spans[0].scope_spans[0].spans
        root, *below = own
        named = {each.key: each.value for each in root.attributes}
        sums: dict[str, float] = defaultdict(float)
        for span in below:
            if len(span.trace_id) != 16 or span.parent_span_id != root.span_id or span.trace_id != root.trace_id:
                return {"wrong ids": named["gen_ai.conversation.id"].string_value}
            kind = next(each.value.string_value for each in span.attributes if each.key == "verl_multiturn.kind")
            sums[kind] += (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        sums["whole"] = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
        worst = max(worst, _difference(sums, seconds[named["gen_ai.conversation.id"].string_value]))
        spans, read = spans + len(own), read + 1
    well = read == len(seconds) and worst <= WITHIN_S
    return "ok" if well else {"read": read, "of": len(seconds), "spans": spans, "error_s": worst}


def _perfetto(path: Path, seconds: dict[str, dict[str, float]]) -> str | dict[str, Any]:
    """Return `ok` if each event that begins ends, none overlaps in its lane, and they add up."""
    open_since: dict[tuple[Any, ...], float] = {}
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    threads: dict[tuple[int, int], str] = {}
    for event in json.loads(path.read_bytes())["traceEvents"]:
        where = (event["pid"], event.get("tid", 0))
        lane = (event["pid"], event.get("cat"), event.get("id"))
        if event["ph"] == "M" and event["name"] == "thread_name":
            threads[where] = event["args"]["name"]
        elif event["ph"] == "b":
            if lane in open_since:
                return {"overlaps": event}
            open_since[lane] = event["ts"]
        elif event["ph"] == "e":
            kind = "whole" if event["cat"] == "conversation" else event["cat"]
            sums[where][kind] += (event["ts"] - open_since.pop(lane)) / 1e6
    worst = max((_difference(sums[where], seconds[name]) for where, name in threads.items()), default=0.0)
    well = not open_since and len(threads) == len(seconds) and worst <= WITHIN_S
    return "ok" if well else {"threads": len(threads), "of": len(seconds), "open": len(open_since), "error_s": worst}


def _difference(found: dict[str, float], wanted: dict[str, float]) -> float:
    return max(abs(found.get(kind, 0.0) - wanted.get(kind, 0.0)) for kind in found.keys() | wanted.keys())


def _path_error(records: Records) -> float:
    """Return by how much the parts of a conversation's critical path miss its seconds, at most."""
    worst = 0.0
    for record in records.records():
        if spans := spans_of(record):
            ended = max(record["ended"], *(span["end"] for span in spans))
            parts = critical_path(spans, record["began"], ended)
            worst = max(worst, abs(sum(parts.values()) - (ended - record["began"])))
    return worst
