"""Write tasks for a shell as verl's parquet, a row for each task in Harbor's form.

    python recipes/terminal/prepare_data.py --out DIR --tools recipes/terminal/tools.yaml [--source FOLDER] [--harbor]

`--source made` (the default) writes tasks of its own, drawn by seed, into DIR/tasks. A folder is one task, or has tasks
in it. Each task is checked in the sandbox: its untouched tree is not paid, and its solution is. One that needs an image
is excluded, and named; with `--harbor` the rows are for Harbor's trials, which have images, and nothing is checked.
`--smoke` makes eight tasks, and with `--model` a tiny model that has their solutions by heart.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from made_tasks import draw_tasks, write_tasks

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.harbor.tasks.check import check_folders
from verl_multiturn.harnesses.harbor.tasks.folder import folders_below
from verl_multiturn.harnesses.harbor.tasks.tool import TaskBash
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows
from verl_multiturn.tools.loading.registry import load_tools
from verl_multiturn.verdicts.task import Task

MADE = "made"
SYSTEM_PROMPT = (
    "You do a task in a Linux shell. Your only tool is bash: each call runs one command in /app. Look around first, "
    "then do what is asked, and check the result. When it is done, say so in one sentence, without a call."
)
_SMOKE_TRAIN, _SMOKE_TEST = 6, 2
_SHOWN = 20


def row(folder: Path, instruction: str, task: Task | None) -> Row:
    """Return the row of a task.

    Args:
        folder: The task's folder.
        instruction: The task's prompt.
        task: The task as the tool `bash` knows it; None for a row of Harbor's.
    """
    kwargs = {} if task is None else {"tools_kwargs": {"bash": {"create_kwargs": {"task": task.model_dump_json()}}}}
    return make_row(
        "harbor/terminal",
        instruction,
        "",
        system=SYSTEM_PROMPT,
        ability="terminal",
        tools=None if task is None else ["bash"],
        harbor=str(folder.resolve()),
        **kwargs,
    )


def bash_of(tools: Path | None) -> TaskBash:
    """Return the tool that the rows are for.

    Raises:
        ConfigError: No file is named, or it has no such tool.
    """
    found = load_tools(tools).get("bash") if tools is not None else None
    if not isinstance(found, TaskBash):
        raise ConfigError(
            f"--tools {tools}: expected a file with the tool bash of the class "
            "verl_multiturn.harnesses.harbor.tasks.tool.TaskBash; name recipes/terminal/tools.yaml, or give --harbor"
        )
    return found


def checked_rows(folders: Sequence[Path], bash: TaskBash, bases: Sequence[str]) -> list[Row]:
    """Return the rows of those tasks that can be played in a workspace, and print why others cannot."""
    good, refused = asyncio.run(check_folders(folders, bash.workspaces, bases))
    for path, why in list(refused.items())[:_SHOWN]:
        print(f"left out {path.name}: {why}", flush=True)
    guards = Counter(task.guard or "unguarded" for _, task in good.values())
    print(json.dumps({"tasks": len(good), "left_out": len(refused), **guards}), flush=True)
    if not good:
        raise ConfigError(f"none of {len(folders)} tasks can be played in a workspace; run them with --variant harbor")
    return [row(path, folder.instruction, task) for path, (folder, task) in good.items()]


def harbor_rows(folders: Sequence[Path]) -> list[Row]:
    """Return rows for Harbor's trials."""
    try:
        return [row(each, (each / "instruction.md").read_text(encoding="utf-8"), None) for each in folders]
    except (OSError, ValueError) as error:
        raise ConfigError(f"a task has no instruction: {error}; mend it") from None


def split_rows(rows: Sequence[Row], tests: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of both splits; those of the test are drawn.

    Raises:
        ConfigError: No row would remain to train on.
    """
    if not 0 < tests < len(rows):
        raise ConfigError(f"--test-count {tests}: expected 1 or more, and less than all {len(rows)} tasks")
    held_out = set(random.Random(seed).sample(range(len(rows)), tests))
    return {
        "train": [each for number, each in enumerate(rows) if number not in held_out],
        "test": [each for number, each in enumerate(rows) if number in held_out],
    }


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", MADE)
    parser.add_argument("--harbor", action="store_true", help="rows for Harbor's trials, whose tasks may have images")
    parser.add_argument("--bases", nargs="+", default=[], metavar="IMAGE", help="images that this machine stands for")
    parser.add_argument("--count", type=int, default=1024, help="made tasks to train on (%(default)s)")
    parser.add_argument("--test-count", type=int, default=100, help="tasks to test on (%(default)s)")
    parser.set_defaults(seed=42)
    parser.add_argument("--model", type=Path, help="with --smoke: where a tiny model is written")
    args = parser.parse_args()
    if args.count < 1:
        raise ConfigError(f"--count {args.count}: expected 1 or more")
    if args.smoke and args.harbor:
        raise ConfigError("--smoke: a smoke run plays its tasks in workspaces, without Harbor; leave --variant out")
    train, tests = (_SMOKE_TRAIN, _SMOKE_TEST) if args.smoke else (args.count, args.test_count)
    if args.smoke or args.source == MADE:
        made = draw_tasks(train + tests, args.seed)
        folders = write_tasks(args.out / "tasks", made)
    else:
        folders = folders_below(Path(args.source).expanduser())
    rows = harbor_rows(folders) if args.harbor else checked_rows(folders, bash_of(args.tools), args.bases)
    if args.smoke and args.model is not None:
        from smoke_model import make_model

        make_model(args.model, made, bash_of(args.tools), SYSTEM_PROMPT)
    write_rows(args.out, split_rows(rows, tests, args.seed), None if args.harbor else args.tools)


if __name__ == "__main__":
    prepare(main)
