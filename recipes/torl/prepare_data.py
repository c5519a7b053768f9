"""Make rows of competition mathematics for text mode: the problem, and the answer that belongs in the box.

    python recipes/torl/prepare_data.py --out DIR [--source SOURCE] [--validation SOURCE]... [--prompt chat] [--smoke]

A source is a local file or folder, a hub name, or the address of a folder with `train.parquet` and `test.parquet`.
Forms of its rows:

- verl's own columns, as in ToRL's data (`prompt`, `reward_model.ground_truth`): the last message is the problem;
- `question` and `final_answer` (DeepMath-103K), `problem` and `answer` (DeepScaleR, AIME 2025), `Problem` and `Answer`
  (AIME 2024);
- two turns, the second with `ground_truth.value` (ORZ-57k).

Without `--validation`, the test split is the source's own; if it has none, some of its rows are held out. The train
split has each problem once, and none of the test split. If a test split has several benchmarks, distinguished by
`data_source`, each keeps its name and gets its own accuracy.

The prompt is ToRL's, for the template without turns that settings/torl.yaml sets. With `--prompt chat`, the prompt has
a system message instead, for a chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import (
    Row,
    arguments,
    benchmark_names,
    hold_out,
    make_row,
    prepare,
    problem_and_answer,
    read_splits,
    write_rows,
)

SOURCE = "https://github.com/GAIR-NLP/ToRL/raw/main/data/torl_data"
DATA_SOURCE = "math_torl"
HELD_OUT = 0.05  # share of the problems of a source without a test split
# For data sets on the hub that have only the split `train`.
ONE_SPLIT = ("train", "train")
SYSTEM = (
    "Solve the problem. Reason step by step, and compute with Python wherever it helps: write a ```python block, close "
    "it, and open an ```output block; what your code prints appears there. End with the answer in \\boxed{}."
)
PLAIN = (
    "Please integrate natural language reasoning with programs to solve the problem above, and put your final answer "
    "within \\boxed{}.\n"
)
"""ToRL's own text. It comes before the problem, as in ToRL's prompt."""
_COLUMNS = (("question", "final_answer"), ("problem", "answer"), ("Problem", "Answer"))


def row(problem: str, answer: str, source: str = DATA_SOURCE, *, plain: bool = False, **extra_info: Any) -> Row:
    """Return the row of a problem.

    Args:
        problem: The problem.
        answer: The answer.
        source: Name that chooses the reward.
        plain: Whether the prompt is ToRL's; otherwise it has a system message.
        extra_info: Other fields of `extra_info`.
    """
    if plain:
        return make_row(source, PLAIN + problem, answer, ability="math", **extra_info)
    return make_row(source, problem, answer, system=SYSTEM, ability="math", **extra_info)


def problem_of(entry: Any) -> tuple[str, str]:
    """Return the problem and the answer of a source's row.

    Args:
        entry: The row.

    Raises:
        ConfigError: The row has none of the known forms.
    """
    if isinstance(entry, Mapping):
        if "prompt" in entry and "reward_model" in entry:
            return problem_and_answer(entry["prompt"][-1]["content"], entry["reward_model"]["ground_truth"])
        for question, answer in _COLUMNS:
            if question in entry and answer in entry:
                return problem_and_answer(entry[question], entry[answer])
    turns = [entry["0"], entry["1"]] if isinstance(entry, Mapping) and {"0", "1"} <= set(entry) else entry
    if isinstance(turns, list) and len(turns) == 2 and "ground_truth" in turns[1]:
        return problem_and_answer(turns[0]["value"], turns[1]["ground_truth"]["value"])
    raise ConfigError(
        f"a row of the source is {entry!r:.200}; expected prompt and reward_model, one of the column pairs "
        f"{', '.join('/'.join(pair) for pair in _COLUMNS)}, or two turns with ground_truth; convert it first"
    )


def read(source: str) -> dict[str, Sequence[Any]]:
    """Read the rows of a source, under the keys `train` and `test`.

    `test` is empty if the source has only one split.

    Args:
        source: Local file or folder, hub name, or address of a folder with `train.parquet` and `test.parquet`.

    Raises:
        ConfigError: The source cannot be read.
    """
    if "://" not in source:
        try:
            return read_splits(source, held_out=0)
        except ConfigError:
            return read_splits(source, splits=ONE_SPLIT, held_out=0)
    import pandas

    try:
        return {
            split: pandas.read_parquet(f"{source}/{split}.parquet").to_dict("records") for split in ("train", "test")
        }
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source!r} cannot be read: {error}; download train.parquet and test.parquet from there, and give their "
            "folder with --data"
        ) from error


def rows_of(train: Iterable[Any], tested: Mapping[str, Sequence[Any]], plain: bool) -> dict[str, list[Row]]:
    """Make the rows of both splits.

    The train split has each problem once, and none of the test split. The test split has each problem once per
    benchmark; a problem that comes with two different answers counts as two. Without entries for the test split, some
    of the problems for the train split are held out for it.

    Args:
        train: Entries for the train split.
        tested: Entries for the test split, by the name of their set.
        plain: Whether the prompts are ToRL's; otherwise they have a system message.

    Raises:
        ConfigError: An entry has an unknown form.
    """
    answers = dict(map(problem_of, train))
    tests = {
        (name, *problem_of(entry)): None
        for source, entries in tested.items()
        for name, entry in zip(benchmark_names(entries, source), entries, strict=True)
    }
    if not tests:
        problems = list(answers)
        tests = {(DATA_SOURCE, problems[i], answers[problems[i]]): None for i in hold_out(len(problems), HELD_OUT)[1]}
    held_out = {problem for _, problem, _ in tests}
    return {
        "train": [row(*pair, plain=plain) for pair in answers.items() if pair[0] not in held_out],
        "test": [row(problem, answer, name, plain=plain) for name, problem, answer in tests],
    }


def smoke_rows(start: int, size: int) -> list[Row]:
    """Make problems, each with a demonstration: a block of code, then the answer.

    Args:
        start: Number of the first problem. Problems with other numbers are other problems.
        size: Number of problems.
    """
    rows = []
    for i in range(start, start + size):
        high, step = 20 + 7 * i, 2 + i % 4
        total = sum(range(0, high, step))
        said = [
            f"Add 0, {step}, ... below {high}.\n```python\nprint(sum(range(0, {high}, {step})))\n```\n```output",
            f"The sum is \\boxed{{{total}}}.",
        ]
        problem = f"What is the sum of all multiples of {step} from 0 to {high - 1}?"
        rows.append(row(problem, str(total), demonstration=said))
    return rows


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", SOURCE)
    parser.add_argument(
        "--validation", action="extend", nargs="+", default=[], help="sources of the test split, all rows of each"
    )
    parser.add_argument("--prompt", choices=("plain", "chat"), default="plain", help="of the rows (%(default)s)")
    args = parser.parse_args()
    if args.smoke:
        splits = {"train": smoke_rows(0, 8), "test": smoke_rows(8, 4)}
    else:
        found = read(args.source)
        tested: dict[str, list[Any]] = {DATA_SOURCE: [*found["test"]]}
        if args.validation:
            tested = {
                f"math/{Path(name).stem.lower()}": [entry for rows in read(name).values() for entry in rows]
                for name in args.validation
            }
        splits = rows_of(found["train"], tested, args.prompt == "plain")
    write_rows(args.out, splits, args.tools)


if __name__ == "__main__":
    prepare(main)
