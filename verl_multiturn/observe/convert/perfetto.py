"""Perfetto: the timeline of a run as Chrome's trace JSON, which ui.perfetto.dev opens.

Each step of the trainer is a process, each conversation in it a thread. All spans are pairs of asynchronous events (`b`
and `e`): parallel calls overlap without nesting, which events with a duration (`X`) may not. Two events that overlap
have different ids, and so are in different lanes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_multiturn.observe.convert.source import RunSource
from verl_multiturn.observe.spans import tree_of
from verl_multiturn.records.json_text import dumps, plain

_TRAINER = 0


def write_perfetto(source: RunSource, path: Path) -> int:
    """Write the trace, and return the number of conversations in it.

    Args:
        source: The run.
        path: The file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, count = path.with_name(f"{path.name}.part"), 0
    began = min((float(run["began"]) for run in source.runs if run.get("began")), default=0.0)
    with unfinished.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + _line({"began": began, "start": source.start}))
        file.write(b',"traceEvents":[\n' + _line(_named("process_name", _TRAINER, None, "trainer")))
        for event in _of_steps(source, began):
            file.write(b",\n" + _line(event))
        threads: dict[int, int] = defaultdict(int)
        for record in source.records():
            count += 1
            process = _process(record)
            threads[process] += 1
            if threads[process] == 1:
                what = "validation" if record.get("validation") else "step"
                file.write(b",\n" + _line(_named("process_name", process, None, f"{what} {record.get('step')}")))
            for event in _of_conversation(record, source, process, threads[process], began):
                file.write(b",\n" + _line(event))
        file.write(b"\n]}\n")
    unfinished.replace(path)
    return count


def _line(event: dict[str, Any]) -> bytes:
    return dumps(plain(event)).rstrip(b"\n")


def _process(record: dict[str, Any]) -> int:
    """Return the number of a step's process; a validation has one of its own."""
    return 2 * int(record.get("step") or 0) + 1 + bool(record.get("validation"))


def _named(what: str, process: int, thread: int | None, name: str) -> dict[str, Any]:
    event = {"ph": "M", "name": what, "pid": process, "args": {"name": name}}
    return event if thread is None else {**event, "tid": thread}


def _of_steps(source: RunSource, began: float) -> Iterator[dict[str, Any]]:
    for number, step in enumerate(source.steps):
        event = {"cat": "trainer", "name": f"{step['event']} {step['step']}", "id": f"trainer/{number}"}
        args = {"phases": step.get("phases"), "rows": step.get("rows")}
        yield from _pair(event, _TRAINER, 0, float(step["began"]) - began, float(step["ended"]) - began, args)


def _of_conversation(
    record: dict[str, Any], source: RunSource, process: int, thread: int, began: float
) -> Iterator[dict[str, Any]]:
    offset = source.offset_s(record["request_id"]) - began
    request = record["request_id"]
    name = hashlib.blake2b(request.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    yield _named("thread_name", process, thread, request)
    timeline = tree_of(record).timeline
    ended = max([float(record["ended"]), *(float(wait["end"]) for wait, _ in timeline)])
    reward = source.reward(record)
    args = {
        "request_id": request,
        "uid": record.get("uid"),
        "stop_reason": record.get("stop_reason"),
        "score": reward.score,
        **({"scores": reward.of_roles} if reward.of_roles else {}),
    }
    whole = {"cat": "conversation", "name": f"conversation {record.get('number')}", "id": f"{name}/0"}
    yield from _pair(whole, process, thread, float(record["began"]) + offset, ended + offset, args)
    lanes: list[float] = []
    for wait, span in timeline:
        start, end = float(wait["start"]), max(float(wait["start"]), float(wait["end"]))
        lane = next((at for at, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane:] = [end, *lanes[lane + 1 :]]
        event = {
            "cat": wait["kind"],
            "name": f"{wait['kind']} {wait.get('name') or ''}".rstrip(),
            "id": f"{name}/{lane + 1}",
        }
        detail: dict[str, Any] = {"turn": wait.get("turn")}
        if (role := span.entry.get("role")) is not None and span.kind == "generation":
            detail["role"] = role
        if span.kind == "tool":
            kept = ("id", "arguments", "status", "attempts", "cached")
            detail |= {key: span.entry.get(key) for key in kept}
        yield from _pair(event, process, thread, start + offset, end + offset, detail)


def _pair(
    event: dict[str, Any], process: int, thread: int, start: float, end: float, args: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    common = {**event, "pid": process, "tid": thread}
    yield {**common, "ph": "b", "ts": round(start * 1e6, 1), "args": args}
    yield {**common, "ph": "e", "ts": round(end * 1e6, 1)}
