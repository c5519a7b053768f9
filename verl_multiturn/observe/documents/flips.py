"""`flips_of`: the rows that flipped between evaluations, for the page, which shows their conversations side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.compare import Comparison, Pair, compare
from verl_multiturn.evaluation.plan import MANIFEST
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.records.read.files import folder_of


def flips_of(folders: Sequence[Path]) -> dict[str, Any] | None:
    """Return the rows that flipped from the first evaluation to each other one, and why some cannot be compared.

    Args:
        folders: Folders of records.

    Returns:
        `rows`, each with its `uid`, the numbers of the two folders (`dirs`) and how many of how many conversations were
        right in each (`right`), and `said`, a sentence for each other evaluation. None: the first is not an evaluation,
        or none of the others is.
    """
    # An evaluation's folder has its records below it.
    owners = [folder.parent if folder_of(folder.parent) == folder else folder for folder in folders]
    dirs = [number for number, owner in enumerate(owners) if (owner / MANIFEST).is_file()]
    if len(dirs) < 2:
        return None
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    first, *others = dirs
    for other in others:
        try:
            found = compare(read_results(owners[first]), read_results(owners[other]))
        except ConfigError as error:
            said.append(str(error))
        else:
            rows += [_row(pair, [first, other]) for pair in found.flipped]
            said.append(_sentence(found))
    return {"rows": rows, "said": said}


def _row(pair: Pair, dirs: list[int]) -> dict[str, Any]:
    right = [[row.right, len(row.samples)] for row in pair]
    return {"uid": str(pair.first.number), "data_source": pair.first.data_source, "dirs": dirs, "right": right}


def _sentence(found: Comparison) -> str:
    difference = found.difference
    models = [each.evaluation.model.hash for each in (found.first, found.second)]
    return (
        f"{models[1]} less {models[0]}: {difference.mean:+.3f} over {difference.rows} rows, of which "
        f"{difference.differ} differ, p {difference.p:.2g}; "
        f"{len(found.flipped)} rows flipped"
    )
