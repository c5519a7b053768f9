"""`Records`: what is on disk of a run, as plain dictionaries of `schema`."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from verl_multiturn.records import schema


class Records:
    """The records of one run or of several.

    Args:
        folders: folders of records, or run folders that have one called `records`.
    """

    def __init__(self, *folders: str | Path) -> None:
        self.folders = [
            Path(folder) / "records" if (Path(folder) / "records").is_dir() else Path(folder) for folder in folders
        ]
        self._faults: dict[str, None] = {}

    @property
    def faults(self) -> list[str]:
        return list(self._faults)

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [orjson.loads(path.read_bytes()) for path in self._files("run-*.json")]

    def records(self) -> Iterator[dict[str, Any]]:
        for path in self._files("*.jsonl.gz"):
            with gzip.open(path) as file:
                yield from map(orjson.loads, file)

    def record(self, request_id: str) -> dict[str, Any]:
        return next(record for record in self.records() if record["request_id"] == request_id)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of all files; each has `file`, the stem of its files, beside its entries."""
        for path in self._files("*.lines.jsonl"):
            for line in path.read_bytes().splitlines():
                yield {**orjson.loads(line), "file": path.name.removesuffix(".lines.jsonl")}

    def summaries(self) -> pa.Table:
        raise NotImplementedError

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self._steps() if line["event"] != "clock"]

    def clocks(self) -> list[dict[str, Any]]:
        return [line for line in self._steps() if line["event"] == "clock"]

    def joined(self) -> pa.Table:
        tables = [pq.read_table(path) for path in self._files("join/*.parquet")]
        return pa.concat_tables(tables) if tables else schema.JOINED.empty_table()

    def snapshots(self) -> list[dict[str, Any]]:
        """Return the snapshots; each has `file`, as in `lines`."""
        return [
            {**orjson.loads(path.read_bytes()), "file": path.name.removesuffix(".open.json")}
            for path in self._files("*.open.json")
        ]

    def _steps(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for path in self._files("steps.jsonl") for line in path.read_bytes().splitlines()]

    def _files(self, pattern: str) -> list[Path]:
        return [path for folder in self.folders for path in sorted(folder.glob(pattern))]


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file or a folder, in the form of schema 2."""
    yield from Records(path).records()
