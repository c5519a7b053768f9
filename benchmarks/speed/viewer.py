"""How fast is the viewer with a large run: index, pages, records, memory, content; and how fast is its page?

    python -m benchmarks.viewer [--count 1000000] [--folder DIR]

It writes the lines of so many conversations of 64 files, with joins of 90 % of them, and 320 whole records. Then it
starts `verl-multiturn view --follow` as a process, twice, and asks it as the page does. With Chromium it opens a page
of 3,200 conversations and a row of 64,000 tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.sample_records import BEGAN, sample_record, sample_run_file
from tests.support.view_samples import START, TOKENIZER, long_record, make_row
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.view.export import export
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.schema import JOINED
from verl_multiturn.records.write.records import RecordWriter

FILES, GROUP, STEP = 64, 8, 8192
WHOLE = 320
REPEATS = 30
FILTERS = [
    "", "score<1", "fate=trained score=1", "step>=60 step<=70", "stop_reason=length,repeated", "data_source~math",
    "failed_calls>0 validation=false", "seconds>50", "uid-000777", "trained_step=40 number=3",
]  # fmt: skip
SORTS = ["began", "score", "seconds", "response_tokens", "trained_step", "request_id", "stop_reason"]


def write_run(folder: Path, count: int) -> None:
    """Write the lines, joins and whole records of a run."""
    rng = np.random.default_rng(0)
    (folder / "join").mkdir(parents=True)
    run = sample_run_file(start=START, tokenizer={"path": str(TOKENIZER)})
    (folder / f"run-{START}.json").write_bytes(line_of(run))
    steps = count // STEP + 1
    seconds, lengths = rng.gamma(4, 5, count).round(3), rng.integers(50, 8000, count)
    stops = rng.choice(["finished", "length", "repeated", "max_turns"], count, p=[0.8, 0.1, 0.05, 0.05])
    sources, right = rng.choice(["gsm8k", "math", "search"], count), rng.random(count) < 0.6
    for file in range(FILES):
        stem = f"{START}-host{file}-{1000 + file}-{file:08x}"
        with (folder / f"{stem}.lines.jsonl").open("wb") as lines:
            for at in range(file * GROUP, count, FILES * GROUP):
                for number in range(min(GROUP, count - at)):
                    each = at + number
                    step, began = each // STEP + 1, BEGAN + each * 0.01
                    line = {
                        "request_id": f"{each:032x}", "uid": f"uid-{at // GROUP:029d}", "number": number,
                        "validation": False, "step": step, "rerolled_from": None,
                    }  # fmt: skip
                    took = float(seconds[each])
                    summary = {
                        "data_source": sources[each], "index": each % 7473, "stop_reason": stops[each], "valid": True,
                        "rows": 1, "turns": 3, "calls": 2, "failed_calls": int(each % 17 == 0), "prompt_tokens": 200,
                        "response_tokens": int(lengths[each]), "sampled_tokens": int(lengths[each]) // 2,
                        "seconds": took, "generate_s": took * 0.7, "tools_s": took * 0.2, "interaction_s": 0.0,
                    }  # fmt: skip
                    end = {**line, "event": "end", "at": began + took, "why": "", "offset": None, "place": None}
                    lines.write(orjson.dumps({**line, "event": "begin", "at": began}) + b"\n")
                    lines.write(orjson.dumps({**end, "summary": summary}) + b"\n")
                    score = {**line, "event": "score", "at": began + took + 0.1, "score": float(right[each])}
                    lines.write(orjson.dumps(score) + b"\n")
    with (folder / "steps.jsonl").open("wb") as file:
        for step in range(1, int(steps * 0.9) + 1):
            name = _write_join(folder, step, (step - 1) * STEP, min(count, step * STEP), right)
            times = {
                "began": BEGAN + 80 * step,
                "ended": BEGAN + 80 * step + 79,
                "phases": {"gen": 60.0, "update": 19.0},
            }
            told = {"event": "step", "start": START, "step": step, "join": name, "rows": STEP, "metrics": {"a": 1.0}}
            file.write(line_of({**told, **times, "evicted": [], "filtered": [], "failed": [], "rerolled": {}}))


def _write_join(folder: Path, step: int, first: int, last: int, right: Any) -> str:
    count, numbers = last - first, np.arange(first, last)
    columns: dict[str, Any] = {
        "request_id": [f"{each:032x}" for each in numbers],
        "uid": [f"uid-{each // GROUP:029d}" for each in numbers],
        "number": numbers % GROUP,
        "row": np.zeros(count, np.int32),
        "validation": np.zeros(count, bool),
        "step": np.full(count, step),
        "update": np.zeros(count, np.int32),
        "score": right[first:last].astype(float),
        "group_mean": np.full(count, 0.6),
        "group_std": np.full(count, 0.5),
        "trained": np.full(count, 400),
    }
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in JOINED
    ]
    name = f"step-{step}-{START}.parquet"
    pq.write_table(pa.Table.from_arrays(arrays, schema=JOINED), folder / "join" / name, compression="zstd")
    return name


def write_whole(folder: Path) -> list[str]:
    """Write whole records of 8,400 tokens, half of them sampled, and return their ids."""
    rng = np.random.default_rng(1)
    writer = RecordWriter(folder, START)
    names = []
    for at in range(WHOLE):
        parts: Any = []
        for turn in range(8):
            numbers = (-rng.exponential(0.5, 500)).astype(np.float32).tolist()
            parts.append((1, rng.integers(3, 258, 500).tolist(), numbers, 1, turn))
            parts.append((3, rng.integers(3, 258, 525).tolist(), [], -1, turn))
        record = sample_record(request_id=f"whole-{at}", uid=f"whole-{at // GROUP}", number=at % GROUP)
        record["rows"] = [make_row(rng.integers(3, 258, 200).tolist(), parts)]
        line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
        writer.begin({**line, "at": record["began"]})
        writer.keep(lambda record=record: record, {**line, "at": record["ended"]})  # type: ignore[misc]
        names.append(record["request_id"])
        if at % 32 == 31:
            time.sleep(2)  # as a run would: the writer has a pace of its own, and its end waits 30 s for it
    writer.close()
    return names


class Served:
    """A started `verl-multiturn view`."""

    def __init__(self, folder: Path) -> None:
        begun = time.perf_counter()
        command = [sys.executable, "-c", "from verl_multiturn.cli.main import main; main()"]
        self.process = subprocess.Popen(
            [*command, "view", str(folder), "--follow"],
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"XDG_CACHE_HOME": str(folder.parent / "cache")},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.ready_s = time.perf_counter() - begun

    def ask(self, what: str, **entries: Any) -> Any:
        """Return the server's answer."""
        query = urllib.parse.urlencode(entries)
        with urllib.request.urlopen(f"{self.address}api/{what}?{query}", timeout=600) as answer:
            return json.loads(answer.read())

    def memory_mb(self) -> float:
        """Return the largest memory that it has had, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1000

    def close(self) -> float:
        """End it, and return the seconds of CPU that it took."""
        times = psutil.Process(self.process.pid).cpu_times()
        self.process.terminate()
        self.process.wait(120)
        return times.user + times.system


def p95_ms(call: Callable[[int], Any], count: int) -> float:
    """Return the 95th percentile of a call's time in ms."""
    taken = []
    for at in range(count):
        begun = time.perf_counter()
        call(at)
        taken.append(1000 * (time.perf_counter() - begun))
    return round(float(np.percentile(taken, 95)), 1)


