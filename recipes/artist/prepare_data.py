"""Write BFCL's multi-turn dialogues as verl's parquet, a row for each.

    python recipes/artist/prepare_data.py --out DIR [--source base+miss_param]

`--source` names the categories to train on: `base`, `miss_func`, `miss_param`, `long_context`, with `+` between them.
`--smoke` takes ten short dialogues with the functions that they need alone, and with `--model` makes a tiny model that
has them by heart.
"""

from __future__ import annotations

from pathlib import Path

from dialogue_rows import needed, read_categories, row, splits

from verl_multiturn.runs.data import arguments, prepare, write_rows
from verl_multiturn.task_sets.bfcl.package import dialogue_of

SMOKE_TRAIN = (42, 46, 50, 100, 132, 144)
SMOKE_TEST = (11, 45, 133, 139)


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", "base")
    parser.add_argument("--model", type=Path, help="with --smoke: where a tiny model is written")
    args = parser.parse_args()
    if args.smoke:
        chosen = {
            split: [dialogue_of(f"multi_turn_base_{number}") for number in numbers]
            for split, numbers in (("train", SMOKE_TRAIN), ("test", SMOKE_TEST))
        }
        rows = {split: [row(dialogue, needed(dialogue)) for dialogue in found] for split, found in chosen.items()}
        if args.model is not None:
            from smoke_model import make_model

            make_model(args.model, [dialogue for found in chosen.values() for dialogue in found])
    else:
        rows = {
            split: [row(dialogue) for dialogue in found]
            for split, found in splits(read_categories(args.source)).items()
        }
    write_rows(args.out, rows, args.tools)


if __name__ == "__main__":
    prepare(main)
