"""Make the rows and, if it does not exist yet, the warm-started model in the folder `model` beside DIR.

    python recipes/smollm2/prepare_data.py --out DIR [--smoke] [--no-tool] [--seed 0]

The test rows are the same for every training seed, with and without the tool.
"""

from __future__ import annotations

from typing import Any

from arithmetic import make_messages, make_test_entries, make_train_entries

from verl_multiturn.runs.data import Row, arguments, make_row, prepare, seed_option, write_rows

TRAIN_SIZE = 2000
WARM_START_STEPS = 40


def make_rows(entries: list[dict[str, Any]], tool: bool) -> list[Row]:
    """Return the rows of entries of `arithmetic`.

    Args:
        entries: The entries.
        tool: Whether the rows have the calculator.
    """
    return [
        make_row(
            f"reasoning_gym/{entry['metadata']['source_dataset']}",
            make_messages(entry["question"], tool),
            entry["answer"],
            ability="math",
            question=entry["question"],
            answer=entry["answer"],
        )
        for entry in entries
    ]


def main() -> None:
    """Write `train.parquet` and `test.parquet`, and the model if it does not exist yet."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--no-tool", action="store_true", help="the baseline: no tool, and none in the prompt")
    parser.add_argument("--seed", type=seed_option, default=0, help="of the training rows; below 9,000,000")
    args = parser.parse_args()
    tool = not args.no_tool
    train, test = make_train_entries(40 if args.smoke else TRAIN_SIZE, args.seed), make_test_entries()
    splits = {"train": make_rows(train, tool), "test": make_rows(test[:5] if args.smoke else test, tool)}
    model = args.out.parent / "model"
    if not (model / "model.safetensors").is_file():
        import warm_start  # loads torch

        warm_start.train(model, tool, 12 if args.smoke else WARM_START_STEPS)
    write_rows(args.out, splits, args.tools if tool else None)


if __name__ == "__main__":
    prepare(main)
