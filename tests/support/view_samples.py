"""A folder of records for the viewer: a sample run, and conversations with all that a page may stumble over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.sample_records import BEGAN, joined_row, sample_record, sample_run, sample_run_file, sample_session
from verl_multiturn.records import schema
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.rows import row_of
from verl_multiturn.records.write.records import RecordWriter

START = "20261126T101500_5f3a2c"
TOKENIZER = Path(__file__).parents[2] / "verl_multiturn" / "rollout" / "tiny_chat"
HOSTILE = (
    "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
    "\x00\u202eevil\ud83d{{constructor}}"
)
"""A text that would run, end the page, turn the text after it, or not be UTF-8."""
LONG = 64_000
"""Tokens of the long conversation."""
PROMPT, SAMPLED, TEMPLATE, OBSERVATION = 0, 1, 2, 3
Part = tuple[int, Sequence[int], Sequence[float], int, int]


def make_row(prompt: Sequence[int], parts: Sequence[Part]) -> dict[str, Any]:
    """Return a row of a prompt, and of parts: source, ids, logprobs of sampled ones, version and turn."""
    ids, count = list(prompt), len(prompt)
    mask, logprobs, versions, turns, sources = [0] * count, [0.0] * count, [-1] * count, [0] * count, [PROMPT] * count
    for source, own, numbers, version, turn in parts:
        is_sampled = source == SAMPLED
        ids += own
        mask += [int(is_sampled)] * len(own)
        logprobs += numbers if is_sampled else [0.0] * len(own)
        versions += [version if is_sampled else -1] * len(own)
        turns += [turn] * len(own)
        sources += [source] * len(own)
    return row_of(count, ids, mask, logprobs, versions, turns, sources)


def long_record() -> dict[str, Any]:
    """Return a conversation of 64,000 tokens, half of them sampled, in stretches of 50."""
    rng = np.random.default_rng(0)
    parts: list[Part] = []
    for turn in range(LONG // 100):
        sampled = rng.integers(3, 258, 50).tolist()
        parts.append((SAMPLED, sampled, (-rng.exponential(0.8, 50)).round(4).tolist(), turn % 5, turn))
        parts.append((OBSERVATION, rng.integers(3, 258, 50).tolist(), [], -1, turn))
    row = make_row([1, 11, 12], parts)
    return sample_record(request_id="long", uid="long", rows=[row], timeline=[], calls=[], generations=[])


def siblings() -> list[dict[str, Any]]:
    """Return a group whose four conversations part after 5 sampled tokens, at number's own token."""
    made = []
    for number in range(4):
        numbers = [-0.01, -0.5, -1.5, -4.0, -9.0, -0.25, -0.75]
        parts: list[Part] = [
            (SAMPLED, [21, 22, 23, 24, 25, 40 + number, 2], numbers, 2, 0),
            (TEMPLATE, [1, 77], [], -1, 0),
            (OBSERVATION, [30, 31, 32], [], -1, 1),
            (SAMPLED, [50, 51, 2], [-0.1, float("nan"), -0.3], 3, 1),
        ]
        row = make_row([1, 11, 12, 13], parts)
        record = sample_record(request_id=f"sib-{number}", uid="sib", number=number, rows=[row], generations=[])
        made.append(record)
    return made


def joined_sibling(record: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the row of a join of one of `siblings`."""
    number = record["number"]
    sampled = np.linspace(-2.5, 2.5, 10).astype(np.float32) * (1 if number == 0 else -1)
    drift = np.array([0.0, 0.01, -0.01, 0.2, -0.2, 0.6, -0.6, 0.1, 0.0, -0.3], np.float32)
    logprobs = np.asarray(record["rows"][0]["logprobs"], np.float32)
    return joined_row(
        record,
        step=step,
        advantages=sampled,
        old_log_probs=logprobs + drift,
        entropy=np.linspace(0, 3, 10).astype(np.float16),
        untrained_tokens=pa.scalar([1, 2], pa.list_(pa.int32())).as_py(),
        trained=8,
        untrained="too_old",
        score=0.5,
    )


def write_samples(folder: Path) -> None:
    """Write the folder: a run of three steps, then siblings, a session, a hostile, a long and an open conversation."""
    sample_run(folder, steps=3, groups=4, size=4, start=START)
    path = folder / f"run-{START}.json"
    settings = sample_run_file()["settings"] | {"a": HOSTILE}
    path.write_bytes(line_of(sample_run_file(start=START, tokenizer={"path": str(TOKENIZER)}, settings=settings)))
    hostile = sample_record(
        request_id="hostile",
        uid=HOSTILE,
        messages=[
            {"role": HOSTILE, "content": HOSTILE, "name": HOSTILE},
            {"role": "assistant", "content": "x" * 5_000_000},
        ],
        error=HOSTILE,
        differences=[HOSTILE],
        stop_reason="finished",
        outages=[HOSTILE],
    )
    hostile["sample"] |= {"data_source": HOSTILE, "ground_truth": HOSTILE, "extra_info": {HOSTILE: float("nan")}}
    hostile["calls"][0] |= {
        "name": HOSTILE,
        "arguments": HOSTILE,
        "text": HOSTILE,
        "metrics": {HOSTILE: HOSTILE},
        "id": HOSTILE,
    }
    group = siblings()
    writer = RecordWriter(folder, START)
    for record in [*group, sample_session(), hostile, long_record()]:
        line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
        writer.begin({**line, "at": record["began"] + 100})
        writer.keep(lambda record=record: record, {**line, "at": record["ended"] + 100})
        writer.scored({**line, "at": record["ended"] + 101, "score": float("nan") if record is hostile else 0.5})
    writer.begin({"request_id": "running", "uid": "running", "number": 0, "step": 3, "at": BEGAN + 200})
    opened = {"request_id": "running", "uid": "running", "number": 0, "validation": False, "step": 3, "began": BEGAN}
    writer.close()
    doing = [
        {**opened, "doing": f"call {HOSTILE}", "since": BEGAN + 1, "turn": 2}
    ]  # as a worker leaves it that is killed
    (folder / f"{writer.stem}.open.json").write_bytes(line_of({"at": BEGAN + 202, "open": doing}))
    rows = [joined_sibling(record, 4) for record in group]
    name = f"step-4-{START}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema.JOINED), folder / "join" / name)
    step = {
        "event": "step",
        "start": START,
        "step": 4,
        "began": BEGAN + 90,
        "ended": BEGAN + 120,
        "phases": {"gen": 4.0},
    }
    step |= {"join": name, "rows": 4, "metrics": {HOSTILE: 1.0, "critic/score/mean": float("nan")}}
    with (folder / "steps.jsonl").open("ab") as file:
        file.write(line_of(step))
