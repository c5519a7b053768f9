"""The exported page: all that a filter leaves of some folders in one HTML file, opened from disk, without a server."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.observe.documents.documents import Documents, ids_of
from verl_multiturn.observe.view.page import exported_page
from verl_multiturn.paths import whole_file
from verl_multiturn.records.json_text import dumps

BLOCK = 64
"""Conversations that are packed together: siblings share their prompt, and the page unpacks only the shown ones."""


def check_target(file: Path) -> None:
    """Refuse a file that cannot be written, before the work.

    Raises:
        ConfigError: It is a folder, or its folder is not there or cannot be written to.
    """
    if file.is_dir():
        why = "it is a folder"
    elif not file.parent.is_dir():
        why = f"there is no folder {str(file.parent)!r}"
    elif not os.access(file.parent, os.W_OK | os.X_OK):
        why = f"the folder {str(file.parent)!r} is not yours to write to"
    else:
        return
    raise ConfigError(f"--export {str(file)!r} cannot be written ({why}); name a file in a folder that is there")


def export(documents: Documents, file: Path, where: str = "") -> dict[str, Any]:
    """Write the page, and return what is in it: its conversations, its size, and how much could not be read.

    Args:
        documents: The documents to show.
        file: The file, which is replaced; `check_target` checks this before the work.
        where: Filter; "": all conversations.

    Raises:
        ConfigError: The filter cannot be read, it leaves nothing, or the file cannot be written.
    """
    check_target(file)
    data: dict[str, bytes] = {}
    rows: list[dict[str, Any]] = []
    order: list[int] = []
    held: list[dict[str, Any]] = []
    ids: dict[int, set[int]] = {number: set() for number in range(len(documents.folders))}
    for row, record, joined in documents.every(where):
        document = documents.document(row, record, joined)
        rows.append(document.pop("row"))
        order.append(row["at"])
        held.append(document)
        ids[row["dir"]] |= ids_of([record])
        if len(held) == BLOCK:
            data[f"data-{len(rows) // BLOCK - 1}"] = _packed(held)
            held = []
    if not rows:
        raise ConfigError(f"no conversation holds {where!r}; give another --where, or none")
    if held:
        data[f"data-{len(rows) // BLOCK}"] = _packed(held)
    for number, step, validation in sorted({_step_of(row) for row in rows}):
        found = documents.timeline(number, step, validation, where)
        data[f"step-{number}-{step}-{int(validation)}"] = _packed(found)
    names = list(rows[0])
    places = sorted(
        range(len(rows)), key=order.__getitem__
    )  # the table has the index's order, the blocks that of files
    pieces = [None if (own := documents.pieces(number)) is None else own.of(ids[number]) for number in ids]
    data["data-base"] = _packed(
        {
            "meta": documents.meta() | {"count": len(rows)},
            "run": documents.run(),
            "findings": documents.findings(),
            "open": documents.open(),
            "table": {"names": names, "columns": [[rows[at][name] for at in places] for name in names]},
            "places": places,
            "block": BLOCK,
            "pieces": pieces,
        }
    )
    text = exported_page(data, f"verl-multiturn: {', '.join(documents.meta()['dirs'])}")
    try:
        with whole_file(file) as half:
            half.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--export {str(file)!r} cannot be written ({error}); name a file in a folder that is there"
        ) from None
    faults = len(documents.faults())
    return {"file": str(file), "conversations": len(rows), "bytes": file.stat().st_size, "faults": faults}


def _step_of(row: dict[str, Any]) -> tuple[int, int, bool]:
    step = row["trained_step"] if row["trained_step"] is not None else row["step"]
    return row["dir"], step, row["validation"]


def _packed(value: Any) -> bytes:
    return gzip.compress(dumps(value), 9, mtime=0)