def measure_server(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return how fast the server is."""
    first = Served(folder)
    index_s, memory = first.ready_s, first.memory_mb()
    index_cpu_s = first.close()
    served, cache = Served(folder), folder.parent / "cache" / "verl-multiturn" / "view"
    found: dict[str, Any] = {"index_s": round(index_s, 1), "index_cpu_s": round(index_cpu_s, 1)}
    found["index_mb"] = round(sum(path.stat().st_size for path in cache.glob("*.index")) / 1e6, 1)
    found["reopened_s"] = round(served.ready_s, 1)
    found["conversations"] = served.ask("meta")["count"]
    found["page_p95_ms"] = p95_ms(lambda at: served.ask("table", offset=(at * 7919 * 50) % 1000, limit=50), REPEATS)
    found["sort_p95_ms"] = p95_ms(
        lambda at: served.ask("table", sort=SORTS[at % len(SORTS)], desc=at // len(SORTS) % 2, limit=50), REPEATS
    )
    found["filter_p95_ms"] = p95_ms(
        lambda at: served.ask("table", where=FILTERS[at % len(FILTERS)], sort=SORTS[at % 5], limit=50), REPEATS
    )
    served.ask("table", sort="score", offset=500_000, limit=50)
    found["deep_page_p95_ms"] = p95_ms(lambda at: served.ask("table", sort="score", offset=500_000 + 50 * at), REPEATS)
    found["record_p95_ms"] = p95_ms(lambda at: served.ask("record", id=names[at * 37 % len(names)]), REPEATS)
    found["run_ms"] = p95_ms(lambda at: served.ask("run"), 3)
    found["follow_s"] = round(max(_appears(served, folder, at) for at in range(3)), 2)
    found["server_mb"] = round(max(memory, served.memory_mb()))
    served.close()
    return found


def _appears(served: Served, folder: Path, at: int) -> float:
    """Return how long it takes until a line that is written is seen."""
    since = served.ask("changes", since=-1)["version"]
    line = {"event": "begin", "request_id": f"new-{at}", "uid": "new", "number": at, "step": 1, "at": time.time()}
    with (folder / f"{START}-new-1-{at:08x}.lines.jsonl").open("wb") as file:
        file.write(line_of(line))
    begun = time.perf_counter()
    while served.ask("changes", since=since)["version"] == since:
        pass
    assert served.ask("table", where=f"request_id=new-{at}")["total"] == 1
    return time.perf_counter() - begun


def measure_page(folder: Path) -> dict[str, Any]:
    """Return how fast an exported page is; {} without Chromium."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        return {}
    _write_small(folder)
    documents = Documents([folder])
    documents.refresh()
    told = export(documents, folder / "page.html")
    address = (folder / "page.html").as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        begun = time.perf_counter()
        page.goto(f"{address}#table")
        page.locator("tbody tr").first.wait_for()
        ready = time.perf_counter() - begun
        page.goto(f"{address}#talk?id=long")
        page.locator("[role=tab]").nth(1).wait_for()
        begun = time.perf_counter()
        page.locator("[role=tab]").nth(1).click()
        page.locator(".tokens").wait_for()
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        tokens = time.perf_counter() - begun
        browser.close()
    return {
        "export_conversations": told["conversations"],
        "export_mb": round(told["bytes"] / 1e6, 2),
        "ready_s": round(ready, 2),
        "tokens_64000_s": round(tokens, 2),
    }


def _write_small(folder: Path) -> None:
    """Write 3,200 conversations as the quickstart's are, and a long one."""
    rng = np.random.default_rng(2)
    writer = RecordWriter(folder, START)
    (folder / f"run-{START}.json").write_bytes(
        line_of(sample_run_file(start=START, tokenizer={"path": str(TOKENIZER)}))
    )
    for at in range(3200):
        prompt = np.random.default_rng(at // GROUP).integers(3, 258, 120).tolist()
        sampled = [rng.integers(3, 258, 25).tolist(), rng.integers(3, 258, 10).tolist()]
        numbers = [(-rng.exponential(0.1, len(each))).astype(np.float32).tolist() for each in sampled]
        parts: Any = [
            (1, sampled[0], numbers[0], 1, 0),
            (3, [*prompt[:70]], [], -1, 0),
            (1, sampled[1], numbers[1], 1, 1),
        ]
        record = sample_record(request_id=f"small-{at}", uid=f"small-{at // GROUP}", number=at % GROUP)
        record |= {"step": at // 160, "rows": [make_row(prompt, parts)]}
        _keep(writer, record)
        if at % 500 == 0:
            time.sleep(1.5)  # as a run would: the queue has an end
    _keep(writer, long_record())
    writer.close()


def _keep(writer: RecordWriter, record: dict[str, Any]) -> None:
    line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
    writer.begin({**line, "at": record["began"]})
    writer.keep(lambda: record, {**line, "at": record["ended"]})


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="conversations of the large run")
    parser.add_argument("--folder", type=Path, default=None, help="an empty folder to write into, which stays")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.folder or Path(temporary)
        begun = time.perf_counter()
        if not (base / "large").exists():
            write_run(base / "large", arguments.count)
            write_whole(base / "large")
        names = [f"whole-{at}" for at in range(WHOLE)]
        print(f"written in {time.perf_counter() - begun:.0f} s", flush=True)
        shutil.rmtree(base / "cache", ignore_errors=True)
        found = measure_server(base / "large", names)
        (base / "small").mkdir(exist_ok=True)
        found |= measure_page(base / "small")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
