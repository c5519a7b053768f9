"""Write the recipe's rows as verl's parquet: `python recipes/repair/prepare_data.py --out DIR [--seed 0]`."""

from __future__ import annotations

from typing import Any

import pandas as pd
from repositories import DATA_SOURCE, Repository, make_messages, make_repositories

from verl_multiturn.runs.data import arguments, prepare

# The warm start used seeds from 10_000_000 on. The held-out repositories are the same for every training seed.
_TEST_SEED = 9_000_000


def make_rows(split: str, repositories: list[Repository]) -> list[dict[str, Any]]:
    """Make rows in verl's schema.

    Args:
        split: Name of the split, for `extra_info`.
        repositories: One for each row.
    """
    return [
        {
            "data_source": DATA_SOURCE,
            "ability": "code",
            "prompt": make_messages(),
            "reward_model": {"style": "rule", "ground_truth": each.wrong},
            "extra_info": {
                "split": split,
                "index": index,
                "names": list(each.names),
                "inputs": list(each.inputs),
            },
        }
        for index, each in enumerate(repositories)
    ]


def main() -> None:
    """Write `train.parquet` and `test.parquet`; no repository is in both."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--train-size", type=int, default=2048)
    parser.add_argument("--test-size", type=int, default=128)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    held_out = list(dict.fromkeys(make_repositories(2 * args.test_size, _TEST_SEED)))[: args.test_size]
    drawn = [each for each in make_repositories(2 * args.train_size, args.seed) if each not in set(held_out)]
    for split, repositories in (("train", drawn[: args.train_size]), ("test", held_out)):
        pd.DataFrame(make_rows(split, repositories)).to_parquet(args.out / f"{split}.parquet")


if __name__ == "__main__":
    prepare(main)
