"""The join: the trainer's results for each row, as one Parquet file for each step and each validation.

Invariants:
- a file is whole or not there: it is written under another name and renamed into place;
- lists have one entry for each sampled token of the row, in order, so that they lie beside the record's `logprobs`;
- a stranger's file that would fill the memory, or that lies elsewhere, is refused by name (`open_join`);
- verl's rows of padding are not in it. So the scores' mean, and the advantages of tokens in the loss, are those that
  verl reports (`figures`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from verl_multiturn.paths import open_regular, whole_file
from verl_multiturn.records.schema import JOINED, SPARED

FOLDER = "join"
_NAME = re.compile(r"(step|validation)-(\d+)-(.+)\.parquet")
UNREADABLE = (OSError, ValueError, pa.ArrowException)
"""Errors of a file that is not a join."""
PLACE = ("uid", "number", "row", "validation", "step")
"""Columns that each row of a join has."""
_REPEATED = ["uid", "parts", "untrained", "advantages.list.element"]
"""Columns whose values repeat, as the advantages of a row mostly do."""
_TOGETHER = 512
"""Rows of a group, all of which are unpacked for one of them."""
_OF_ROW, _OF_TEXT, _OF_NUMBER = 700, 64, 4
"""Bytes of memory: of a row as Python has it, of a text and of a number of a list."""
_SHOWN = 3
_MOST, _MOST_TIMES = 64_000_000, 400
"""Bytes that a join may unpack to: so many, and so many for each byte of the file, since equal numbers are packed."""
Floats = NDArray[np.float32]


@dataclass
class JoinedRow:
    """One row of the trainer's batch; the entries are the columns of `schema.JOINED`."""

    request_id: str | None
    uid: str
    number: int
    row: int
    validation: bool
    step: int
    update: int | None = None
    role: str | None = None
    score: float | None = None
    parts: str | None = None
    otc_factor: float | None = None
    group_mean: float | None = None
    group_std: float | None = None
    advantages: Floats | None = None
    old_log_probs: Floats | None = None
    ref_log_probs: Floats | None = None
    importance_weights: Floats | None = None
    entropy: Floats | None = None
    trained: int = 0
    untrained: str | None = None
    untrained_tokens: NDArray[np.int32] | None = None


class StepFigures(NamedTuple):
    """verl's metrics of the same step: `critic/score/mean` and `critic/advantages/…`; NaN without any."""

    score_mean: float
    advantages_mean: float
    advantages_min: float
    advantages_max: float


class JoinName(NamedTuple):
    """The parts of the name of a join's file."""

    validation: bool
    step: int
    start: str


def name_of(validation: bool, step: int, start: str) -> str:
    """Return the name of a join's file. Example: `step-000007-20261126T101500_9f3c2a.parquet`."""
    return f"{'validation' if validation else 'step'}-{step:06d}-{start}.parquet"


def parse_name(name: str) -> JoinName | None:
    """Parse the name of a join's file; None: it is not one of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else JoinName(found[1] == "validation", int(found[2]), found[3])


def order(name: JoinName) -> tuple[str, int, bool]:
    """Return the place of a join among others: of those that have the same conversation, the last one counts.

    The names of starts order by time. A start that trains a step again goes on from weights before it.
    """
    return name.start, name.step, name.validation


def counting(names: Iterable[JoinName], evaluations: Collection[str] = ()) -> set[JoinName]:
    """Return the joins that count for a step or a validation: where several starts did it, the last one's.

    Args:
        names: The joins of one folder.
        evaluations: Starts of an evaluation, all of which count: each adds to those before.
    """
    last: dict[tuple[bool, int, str], JoinName] = {}
    for name in sorted(names, key=order):
        last[name.validation, name.step, name.start if name.start in evaluations else ""] = name
    return set(last.values())


def filled(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return some columns of a join, of their types; one that it does not have is null."""
    fields = [JOINED.field(name) for name in names]
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in fields
    ]
    return pa.table(columns, pa.schema(fields))


