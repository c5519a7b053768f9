"""Made-up folders of evaluations, as `verl-multiturn eval` writes them: records, lines, join, `evaluation.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.sample_records import BEGAN, joined_row, sample_record, sample_run_file
from verl_multiturn.records.read import joins
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.run_file import path_of
from verl_multiturn.rows.files import row_digest

MODEL, OTHER = "1dd3c9151dcf78eb", "5c66446dffffffff"
START, LATER = "20261126T101500_9f3c2a", "20261126T111500_aaaaaa"
INVALID, FAILED, OPEN = "invalid", "failed", "open"
"""States of a sample beside its reward: `OPEN` began, and has not ended."""


def data_row(number: int, **changes: Any) -> dict[str, Any]:
    """Return a row of a data set."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
        **changes,
    }


def write_evaluation(
    folder: Path,
    samples: Mapping[int, Sequence[float | str]],
    *,
    asked: int | None = None,
    model: str = MODEL,
    start: str = START,
    rows: Sequence[Mapping[str, Any]] | None = None,
    seconds: float = 3.0,
    times: Mapping[tuple[int, int], tuple[float, float]] | None = None,
    accs: Mapping[tuple[int, int], float] | None = None,
    parts: Mapping[tuple[int, int], Mapping[str, float]] | None = None,
    generations: Sequence[Mapping[str, Any]] | None = None,
    **changes: Any,
) -> Path:
    """Write an evaluation, or one more start of it, and return its folder.

    Args:
        folder: Where it is written.
        samples: Result of each sample, by row.
        asked: Number of rows that were requested; None: those of `samples`.
        model: Hash of the weights.
        start: Name of the start.
        rows: The data set's rows; None: `data_row` of each number.
        seconds: How long a conversation took.
        times: When a sample began, and how long it took, in seconds since `BEGAN`, by row and number.
        accs: Values that a reward reported as `acc`, by row and number.
        parts: Other numbers that a reward reported, by row and number.
        generations: Entries of each conversation's generations in the place of its own.
        changes: Entries of `evaluation.json`.
    """
    records = folder / "records"
    writer = RecordWriter(records, start)
    run = sample_run_file(start=start)
    run["settings"]["evaluation"] = {}
    path_of(records, start).write_text(json.dumps(run))
    joined = []
    for number, own in samples.items():
        said = data_row(number) if rows is None else rows[number]
        for sample, what in enumerate(own):
            began, took = (times or {}).get((number, sample), (0.0, seconds))
            record = sample_record(
                request_id=f"{number}-{sample}-{start[-6:]}",
                uid=str(number),
                number=sample,
                validation=True,
                step=0,
                row={"number": number, "digest": row_digest(said)},
                model=model,
                began=BEGAN + began,
                ended=BEGAN + began + took,
                valid=what != INVALID,
                stop_reason="engine_error" if what == INVALID else "finished",
            )
            record["sample"] = {**record["sample"], "data_source": said["data_source"]}
            for generation, entries in zip(record["generations"], generations or (), strict=False):
                generation.update(entries)
            line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
            writer.begin({**line, "at": record["began"]})
            if what == OPEN:
                continue
            writer.keep(lambda record=record: record, {**line, "at": record["ended"]})  # type: ignore[misc]
            score = None if isinstance(what, str) else float(what)
            acc = {"acc": (accs or {})[number, sample]} if (number, sample) in (accs or {}) else {}
            reported = {**acc, **(parts or {}).get((number, sample), {})}
            row = joined_row(record, validation=True, score=score, parts=json.dumps(reported))
            joined.append(joins.JoinedRow(**{**row, "untrained": what if isinstance(what, str) else None}))
    writer.close()
    joins.write(records, joins.name_of(True, 0, start), joins.table_of(joined))
    told = {
        "recipe": "quickstart",
        "variant": [],
        "model": {"path": "outputs/model", "hash": model},
        "samples": max(len(own) for own in samples.values()),
        "temperature": 1.0,
        "engine": "sglang",
        "rows": len(samples) if asked is None else asked,
        "rows_digest": "00",
        "reward_digest": "11",
        "started": BEGAN,
        "ended": None,
        **changes,
    }
    (folder / "evaluation.json").write_text(json.dumps(told))
    return folder
