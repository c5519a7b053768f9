"""Make the rows: a question, the right answer, and the stock that the tool looks into.

PYTHONPATH=. python recipes/NAME/prepare_data.py --out DIR [--smoke] [--seed 0]
"""

from __future__ import annotations

import random

from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows

SYSTEM = "Look up what you do not know. End with: Answer: <number>"
TEST_SEED = 2**31  # above each --seed, so that all seeds have the same test rows
ARTICLES = ("cups", "pens", "eggs", "nuts")


def rows(size: int, seed: int) -> list[Row]:
    """Make rows.

    Args:
        size: How many.
        seed: Another seed makes other rows.
    """
    chance = random.Random(seed)
    made = []
    for _ in range(size):
        pieces = {article: chance.randint(1, 99) for article in ARTICLES}
        one, other = chance.sample(ARTICLES, 2)
        kwargs = {"stock": {"create_kwargs": {"pieces": pieces}}}
        question = f"How many {one} and {other} are in stock together?"
        truth = str(pieces[one] + pieces[other])
        made.append(make_row("NAME", question, truth, system=SYSTEM, tools_kwargs=kwargs))
    return made


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    args = arguments(__doc__ or "", None).parse_args()
    train, test = (8, 4) if args.smoke else (6400, 128)
    write_rows(args.out, {"train": rows(train, args.seed), "test": rows(test, TEST_SEED)}, args.tools)


if __name__ == "__main__":
    prepare(main)
