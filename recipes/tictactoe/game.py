"""Tic-tac-toe: the board, the players' view of it, and players that need no model.

Only this module defines the game. The warm start, the rows, the agent and the report all use it.

Fields are numbered from 0, row by row. A board is a tuple of nine numbers: 0 is free, 1 is white's, -1 is black's.
White moves first.

A player reads the board turned and mirrored so that boards that are equal up to that look the same. The names `a` to
`i` are those of the fields as it reads them. So an eighth of the boards are all that a model has to learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

Board = tuple[int, ...]

DATA_SOURCE = "tictactoe"
ROLES = ("white", "black")
FIELDS = "abcdefghi"
SYSTEM_PROMPT = "Tic-tac-toe: name a free field. X is yours."
DRAW = 0.9
"""Reward of both sides where nobody wins: almost a win's, since the aim is not to lose. A win has 1, a loss -1."""
EMPTY: Board = (0,) * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_SIDES = {1: "white", -1: "black"}
_ROTATIONS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8),
    (6, 3, 0, 7, 4, 1, 8, 5, 2),
    (8, 7, 6, 5, 4, 3, 2, 1, 0),
    (2, 5, 8, 1, 4, 7, 0, 3, 6),
)
_VIEWS = _ROTATIONS + tuple(tuple(each[place] for place in (2, 1, 0, 5, 4, 3, 8, 7, 6)) for each in _ROTATIONS)


def side_to_move(board: Board) -> int:
    """Return who moves next: 1 is white, -1 is black."""
    return 1 if board.count(1) == board.count(-1) else -1


def role_of(side: int) -> str:
    """Return the name of a side: the role in which it is asked."""
    return _SIDES[side]


def free_fields(board: Board) -> list[int]:
    """Return the numbers of the free fields."""
    return [field for field, owner in enumerate(board) if owner == 0]


def winner(board: Board) -> int:
    """Return who has three in a line: 1, -1, or 0 for nobody."""
    return next((board[a] for a, b, c in LINES if board[a] and board[a] == board[b] == board[c]), 0)


def is_over(board: Board) -> bool:
    """Return whether somebody has won, or no field is free."""
    return winner(board) != 0 or 0 not in board


def after(board: Board, field: int) -> Board:
    """Return the board after a move of the side whose turn it is.

    Args:
        board: The board.
        field: A free field.
    """
    assert board[field] == 0, f"field {field} of {board} is taken"
    return (*board[:field], side_to_move(board), *board[field + 1 :])


def board_of(moves: Sequence[int]) -> Board:
    """Return the board after some moves from the empty one."""
    board = EMPTY
    for field in moves:
        board = after(board, field)
    return board


@cache
def view(board: Board) -> Board:
    """Return the fields of a board in the order in which the side that moves reads them.

    It is the same for all boards that are equal up to turns and mirrors, as far as the player sees.
    """
    side = side_to_move(board)
    return max(_VIEWS, key=lambda fields: [board[field] * side for field in fields])


def show(board: Board) -> str:
    """Return the board as the side that moves reads it: its own fields with X, the other's with O, free ones bare."""
    side = side_to_move(board)
    signs = {0: "", side: "X", -side: "O"}
    words = [name + signs[board[field]] for name, field in zip(FIELDS, view(board), strict=True)]
    return "\n".join(" ".join(words[row : row + 3]) for row in range(0, 9, 3))


def name_of(field: int, board: Board) -> str:
    """Return the name that a field has to the side that moves."""
    return FIELDS[view(board).index(field)]


def read_move(text: str, board: Board) -> int | None:
    """Return the field that a player's answer names; None where it names no free one."""
    name = text.strip()
    if len(name) != 1 or name not in FIELDS:
        return None
    field = view(board)[FIELDS.index(name)]
    return field if board[field] == 0 else None


def random_move(board: Board, rng: random.Random) -> int:
    """Return any free field."""
    return rng.choice(free_fields(board))


def finisher_move(board: Board, rng: random.Random) -> int:
    """Return a field that wins at once, if there is one, else any free field."""
    fields = free_fields(board)
    return rng.choice([field for field in fields if winner(after(board, field))] or fields)


PLAYERS: dict[str, Callable[[Board, random.Random], int]] = {"random": random_move, "finisher": finisher_move}
"""The programs that play one side, by the names that rows have for them."""


def draw_opening(moves: int, rng: random.Random) -> list[int]:
    """Return some random moves from the empty board, after which the game is not over.

    Args:
        moves: How many, at most 8.
        rng: Random numbers.
    """
    while True:
        found: list[int] = []
        while len(found) < moves and not is_over(board_of(found)):
            found.append(rng.choice(free_fields(board_of(found))))
        if len(found) == moves and not is_over(board_of(found)):
            return found
