"""Write the recipe's rows as verl's parquet: `python recipes/errands/prepare_data.py --out DIR [--seed 0]`."""

from __future__ import annotations

from errands import DATA_SOURCE, SYSTEM_PROMPT, TOOLS, Errand, make_errands

from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows

# The warm start used seeds from 10_000_000 on. The held-out errands are the same for every training seed.
_TEST_SEED = 9_000_000


def row(errand: Errand) -> Row:
    """Return the row of an errand. The user sends the first request when the conversation has started."""
    return make_row(
        DATA_SOURCE,
        [{"role": "system", "content": SYSTEM_PROMPT}],
        "",
        ability="dialogue",
        tools=list(TOOLS.values()),
        interaction="bfcl",
        interaction_kwargs={"dialogue": errand.dialogue()},
    )


def main() -> None:
    """Write `train.parquet` and `test.parquet`; no errand is in both."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--train-size", type=int, default=2048)
    parser.add_argument("--test-size", type=int, default=128)
    args = parser.parse_args()
    held_out = list(dict.fromkeys(make_errands(2 * args.test_size, _TEST_SEED)))[: args.test_size]
    drawn = [each for each in make_errands(2 * args.train_size, args.seed) if each not in set(held_out)]
    splits = {"train": drawn[: args.train_size], "test": held_out}
    write_rows(args.out, {split: [row(each) for each in errands] for split, errands in splits.items()}, args.tools)


if __name__ == "__main__":
    prepare(main)
