"""Write ALFWorld's rows as verl's parquet, one row for each game.

    python recipes/alfworld/prepare_data.py --out DIR [--source ~/.cache/alfworld/json_2.1.1]

`--source` is the folder that `alfworld-download` makes, with `train` and `valid_seen` below it. `--smoke` makes rows of
the small household (`household.py`) instead, and with `--model` a tiny model that has their solutions by heart.
"""

from __future__ import annotations

import os
from pathlib import Path

from speech import SYSTEM_PROMPT

from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows

_SPLITS = {"train": "train", "test": "valid_seen"}
_TRAIN_SEEDS, _TEST_SEEDS = range(8), range(1000, 1004)


def game_rows(folder: Path, most: int | None) -> list[Row]:
    """Return a row for each game below a folder, in the order of their paths.

    Args:
        folder: Folder of a split.
        most: Most rows, at even distances; None: all.

    Raises:
        ConfigError: There is no game.
    """
    games = sorted(
        path for path in folder.rglob("game.tw-pddl") if "movable" not in str(path) and "Sliced" not in str(path)
    )
    if not games:
        raise ConfigError(
            f"{str(folder)!r} has no game.tw-pddl; run `alfworld-download`, and name its folder in --data"
        )
    if most is not None and len(games) > most:
        games = [games[index * len(games) // most] for index in range(most)]
    return [row(str(path), {"env_kwargs": {"game": str(path)}}) for path in games]


def row(name: str, kwargs: dict[str, object]) -> Row:
    """Return the row of a game. The environment gives the task when the conversation starts."""
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}]
    return make_row(
        "alfworld", prompt, "", ability="game", interaction="household", interaction_kwargs=kwargs, game=name
    )


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld") + "/json_2.1.1")
    parser.add_argument("--test-size", type=int, default=128)
    parser.add_argument("--model", type=Path, help="with --smoke: where a tiny model is written")
    args = parser.parse_args()
    if args.smoke:
        seeds = {"train": _TRAIN_SEEDS, "test": _TEST_SEEDS}
        splits = {split: [row(f"seed {n}", {"seed": n}) for n in numbers] for split, numbers in seeds.items()}
        if args.model is not None:
            from tiny_model import make_model

            make_model(args.model, [*_TRAIN_SEEDS, *_TEST_SEEDS])
    else:
        source = Path(args.source).expanduser()
        splits = {
            split: game_rows(source / name, args.test_size if split == "test" else None)
            for split, name in _SPLITS.items()
        }
    write_rows(args.out, splits)


if __name__ == "__main__":
    prepare(main)
