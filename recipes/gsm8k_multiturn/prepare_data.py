"""Make the rows of GSM8K: the question, its answer, and the tool that checks answers.

    python recipes/gsm8k_multiturn/prepare_data.py --out DIR [--source openai/gsm8k] [--smoke] [--no-tool]
        [--interaction NAME]

A source has the columns `question` and `answer`. The last line of an answer has the form `#### 42`.
"""

from __future__ import annotations

from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, read_splits, tool_call, write_rows
from verl_multiturn.tools.gsm8k import parse_answer

TOOL = "calc_gsm8k_reward"
SYSTEM = "You solve grade-school mathematics problems. Reason step by step, and end with the answer as `#### <number>`."
SYSTEM_TOOL = (
    f"{SYSTEM} Before you give it, check it at least once with the tool `{TOOL}`; when it is wrong, think again."
)


def row(entry: dict[str, Any], tool: bool, user: str | None = None, **extra_info: Any) -> Row:
    """Return the row of a problem.

    Args:
        entry: A row of the source.
        tool: Whether the row has the tool.
        user: Name of the simulated user who judges the answers; None: there is none.
        extra_info: Other fields of `extra_info`.

    Raises:
        ConfigError: The entry has no question, or its answer has no number.
    """
    number = parse_answer(entry["answer"]) if isinstance(entry.get("answer"), str) else None
    if number is None or not isinstance(entry.get("question"), str):
        raise ConfigError(
            f"a row of the source is {entry!r:.200}; expected a `question`, and an `answer` that ends in `#### 42`; "
            "convert or drop it"
        )
    truth = str(number)
    kwargs: dict[str, Any] = {"tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": truth}}}} if tool else {}
    if user is not None:
        kwargs |= {"interaction": user, "interaction_kwargs": {"query": entry["question"], "ground_truth": truth}}
    return make_row(
        "openai/gsm8k",
        entry["question"],
        truth,
        system=SYSTEM_TOOL if tool else SYSTEM,
        ability="math",
        question=entry["question"],
        answer=entry["answer"],
        **kwargs,
        **extra_info,
    )


def smoke_rows(start: int, size: int, tool: bool, user: str | None = None) -> list[Row]:
    """Make problems, each with a demonstration of the conversation.

    Args:
        start: Number of the first problem. Problems with other numbers are other problems.
        size: How many problems to make.
        tool: Whether the rows have the tool.
        user: Name of the simulated user of the rows; None: there is none.
    """
    things = ("pens", "eggs", "cups", "nuts")
    rows = []
    for i in range(start, start + size):
        boxes, each, thing = 2 + i % 5, 3 + i, things[i % 4]
        total = boxes * each
        question = f"{boxes} boxes hold {each} {thing} each. How many {thing} are that?"
        worked = f"{boxes} * {each} = {total}."
        said = [f"{worked}\n{tool_call(TOOL, {'answer': str(total)})}", f"#### {total}"]
        entry = {"question": question, "answer": f"{worked}\n#### {total}"}
        rows.append(row(entry, tool, user, demonstration=said if tool else [f"{worked}\n#### {total}"]))
    return rows


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", "openai/gsm8k")
    parser.add_argument("--no-tool", action="store_true", help="the baseline: no tool, and none in the prompt")
    parser.add_argument("--interaction", metavar="NAME", help="the simulated user who judges the answers")
    args = parser.parse_args()
    tool = not args.no_tool
    if args.smoke:
        splits = {"train": smoke_rows(0, 8, tool, args.interaction), "test": smoke_rows(8, 4, tool, args.interaction)}
    else:
        entries = read_splits(args.source, "main")
        splits = {split: [row(entry, tool, args.interaction) for entry in rows] for split, rows in entries.items()}
    write_rows(args.out, splits, args.tools if tool else None)


if __name__ == "__main__":
    prepare(main)
