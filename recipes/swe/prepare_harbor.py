"""Write rows of a published SWE data set as tasks in Harbor's form, and a row of verl's parquet for each.

    python recipes/swe/prepare_harbor.py --out DIR --data-set swe_gym|r2e_gym|swe_rebench [--source FILE] [--count N]

The tasks go to DIR/tasks, a folder each; every node needs them at this path. Their images are the data set's.
`--source` is a local file with the data set's columns, or another name on the hub. `docs/write/swe.md` has the contents
of a task.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.tasks.write import write_folder
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, read_splits, write_rows
from verl_multiturn.task_sets.swe.images import DATA_SETS, UnusableRowError, task_of_row

_DEFAULT = "published"
_SHOWN = 20


def write_tasks(folder: Path, kind: str, entries: Sequence[Any], split: str, names: set[str]) -> list[Row]:
    """Write the tasks of a split, and return its rows; print of which rows no task can be made, and why.

    Args:
        folder: The folder for the tasks.
        kind: Name of the data set.
        entries: Rows of the data set.
        split: The split, for errors.
        names: Names of the tasks that are written, of all splits; those of this one are added.

    Raises:
        ConfigError: A row lacks a column, two rows have one name, or no row remains.
    """
    rows: list[Row] = []
    left_out = 0
    for number, entry in enumerate(entries):
        where = f"{kind}, {split} row {number}"
        try:
            name, task = task_of_row(kind, entry, where)
        except UnusableRowError as error:
            left_out += 1
            if left_out <= _SHOWN:
                print(f"left out {error}", flush=True)
            continue
        if name in names:
            raise ConfigError(f"{where}: an earlier row is {name!r}, too, and would become this one; leave one out")
        names.add(name)
        write_folder(folder / name, task)
        rows.append(
            make_row(f"harbor/{kind}", task.instruction, "", ability="code", harbor=str((folder / name).resolve()))
        )
    print(json.dumps({"split": split, "tasks": len(rows), "left_out": left_out}), flush=True)
    if not rows:
        raise ConfigError(f"{kind}, {split}: no task can be made of any of {len(entries)} rows; name other rows")
    return rows


def main() -> None:
    """Write `train.parquet`, `test.parquet` and the tasks."""
    parser = arguments(__doc__ or "", _DEFAULT)
    parser.add_argument("--data-set", choices=sorted(DATA_SETS), default="swe_gym", help="(default: %(default)s)")
    parser.add_argument("--count", type=int, default=0, help="the most rows to train on; 0: all (%(default)s)")
    args = parser.parse_args()
    if args.smoke:
        raise ConfigError("--smoke: tasks of this variant need images, and a smoke run has none; leave --variant out")
    if args.count < 0:
        raise ConfigError(f"--count {args.count}: expected 0 or more")
    data_set = DATA_SETS[args.data_set]
    source = data_set.source if args.source == _DEFAULT else args.source
    entries = read_splits(source, splits=(data_set.split, data_set.split))
    chosen = {"train": entries["train"], "test": entries["test"]}
    if args.count:
        chosen["train"] = [chosen["train"][number] for number in range(min(args.count, len(chosen["train"])))]
    folder, names = args.out / "tasks", set[str]()
    write_rows(
        args.out, {split: write_tasks(folder, args.data_set, rows, split, names) for split, rows in chosen.items()}
    )


if __name__ == "__main__":
    prepare(main)
