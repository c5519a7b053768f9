"""Make the rows of one-place mistakes in installed packages that ship their tests.

    python recipes/swe/prepare_data.py --out DIR --packages toolz networkx [--count 64] [--test-count 16] [--seed N]

Each package is installed beside the trainer (`pip install --no-deps NAME`), with its tests in it. A task is a mutation
that some of its tests notice, and whose repair the verdict pays; to find them, the tests are run in the sandbox. With
`--smoke`, six tasks of toolz are drawn, and with `--model` a tiny model is made that knows their repairs by heart.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.mini_swe import MiniSettings, check_installed
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows
from verl_multiturn.task_sets.swe.draw import draw_tasks
from verl_multiturn.task_sets.swe.tasks import SweTask

_SMOKE_TRAIN, _SMOKE_TEST = 4, 2


def row(task: SweTask, settings: MiniSettings, hide_tests: bool) -> Row:
    """Return the row of a task.

    Args:
        task: The task.
        settings: Settings of the agent.
        hide_tests: Whether the model's tree is without the package's tests.
    """
    return make_row(
        "swe",
        task.statement,
        "",
        ability="code",
        task=task.model_dump_json(),
        agent=asdict(settings),
        hide_tests=hide_tests,
    )


async def draw_all(packages: list[str], count: int, seed: int) -> list[SweTask]:
    """Return so many tasks of each package, one package after the other."""
    drawn = []
    for package in packages:
        tasks, became = await draw_tasks(package, count, seed)
        guarded = {"tests": sum(task.tests for task in tasks), "guarded": sum(len(task.twins) for task in tasks)}
        print(json.dumps({"package": package, **became, **guarded}), flush=True)
        drawn.append(tasks)
    return [task for same in zip(*drawn, strict=True) for task in same]


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--packages", nargs="+", required=True, metavar="NAME", help="installed packages with tests")
    parser.add_argument("--count", type=int, default=64, help="tasks of each package to train on (%(default)s)")
    parser.add_argument("--test-count", type=int, default=16, help="tasks of each package to test on (%(default)s)")
    parser.add_argument("--config", default="mini.yaml", help="mini-swe-agent's configuration (%(default)s)")
    parser.add_argument("--step-limit", type=int, default=20, help="most turns of the model (%(default)s)")
    parser.add_argument("--command-timeout", type=float, default=180.0, help="seconds of a command (%(default)s)")
    parser.add_argument("--hide-tests", action="store_true", help="leave the tests out of the model's tree")
    parser.add_argument("--model", type=Path, help="with --smoke: where a tiny model is written")
    args = parser.parse_args()
    check_installed()
    if args.count < 1 or args.test_count < 1:
        raise ConfigError(f"--count {args.count}, --test-count {args.test_count}: expected 1 or more of each")
    count, tests = (_SMOKE_TRAIN, _SMOKE_TEST) if args.smoke else (args.count, args.test_count)
    tasks = asyncio.run(draw_all(args.packages, count + tests, args.seed))
    settings = MiniSettings(args.config, args.step_limit, args.command_timeout)
    if args.smoke and args.model is not None:
        from by_heart import make_model

        make_model(args.model, tasks, settings)
    rows = [row(task, settings, args.hide_tests) for task in tasks]
    split = count * len(args.packages)
    write_rows(args.out, {"train": rows[:split], "test": rows[split:]})


if __name__ == "__main__":
    prepare(main)
