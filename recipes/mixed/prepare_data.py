"""Make a data set with four kinds of tasks, each with its own tool. The code of other recipes makes the rows.

    python recipes/mixed/prepare_data.py --out DIR [--source KIND=SOURCE,KIND=SOURCE] [--most N] [--smoke]

| kind   | rows of           | tool                | its source                                          |
|--------|-------------------|---------------------|-----------------------------------------------------|
| gsm8k  | `gsm8k_multiturn` | `calc_gsm8k_reward` | a data set                                          |
| search | `search_r1`       | `search`            | a data set                                          |
| sql    | `text2sql`        | `sql`               | a data set with SkyRL-SQL's columns                 |
| gym    | `reasoning_gym`   | `python`            | names of its tasks with `+` between; they are made  |

`--source` changes the sources of some kinds. A kind with an empty source is omitted.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, read_splits, tool_call, write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from other_recipe import recipe  # found by the line above

SOURCES = {
    "gsm8k": "openai/gsm8k",
    "search": "PeterJinGo/nq_hotpotqa_train",
    "sql": "NovaSky-AI/SkyRL-SQL-653-data-newfmt",
    "gym": "gcd+lcm+products+prime_factorization+count_primes+base_conversion",
}
PYTHON = "python"
SYSTEM = (
    f"You solve the task. Compute with the tool `{PYTHON}`: what your code prints comes back. "
    "Give the answer inside <answer> and </answer>."
)
_TEST_SEED = 9_000_000


def gym_row(task: str, entry: dict[str, Any], **extra_info: Any) -> Row:
    """Return the row of an entry of reasoning_gym.

    Args:
        task: Name of the task, for example `gcd`.
        entry: The entry, with `question`, `answer` and `metadata`.
        extra_info: Other fields of `extra_info`.
    """
    truth = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return make_row(
        f"reasoning_gym/{task}",
        entry["question"],
        json.dumps(truth, default=str),
        system=SYSTEM,
        ability="gym",
        tools=[PYTHON],
        **extra_info,
    )


def gym_rows(tasks: str, size: int, seed: int) -> Iterator[Row]:
    """Yield rows of tasks of reasoning_gym, one task after the other in turn.

    Args:
        tasks: Names of the tasks with `+` between them.
        size: Number of rows of all tasks together.
        seed: Seed of the entries.

    Raises:
        ConfigError: reasoning_gym does not know a task.
    """
    import reasoning_gym

    made = {}
    for task in tasks.split("+"):
        try:
            made[task] = reasoning_gym.create_dataset(task, size=size, seed=seed)
        except ValueError as error:
            raise ConfigError(f"{task!r} is no task of reasoning_gym: {error}") from error
    for index in range(size):
        task = list(made)[index % len(made)]
        yield gym_row(task, made[task][index])


def gym_splits(tasks: str, sizes: dict[str, int]) -> dict[str, list[Row]]:
    """Make the rows of tasks of reasoning_gym for both splits.

    With small numbers, the same question can come up under two seeds. Questions of the test split are dropped from the
    train split, which may then be smaller than requested.

    Args:
        tasks: Names of the tasks with `+` between them.
        sizes: Number of rows by split, `train` and `test`.
    """
    test = list(gym_rows(tasks, sizes["test"], _TEST_SEED))
    held_out = {row["prompt"][-1]["content"] for row in test}
    train = [row for row in gym_rows(tasks, sizes["train"], 0) if row["prompt"][-1]["content"] not in held_out]
    return {"train": train, "test": test}


def real_rows(sources: dict[str, str], tools: Path | None, most: int) -> dict[str, list[Row]]:
    """Make the rows of all kinds from their sources.

    Args:
        sources: Source by kind; a kind with an empty source is omitted.
        tools: Tool YAML, whose `root` is the folder of the SQL databases; None: the current folder.
        most: Largest number of rows of each kind in the train split. The test split has at most a tenth of it, and at
            least one row. Rows beyond the limit are dropped at random, always the same ones.

    Raises:
        ConfigError: A source cannot be read or has unknown columns, or a database is missing.
    """
    limits = {"train": most, "test": max(1, most // 10)}
    splits: dict[str, list[Row]] = {"train": [], "test": []}
    for kind, source in sources.items():
        if not source:
            continue
        if kind == "gym":
            entries: Mapping[str, Sequence[Any]] = gym_splits(source, limits)
        elif kind == "gsm8k":
            entries = read_splits(source, "main")
        elif kind == "search":
            entries = read_splits(source)
        else:
            entries = read_splits(source, splits=("train", "validation"))
        for split, limit in limits.items():
            chosen = entries[split]
            if len(chosen) > limit:
                chosen = [chosen[index] for index in random.Random(0).sample(range(len(chosen)), limit)]
            splits[split] += [row_of(kind, entry, tools) for entry in chosen]
    if sources.get("sql"):
        text2sql = recipe("text2sql")
        of_sql = {split: [each for each in rows if each["ability"] == "sql"] for split, rows in splits.items()}
        text2sql.check_databases(of_sql, text2sql.configured_root(tools))
    return splits


def row_of(kind: str, entry: Any, tools: Path | None) -> Row:
    """Return the row that the recipe of a kind makes from an entry. A `gym` entry is a row already."""
    if kind == "gsm8k":
        made: Row = recipe("gsm8k_multiturn").row(entry, True)
    elif kind == "search":
        made = recipe("search_r1").row(entry)
    elif kind == "sql":
        text2sql = recipe("text2sql")
        made = text2sql.row(entry, text2sql.configured_root(tools), "synsql")
    else:
        made = entry
    return made


def smoke_rows(folder: Path) -> dict[str, list[Row]]:
    """Return two train rows and one test row of each kind, from the other recipes' smoke rows."""
    import reasoning_gym

    gym = []
    for entry in reasoning_gym.create_dataset("gcd", size=3, seed=1):
        numbers = ", ".join(map(str, entry["metadata"]["numbers"]))
        code = f"import math\nprint(math.gcd({numbers}))"
        said = [tool_call(PYTHON, {"code": code}), f"<answer>{entry['answer']}</answer>"]
        gym.append(gym_row("gcd", entry, demonstration=said))
    kinds = [
        recipe("gsm8k_multiturn").smoke_rows(0, 3, True),
        recipe("search_r1").smoke_rows()[:3],
        list(recipe("text2sql").smoke_rows(folder / "databases"))[:3],
        gym,
    ]
    return {
        "train": [rows[index] for index in (0, 1) for rows in kinds],
        "test": [rows[2] for rows in kinds],
    }


