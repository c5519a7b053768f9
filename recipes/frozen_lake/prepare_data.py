"""Write the lake's rows as verl's parquet: `python recipes/frozen_lake/prepare_data.py --out DIR [--seed 0]`."""

from __future__ import annotations

from itertools import islice

from lake import DATA_SOURCE, HELD_OUT, SYSTEM_PROMPT, Map, draw_maps, held_out_maps

from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows


def row_of(lake: Map) -> Row:
    """Return the row of a map. The environment shows the map when the conversation starts."""
    return make_row(
        DATA_SOURCE,
        [{"role": "system", "content": SYSTEM_PROMPT}],
        "",
        ability="game",
        interaction="lake",
        interaction_kwargs={"env_kwargs": {"desc": list(lake)}},
        map=list(lake),
    )


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--train-size", type=int, default=2048)
    parser.add_argument("--test-size", type=int, default=HELD_OUT)
    args = parser.parse_args()
    held_out = held_out_maps()
    train = list(islice(draw_maps(args.seed, without=held_out), args.train_size))
    assert not set(train) & set(held_out), "a held-out map is among those for training"
    splits = {"train": train, "test": held_out[: args.test_size]}
    write_rows(args.out, {split: [row_of(lake) for lake in maps] for split, maps in splits.items()})


if __name__ == "__main__":
    prepare(main)
