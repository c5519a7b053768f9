"""`joined_rows`: the trainer's results for the rows of some conversations, out of one join."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_multiturn.records.read import joins
from verl_multiturn.records.schema import JOINED

_BATCH = 64
"""Rows of a join that are read at a time, so that a large one does not fill the memory."""


def joined_rows(path: Path, wanted: Collection[str], fault: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a join that are of some conversations; their lists are arrays.

    Args:
        path: The join. Of a row that occurs twice, the last counts.
        wanted: Request ids of the conversations.
        fault: It is called with a sentence where the join cannot be read.
    """
    try:
        yield from _rows(path, wanted)
    except joins.UNREADABLE as error:
        fault(f"{path}: {joins.no_join(error)}")


def _rows(path: Path, wanted: Collection[str]) -> Iterator[dict[str, Any]]:
    name = joins.parse_name(path.name)
    if name is None:
        raise ValueError("it has no name of a join")
    with joins.open_join(path) as opened:
        file = pq.ParquetFile(opened)
        own = joins.names_of(file.metadata)
        places = file.read([each for each in ("request_id", *joins.PLACE) if each in own])
        joins.check_places(places, name)
        ids, numbers = places["request_id"].to_pylist(), places["row"].to_pylist()
        at = sorted({(ids[place], numbers[place]): place for place in range(len(ids)) if ids[place] in wanted}.values())
        names = [each for each in JOINED.names if each in own]
        begin = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            held = [place - begin for place in at if begin <= place < begin + count]
            begin, start = begin + count, 0
            batches = file.iter_batches(_BATCH, row_groups=[group], columns=names) if held else ()
            for batch in batches:
                here = [place - start for place in held if start <= place < start + len(batch)]
                if here:
                    yield from _with_arrays(pa.Table.from_batches([batch.take(pa.array(here))]))
                start += len(batch)
                if start > held[-1]:
                    break


def _with_arrays(rows: pa.Table) -> Iterator[dict[str, Any]]:
    rows = joins.filled(rows, JOINED.names)
    lists = [field.name for field in JOINED if pa.types.is_list(field.type)]
    others = rows.select([name for name in JOINED.names if name not in lists]).to_pylist()
    for at, row in enumerate(others):
        for name in lists:
            scalar = rows[name][at]
            row[name] = scalar.values.to_numpy(zero_copy_only=False) if scalar.is_valid else None
        yield {name: row[name] for name in JOINED.names}


def read_parts(row: Mapping[str, Any]) -> Any:
    """Return the parts of the reward of a row; None: there are none that can be read, as in a stranger's join."""
    try:
        return None if row["parts"] is None else json.loads(row["parts"])
    except (ValueError, RecursionError):
        return None
