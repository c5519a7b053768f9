"""Tic-tac-toe: the board, the players' view of it, and players that need no model.

Only this module defines the game. The warm start, the rows, the agent and the report all use it.

Fields are numbered from 0, row by row, and named `a` to `i`. A board is a tuple of nine numbers: 0 is free, 1 is
white's, -1 is black's. White moves first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

Board = tuple[int, ...]

DATA_SOURCE = "tictactoe"
ROLES = ("white", "black")
FIELDS = "abcdefghi"
SYSTEM_PROMPT = "Tic-tac-toe: name a free field. X is yours."
EMPTY: Board = (0,) * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_SIDES = {1: "white", -1: "black"}


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


def show(board: Board) -> str:
    """Return the board as the side that moves reads it: its own fields with X, the other's with O, free ones bare."""
    side = side_to_move(board)
    signs = {0: "", side: "X", -side: "O"}
    return "\n".join(
        " ".join(FIELDS[field] + signs[board[field]] for field in range(row, row + 3)) for row in range(0, 9, 3)
    )


def read_move(text: str, board: Board) -> int | None:
    """Return the field that a player's answer names; None where it names no free one."""
    name = text.strip()
    if len(name) != 1 or name not in FIELDS:
        return None
    field = FIELDS.index(name)
    return field if board[field] == 0 else None


@cache
def value(board: Board) -> int:
    """Return how a game ends with best play, for the side that moves: 1 it wins, -1 it loses, 0 nobody does."""
    if winner(board):
        return -1  # the side that moved last has won
    return max((-value(after(board, field)) for field in free_fields(board)), default=0)


@cache
def best_fields(board: Board) -> tuple[int, ...]:
    """Return the fields of all best moves."""
    values = {field: -value(after(board, field)) for field in free_fields(board)}
    return tuple(field for field, each in values.items() if each == max(values.values()))


def weak_move(board: Board, best_share: float, rng: random.Random) -> int:
    """Return a move of a weak player: a best one with some probability, else any.

    Args:
        board: The board.
        best_share: The probability.
        rng: Random numbers.
    """
    return rng.choice(best_fields(board) if rng.random() < best_share else free_fields(board))


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
