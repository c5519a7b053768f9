"""Make rows of competition problems: DAPO-Math-17k for training, AIME 2024 and 2025 for validation.

    python recipes/retool/prepare_data.py --out DIR [--source SOURCE] [--validation SOURCE]... [--smoke]

A source is a local file or a hub name. Its rows have verl's columns (`prompt` and `reward_model.ground_truth`, as in
DAPO-Math-17k), or `problem` and `answer` (AIME 2025), or `Problem` and `Answer` (AIME 2024). DAPO-Math-17k repeats each
problem a hundred times; the rows have each problem once. The model has a code interpreter as its tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import (
    Row,
    arguments,
    benchmark_names,
    make_row,
    prepare,
    problem_and_answer,
    read_splits,
    tool_call,
    write_rows,
)

TOOL = "code_interpreter"
SOURCE = "BytedTsinghua-SIA/DAPO-Math-17k"
VALIDATION = ("Maxwell-Jia/AIME_2024", "yentinglin/aime_2025")
SYSTEM = (
    f"You solve problems of competition mathematics. Reason step by step, and compute with the tool `{TOOL}`. "
    "End with the answer in \\boxed{}."
)
_COLUMNS = (("problem", "answer"), ("Problem", "Answer"))
# The texts that begin and end DAPO's prompts. They ask for another form of the answer, so they are removed.
_DAPO_BEGINS, _DAPO_ENDS = "Solve the following math problem", "Remember to put your answer"


def row(problem: str, answer: str, data_source: str, **extra_info: Any) -> Row:
    """Return the row of a problem."""
    return make_row(data_source, problem, answer, system=SYSTEM, ability="math", tools=[TOOL], **extra_info)


def bare_problem(text: str) -> str:
    """Return a problem without DAPO's instructions before and after it."""
    paragraphs = text.strip().split("\n\n")
    if len(paragraphs) > 2 and paragraphs[0].startswith(_DAPO_BEGINS) and paragraphs[-1].startswith(_DAPO_ENDS):
        paragraphs = paragraphs[1:-1]
    return "\n\n".join(paragraphs).strip()


def problem_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return the problem and the answer of a source's row.

    Args:
        entry: The row.

    Raises:
        ConfigError: The row has none of the known forms.
    """
    if "prompt" in entry and "reward_model" in entry:
        problem, answer = problem_and_answer(entry["prompt"][-1]["content"], entry["reward_model"]["ground_truth"])
        return bare_problem(problem), answer
    for asked, answered in _COLUMNS:
        if asked in entry and answered in entry:
            problem, answer = problem_and_answer(entry[asked], entry[answered])
            return bare_problem(problem), answer
    raise ConfigError(
        f"a row of the source has the columns {sorted(entry)}; expected prompt and reward_model, or one of the pairs "
        f"{', '.join('/'.join(pair) for pair in _COLUMNS)}; convert it first"
    )


def rows_of(source: str, data_source: str) -> list[Row]:
    """Return all rows of a source that has one split, with each problem once per benchmark.

    Args:
        source: Local file or hub name.
        data_source: Name of the rows. If the source has several benchmarks, each keeps its own name.

    Raises:
        ConfigError: The source cannot be read, or a row has an unknown form.
    """
    entries = read_splits(source, splits=("train", "train"), held_out=0)["train"]
    names = benchmark_names(entries, data_source)
    answers = {(name, problem_of(entry)[0]): problem_of(entry)[1] for name, entry in zip(names, entries, strict=True)}
    return [row(problem, answer, name) for (name, problem), answer in answers.items()]


def smoke_problems(start: int, size: int) -> list[tuple[str, str, str]]:
    """Make problems, each with its text, the code that solves it, and the answer.

    Args:
        start: Number of the first problem. Problems with other numbers are other problems.
        size: Number of problems.
    """
    problems = []
    for i in range(start, start + size):
        base, exponent, modulus = 3 + i, 20 + 3 * i, 7 + 2 * i
        text = f"Find the remainder when {base}^{exponent} is divided by {modulus}."
        problems.append((text, f"print(pow({base}, {exponent}, {modulus}))", str(pow(base, exponent, modulus))))
    return problems


def worked(code: str, answer: str) -> list[str]:
    """Return the assistant's turns for a made problem: a tool call, then the answer.

    Args:
        code: Code that solves the problem.
        answer: The answer.
    """
    return [
        f"I compute the power modulo the divisor.\n{tool_call(TOOL, {'code': code})}",
        f"The remainder is \\boxed{{{answer}}}.",
    ]


def smoke_rows(start: int, size: int) -> list[Row]:
    """Return the rows of made problems, each with a demonstration."""
    return [
        row(text, answer, "math_dapo", demonstration=worked(code, answer))
        for text, code, answer in smoke_problems(start, size)
    ]


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", SOURCE)
    parser.add_argument(
        "--validation", action="extend", nargs="+", help=f"sources of the test split (default: {VALIDATION})"
    )
    args = parser.parse_args()
    if args.smoke:
        splits = {"train": smoke_rows(0, 8), "test": smoke_rows(8, 4)}
    else:
        splits = {
            "train": rows_of(args.source, "math_dapo"),
            "test": [
                row
                for source in args.validation or VALIDATION
                for row in rows_of(source, f"math/{Path(source).stem.lower()}")
            ],
        }
    write_rows(args.out, splits, args.tools)


if __name__ == "__main__":
    prepare(main)
