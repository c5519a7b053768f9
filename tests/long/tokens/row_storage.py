"""Rows as files give them back: each row gets the keys of all rows, and lists may be arrays.

The other rows of a file are shaped differently on purpose: calls with other, nested arguments, blocks with images.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from tests.long.tokens.row_parts import Case
from verl_multiturn.runs.data import make_row, write_rows

Rows = list[list[dict[str, Any]]]


def _others(arguments_as_text: bool, blocks: bool) -> list[dict[str, Any]]:
    """Return the messages of another row, whose words are in no case."""
    arguments: Any = {"zq0x": "v", "opts": {"zq00x": {"on": True}, "b": "w"}, "list": [{"zq000x": 1}], "turn": 1}
    call = {"name": "zq0000x", "arguments": json.dumps(arguments) if arguments_as_text else arguments}
    calls = [{"id": "c", "type": "function", "function": call, "index": 0}]
    text: Any = "zq00000x"
    if blocks:
        image = {"url": "https://x/zq000000x.png", "detail": "low"}
        text = [{"type": "text", "text": text, "image_url": image, "cache_control": {"type": "ephemeral"}}]
    said = {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": "zq0000000x"}
    return [
        {"role": "user", "content": text, "name": "zq00000000x"},
        said,
        {"role": "tool", "content": text, "tool_call_id": "c", "name": "zq0000x"},
    ]


def _mates() -> list[list[dict[str, Any]]]:
    return [_others(as_text, blocks) for blocks in (False, True) for as_text in (False, True)]


def _parquet(rows: Rows) -> pa.Table:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist([{"prompt": row} for row in rows]), file)
    return pyarrow.parquet.read_table(io.BytesIO(file.getvalue()))


def from_parquet(rows: Rows) -> Any:
    """Return the first row as pyarrow, and `datasets`, read it from a parquet file."""
    return _parquet(rows).to_pylist()[0]["prompt"]


def from_pandas(rows: Rows) -> Any:
    """Return the first row as pandas reads it: lists are arrays."""
    return _parquet(rows).to_pandas().iloc[0]["prompt"]


def from_json_lines(rows: Rows) -> Any:
    """Return the first row as `datasets` reads it from JSON lines, through pyarrow's reader."""
    text = "\n".join(json.dumps({"prompt": row}) for row in rows)
    return pyarrow.json.read_json(io.BytesIO(text.encode())).to_pylist()[0]["prompt"]


def from_write_rows(rows: Rows) -> Any:
    """Return the first row of a file that `make_row` and `write_rows` made."""
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), {"train": [make_row("t", row, "x") for row in rows]})
        return pyarrow.parquet.read_table(Path(folder) / "train.parquet").to_pylist()[0]["prompt"]


STORES: dict[str, Callable[[Rows], Any]] = {
    "parquet": from_parquet,
    "pandas": from_pandas,
    "JSON lines": from_json_lines,
    "write_rows": from_write_rows,
}
"""Functions that return the first of some rows as a file gives it back, by name."""


def stored_cases(cases: Sequence[Case], every: int = 1) -> Iterator[Case]:
    """Yield honest cases as files of rows give them back, where a file can hold them.

    Args:
        cases: Cases as they were written.
        every: Of how many cases one is stored.
    """
    honest = [case for case in cases if case.honest and not case.schemas and isinstance(case.messages, list)]
    for index, case in enumerate(honest[::every]):
        # Each case goes through parquet, and one of the others in turn.
        others = [name for name in STORES if name != "parquet"]
        for name in ("parquet", others[index % len(others)]):
            stored = _stored(case.messages, STORES[name])
            if stored is not None:
                yield replace(case, role=f"{case.role} ({name})", stored=stored, columns=True)


def _stored(messages: list[Any], store: Callable[[Rows], Any]) -> Any:
    for mate in _mates():
        try:
            return store([messages, mate])
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue  # a column has one type: text and blocks do not fit in one
        except Exception as error:  # rows that `write_rows` refuses, the run's own door refuses
            if type(error).__name__ != "ConfigError":
                raise
    return None