def table_of(rows: Sequence[JoinedRow]) -> pa.Table:
    """Return rows as a table of `schema.JOINED`."""
    return pa.table([_column(field, [getattr(row, field.name) for row in rows]) for field in JOINED], schema=JOINED)


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    if not pa.types.is_list(field.type):
        return pa.array(values, field.type)
    lengths = [0 if value is None else len(value) for value in values]
    given = [value for value in values if value is not None]
    kind = field.type.value_type
    flat = np.concatenate(given) if given else np.empty(0)
    with np.errstate(over="ignore"):  # an entropy is never as large as a float16 can be
        held = pa.array(flat.astype(kind.to_pandas_dtype()), kind)
    missing = pa.array([value is None for value in values], pa.bool_())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, held, type=field.type, mask=missing)


def write(folder: Path, name: str, table: pa.Table) -> None:
    """Write a join's file into `<folder>/join`, which is made where it is not there.

    Raises:
        OSError: It cannot be written. The old file of that name stays.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    with whole_file(place / name) as half:
        pq.write_table(table, half, compression="zstd", use_dictionary=_REPEATED, row_group_size=_TOGETHER)


def read(
    folder: Path,
    starts: Collection[str],
    fault: Callable[[Path, str], None],
    columns: Sequence[str] | None = None,
) -> Iterator[tuple[JoinName, pa.Table]]:
    """Yield the name and the table of each join in a folder of records; a file that is torn or not a join is skipped.

    Args:
        folder: The folder.
        starts: Starts that the folder knows; a join of another one is skipped, as a copy is. None: any.
        fault: It is called with each file that is skipped, and why.
        columns: Names of the columns; None: all.
    """
    seen: set[JoinName] = set()
    for path in sorted((folder / FOLDER).glob("*.parquet")):
        name = parse_name(path.name)
        if name is None or name in seen or not is_of(name, starts):
            fault(path, refusal(name, seen))
            continue
        seen.add(name)
        try:
            table = read_one(path, name, columns or JOINED.names)
        except UNREADABLE as error:
            fault(path, no_join(error))
            continue
        yield name, table


def read_one(path: Path, name: JoinName, columns: Sequence[str]) -> pa.Table:
    """Return columns of a join, of their types, as `filled` does; `read` and the index call it.

    Args:
        path: The file, in the folder `join` of a folder of records.
        name: The parts of its name.
        columns: Names of the columns.

    Raises:
        OSError: It is not a plain file, lies elsewhere, or cannot be read.
        ValueError: It would fill the memory, is of another step than its name, or does not name the owners of its rows.
        pa.ArrowException: It cannot be read, or has a column that cannot be one of a join.
    """
    with open_join(path) as file:
        opened = pq.ParquetFile(file)
        own = set(names_of(opened.metadata))
        table = opened.read([each for each in dict.fromkeys([*columns, *PLACE]) if each in own])
    check_places(table, name)
    return filled(table, columns)


def is_of(name: JoinName, starts: Collection[str]) -> bool:
    """Return whether a join is of a start that its folder knows; where it knows none, all are accepted."""
    return not starts or name.start in starts


def refusal(name: JoinName | None, seen: Collection[JoinName | None]) -> str:
    """Return why a file in the folder of joins is skipped for its name.

    Args:
        name: The parts of its name.
        seen: The parts of the earlier files' names.
    """
    if name in seen:
        return "it is left out: another file is the join of the same step"
    if name is None:
        return "it is left out: expected the name of a join, as in step-000007-START.parquet"
    return f"it is left out: no file of a run and no step is of the start {name.start!r}"


def open_join(path: Path) -> BinaryIO:
    """Open a join, a file in the folder `join` of a folder of records; who reads it calls `check_places`.

    Args:
        path: The file.

    Raises:
        OSError: It is not a plain file, lies elsewhere, or cannot be read.
        ValueError: It would fill the memory.
        pa.ArrowException: It is not a Parquet file.
    """
    file = open_regular(path, within=path.parent.parent)
    try:
        held = pq.read_metadata(file)
        size, needed = os.fstat(file.fileno()).st_size, _unpacked(held) + _long_texts(file, held)
        if needed > (most := _MOST + _MOST_TIMES * size):
            raise ValueError(f"its {size} bytes would unpack to {needed}; expected {most} at most")
        file.seek(0)
    except BaseException:  # the caller gets no file to close
        file.close()
        raise
    return file


def check_places(table: pa.Table, name: JoinName) -> None:
    """Refuse a join whose rows do not name their owner, or their step: they could not be placed.

    Args:
        table: Its rows, with those columns of `PLACE` that it has.
        name: The parts of its name.

    Raises:
        ValueError: It is such a join.
        pa.ArrowException: A column is of another type.
    """
    if missing := [each for each in PLACE if each not in table.column_names]:
        raise ValueError(f"it has no column {missing[0]!r}")
    table = filled(table, PLACE)
    if empty := [each for each in PLACE if table[each].null_count]:
        raise ValueError(f"a row has no {empty[0]!r}")
    steps = set(pc.unique(table["step"]).to_pylist())
    if steps - {name.step}:
        raise ValueError(f"its name says step {name.step}, its rows {sorted(map(str, steps))[:_SHOWN]}")
    if len(table) and pc.min(table["row"]).as_py() < 0:
        raise ValueError(f"a row has the number {pc.min(table['row'])}; expected 0 or more")


def names_of(held: pq.FileMetaData) -> list[str]:
    """Return the names of a join's columns.

    Raises:
        ValueError: Two have one name, or none names the conversations.
    """
    names = list(held.schema.to_arrow_schema().names)
    if "request_id" not in names:
        raise ValueError("it has no column 'request_id'")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the column {twice[0]!r} is there twice")
    return names


def _unpacked(held: pq.FileMetaData) -> int:
    """Return how many bytes a Parquet file takes in memory: equal values are written once, and unpacked each."""
    needed = held.num_rows * _OF_ROW
    for number in range(held.num_row_groups):
        group = held.row_group(number)
        for at in range(group.num_columns):
            column = group.column(at)
            is_text = column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
            needed += column.total_uncompressed_size + column.num_values * (_OF_TEXT if is_text else _OF_NUMBER)
    return int(needed)


def _long_texts(file: BinaryIO, held: pq.FileMetaData) -> int:
    """Return how many bytes the texts of a Parquet file take where a long one may be repeated by many rows."""
    needed = 0
    for name in (field.name for field in JOINED if field.type == pa.string() and field.name in held.schema.names):
        at = held.schema.names.index(name)
        groups = [held.row_group(number).column(at) for number in range(held.num_row_groups)]
        if sum(group.num_values * group.total_uncompressed_size for group in groups) <= _MOST:
            continue
        opened = pq.ParquetFile(file, read_dictionary=[name])
        for number in range(held.num_row_groups):
            for chunk in opened.read_row_group(number, columns=[name])[name].chunks:
                if not pa.types.is_dictionary(chunk.type):
                    chunk = chunk.dictionary_encode()
                lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
                needed += pc.sum(lengths).as_py() or 0
    return needed


def no_join(error: Exception) -> str:
    """Return why `read_one` or `open_join` refused a file."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"it is left out, it is no join: {said}"


def figures(table: pa.Table) -> StepFigures:
    """Return verl's metrics of a training step, from the step's join."""
    scores = table["score"].drop_null().to_numpy()
    advantages = [np.empty(0, np.float32)]
    columns = ("advantages", "untrained", "untrained_tokens")
    for held, cause, left in zip(*(table[name].to_pylist() for name in columns), strict=True):
        whole = np.asarray(held if held is not None else [], np.float32)
        if cause in (None, "skipped_update", *SPARED) or left is not None:
            advantages.append(np.delete(whole, left) if left else whole)
    flat = np.concatenate(advantages).astype(np.float64)
    mean = float(scores.mean()) if len(scores) else np.nan
    if not len(flat):
        return StepFigures(mean, np.nan, np.nan, np.nan)
    return StepFigures(mean, float(flat.mean()), float(flat.min()), float(flat.max()))
