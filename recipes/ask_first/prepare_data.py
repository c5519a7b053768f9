"""Write the rows of `ask_first`: `python recipes/ask_first/prepare_data.py --out DIR [--seed 0]`."""

from __future__ import annotations

from dataclasses import asdict

from missing_number import SYSTEM_PROMPT, USER, Task, make_tasks

from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows

# The warm start used seeds from 10_000_000 on. The test rows are the same for every training seed.
_TEST_SEED = 9_000_000


def row(task: Task) -> Row:
    """Return the row of a task, with the user who knows the missing number.

    Args:
        task: The task.
    """
    kwargs = {**asdict(task), "names": list(task.names), "numbers": list(task.numbers)}
    return make_row(
        f"ask_first/{'missing' if task.missing else 'complete'}",
        task.question,
        str(task.answer),
        system=SYSTEM_PROMPT,
        ability="dialogue",
        interaction=USER,
        interaction_kwargs=kwargs,
        missing=task.missing,
    )


def main() -> None:
    """Write `train.parquet` and `test.parquet`. No question of the test split occurs in training."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--train-size", type=int, default=2048)
    parser.add_argument("--test-size", type=int, default=128)
    args = parser.parse_args()
    test = make_tasks(args.test_size, _TEST_SEED)
    held_out = {task.question for task in test}
    train = [task for task in make_tasks(args.train_size, args.seed) if task.question not in held_out]
    write_rows(args.out, {"train": [row(task) for task in train], "test": [row(task) for task in test]}, args.tools)


if __name__ == "__main__":
    prepare(main)
