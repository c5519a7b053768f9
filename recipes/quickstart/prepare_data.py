"""Write the quickstart's rows as verl's parquet: `python recipes/quickstart/prepare_data.py --out DIR [--seed 0]`."""

from __future__ import annotations

from typing import Any

import pandas as pd
from task import DATA_SOURCE, make_entries, make_examples, make_messages

from verl_multiturn.runs.data import arguments, prepare

# The warm start used seeds from 10_000_000 on. The test rows are the same for every training seed.
_TEST_SEED = 9_000_000
_EXAMPLE_SEED = 8_000_000


def make_rows(split: str, size: int, seed: int, examples: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Make rows in verl's schema.

    They name no tools, so they have all tools of the run.

    Args:
        split: Name of the split, for `extra_info`.
        size: Number of rows.
        seed: Seed of the tasks.
        examples: Messages with worked examples, put before each question.
    """
    return [
        {
            "data_source": DATA_SOURCE,
            "ability": "math",
            "prompt": make_messages(entry["question"], examples),
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"split": split, "index": index, "question": entry["question"], "answer": entry["answer"]},
        }
        for index, entry in enumerate(make_entries(size, seed))
    ]


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--train-size", type=int, default=2048)
    parser.add_argument("--test-size", type=int, default=128)
    parser.add_argument("--examples", type=int, default=0, help="worked examples before each question")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    examples = make_examples(args.examples, _EXAMPLE_SEED)
    for split, size, seed in (("train", args.train_size, args.seed), ("test", args.test_size, _TEST_SEED)):
        rows = make_rows(split, size, seed, examples)
        pd.DataFrame(rows).to_parquet(args.out / f"{split}.parquet")


if __name__ == "__main__":
    prepare(main)
