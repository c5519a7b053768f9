"""`verl-multiturn convert`: writes a run's records in the forms of other programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.cli.ends import fail, open_records, refuse
from verl_multiturn.describe import printable
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.observe.convert.atif import write_atif
from verl_multiturn.observe.convert.otel import write_otel
from verl_multiturn.observe.convert.parquet import write_parquet
from verl_multiturn.observe.convert.perfetto import write_perfetto
from verl_multiturn.observe.convert.source import RunSource

_MOST_FAULTS = 20
_WRITERS = {
    "parquet": (write_parquet, "transcripts"),
    "atif": (write_atif, "atif"),
    "otel": (write_otel, "traces.jsonl"),
    "perfetto": (write_perfetto, "perfetto.json"),
}


def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or its folder of records.")],
    parquet: Annotated[
        bool, typer.Option("--parquet", help="A table in the columns of Inspect Scout's transcripts, with tokens.")
    ] = False,
    atif: Annotated[
        bool, typer.Option("--atif", help="A file for each conversation in Harbor's format (ATIF).")
    ] = False,
    otel: Annotated[
        bool, typer.Option("--otel", help="A file of OTLP traces, as JSON, after OpenTelemetry's GenAI conventions.")
    ] = False,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="The timeline as a file for ui.perfetto.dev (Chrome's trace JSON).")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write into (`converted`, in the run's folder).")] = None,
) -> None:
    """Convert a run's records into what other programs read.

    Nothing of the run is changed. The last line is a JSON object with the paths and the number of conversations.
    """
    chosen = {"parquet": parquet, "atif": atif, "otel": otel, "perfetto": perfetto}
    try:
        if not any(chosen.values()):
            raise ConfigError("nothing to write; give --parquet, --atif, --otel or --perfetto, or several of them")
        records = open_records(folder)
        source = RunSource(records)
        into = _own_place(_run_folder(folder)) if out is None else out
        written: dict[str, str] = {}
        count = 0
        for name in (name for name, is_chosen in chosen.items() if is_chosen):
            write, place = _WRITERS[name]
            count = write(source, into / place)
            written[name] = str(into / place)
    except MultiTurnError as error:
        refuse(error)
    except OSError as error:
        fail(f"cannot write there ({error}); name another folder with --out", status=2)
    for fault in records.faults[:_MOST_FAULTS]:
        print(f"not read: {printable(fault)}", file=sys.stderr)
    if (left := len(records.faults) - _MOST_FAULTS) > 0:
        print(f"not read: {left} more of these", file=sys.stderr)
    print(json.dumps({"conversations": count, "faults": len(records.faults), **written}))


def _own_place(run: Path) -> Path:
    """Return the folder `converted` of a run, into which nothing leads out of it.

    Raises:
        ConfigError: It is, or holds, a link or a file that is not plain: the folder's author chose where it leads.
    """
    place = run / "converted"
    for path in [place, *(place.rglob("*") if place.is_dir() and not place.is_symlink() else [])]:
        if os.path.lexists(path) and (path.is_symlink() or not (path.is_file() or path.is_dir())):
            raise ConfigError(f"{str(path)!r} is no plain file and no folder; remove it, or name a folder with --out")
    return place


def _run_folder(path: Path) -> Path:
    """Return the folder of the run that has this folder or file of records."""
    folder = path if path.is_dir() else path.parent
    return folder.resolve().parent if folder.resolve().name == "records" else folder
