"""Write the tasks of environments of verifiers as verl's parquet, a row for each.

    python recipes/hub/prepare_data.py --out DIR --python .venv-verifiers/bin/python --envs '{"shop": {…}}' --paths DIR

The tasks are loaded by verifiers' own Python. Of each environment `--count` are for training and the next
`--test-count` for validation; of a task set that has fewer, an eighth.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import yaml

from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses.verifiers.runner import VerifiersRunner
from verl_multiturn.processes.interpreters import check_python
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows

_SHARE = 8
"""The part of a task set that is for validation, where it has fewer tasks than requested."""


async def tasks_of(settings: ProxySettings, count: int, tests: int) -> dict[str, list[Row]]:
    """Return the rows of both splits."""
    runner = VerifiersRunner(settings, str(settings.python))
    found: dict[str, list[Row]] = {"train": [], "test": []}
    try:
        for name in settings.verifiers.envs:
            tasks = await runner.rows(name, 0, count + tests)
            if len(tasks) < 2:
                raise ConfigError(f"the environment {name!r} has {len(tasks)} tasks, expected 2 or more; take another")
            split = len(tasks) - min(tests, max(1, len(tasks) // _SHARE))
            train, held_out = tasks[:split], tasks[split:]
            print(json.dumps({"env": name, "train": len(train), "test": len(held_out)}), flush=True)
            found["train"] += [row(name, task) for task in train]
            found["test"] += [row(name, task) for task in held_out]
    finally:
        await runner.aclose()
    return found


def row(env: str, task: dict[str, Any]) -> Row:
    """Return the row of a task."""
    named = {"env": env, "task": json.dumps(task["task"], ensure_ascii=False)}
    return make_row(f"verifiers/{env}", task["prompt"] or task["name"], "", ability="hub", verifiers=named)


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--python", required=True, help="verifiers' Python")
    parser.add_argument("--envs", type=yaml.safe_load, required=True, help="the environments, as JSON or YAML")
    parser.add_argument("--paths", nargs="*", default=[], help="folders of task sets")
    parser.add_argument("--count", type=int, default=256, help="tasks of each environment to train on (%(default)s)")
    parser.add_argument("--test-count", type=int, default=16, help="tasks of each to test on (%(default)s)")
    args = parser.parse_args()
    if args.count < 1 or args.test_count < 1:
        raise ConfigError(f"--count {args.count}, --test-count {args.test_count}: expected 1 or more of each")
    check_python(args.python, "--python")
    settings = ProxySettings.model_validate(
        {"agent": "verifiers", "python": args.python, "verifiers": {"envs": args.envs, "paths": args.paths}}
    )
    write_rows(args.out, asyncio.run(tasks_of(settings, args.count, args.test_count)))


if __name__ == "__main__":
    prepare(main)