def smoke_tools(folder: Path, tools: Path) -> dict[str, Any]:
    """Return the tool YAML with search and SQL tools that use an index and databases in a folder.

    Args:
        folder: Folder for the search corpus. The databases lie in its `databases`.
        tools: The recipe's tool YAML.
    """
    local = (recipe("search_r1").write_corpus(folder), recipe("text2sql").make_tools(folder / "databases"))
    replaced = {"RetrievalTool": local[0], "SqlTool": local[1]}
    entries = yaml.safe_load(tools.read_text(encoding="utf-8"))["tools"]
    return {"tools": [replaced.get(entry["class_name"].rpartition(".")[2], entry) for entry in entries]}


def read_sources(given: str) -> dict[str, str]:
    """Return the source of each kind: the default, or the one given by `--source`.

    Args:
        given: Value of `--source`, for example `gsm8k=rows.jsonl,sql=`.

    Raises:
        ConfigError: A part does not have the form KIND=SOURCE, or the kind is unknown.
    """
    sources = dict(SOURCES)
    for part in filter(None, given.split(",")):
        kind, equals, source = part.partition("=")
        if not equals or kind not in SOURCES:
            raise ConfigError(f"--source: {part!r}; expected KIND=SOURCE, where KIND is one of {sorted(SOURCES)}")
        sources[kind] = source
    return sources


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", "")
    parser.add_argument("--most", type=int, default=2000, help="rows of each kind (default: %(default)s)")
    args = parser.parse_args()
    args.tools = args.tools or Path(__file__).with_name("tools.yaml")
    if args.smoke:
        splits = smoke_rows(args.out)
        local = smoke_tools(args.out, args.tools)
        args.tools = args.out / "tools.yaml"
        args.tools.write_text(yaml.safe_dump(local, sort_keys=False), encoding="utf-8")
    else:
        splits = real_rows(read_sources(args.source), args.tools, args.most)
    write_rows(args.out, splits, args.tools)


if __name__ == "__main__":
    prepare(main)
