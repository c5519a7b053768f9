"""Write the rows as verl's parquet: `python recipes/tictactoe/prepare_data.py --out DIR [--seed 0]`.

A row for training is an opening: some random moves, after which the game goes on. In a third of the rows the model
plays both sides, in the others the finisher is one of them (`--program`): it completes a line if it can, and moves at
random otherwise.

A row of the evaluation is a game from the empty board against the random player, half of them as each side, the same
for every seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from recipes.tictactoe.game import DATA_SOURCE, ROLES, SYSTEM_PROMPT, draw_opening
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows

EVALUATED = 500
"""Games of the evaluation."""
MOST_OPENING = 4
"""Most moves of an opening."""
_EVALUATION_SEED = 9_000_000


def row_of(opening: Sequence[int], **more: Any) -> Row:
    """Return the row of a game; the agent shows the board."""
    return make_row(
        DATA_SOURCE,
        [{"role": "system", "content": SYSTEM_PROMPT}],
        "",
        ability="game",
        opening=[str(field) for field in opening],
        **more,
    )


def opening_for(program: str, rng: random.Random) -> list[int]:
    """Return an opening after which the model moves, so that it is asked in each game.

    Args:
        program: The side that a program plays; "": none.
        rng: Random numbers.
    """
    lengths = [moves for moves in range(MOST_OPENING + 1) if ROLES[moves % 2] != program]
    return draw_opening(rng.choice(lengths), rng)


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--train-size", type=int, default=2048)
    parser.add_argument("--test-size", type=int, default=EVALUATED)
    sides = [*ROLES, "none"]
    parser.add_argument("--program", nargs="+", choices=sides, default=ROLES, help="sides that the finisher takes")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    programs = ["", *(role for role in ROLES if role in args.program)]
    train = []
    for number in range(args.train_size):
        program = programs[number % len(programs)]
        train.append(row_of(opening_for(program, rng), program=program, player="finisher", seed=number))
    # The sides take turns, so that the first rows are half of each, too.
    test = [
        row_of([], program=ROLES[number % 2], player="random", seed=_EVALUATION_SEED + number)
        for number in range(args.test_size)
    ]
    write_rows(args.out, {"train": train, "test": test})


if __name__ == "__main__":
    prepare(main)
