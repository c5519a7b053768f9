"""An agent that plays tic-tac-toe: a plain program around OpenAI's client, which asks for each side's moves.

It would run in the same way against any other server that has two models, `white` and `black`. Each side has a
conversation of its own, in which it reads the board whenever it has to move. In some rows a program plays one side,
which is not asked.

A side that names no free field loses. Nothing here knows that a model is being trained.
"""

from __future__ import annotations

import random
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from recipes.tictactoe.game import (
    DRAW,
    PLAYERS,
    ROLES,
    after,
    board_of,
    is_over,
    read_move,
    role_of,
    show,
    side_to_move,
    winner,
)

MOST_TOKENS = 4
"""Tokens of an answer: one, and its end."""


def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Play a game from a row's opening, and return the reward of each side: 1 it won, -1 it lost, `DRAW` nobody did.

    Args:
        data: The row: `messages` with the system's, and in `extra_info` the moves of the `opening`, the role that a
            `program` plays ("": none), which `player` that is, and its `seed`.
        base_url: Address of the endpoint.
        api_key: The session's key.
    """
    info = data["extra_info"]
    rng = random.Random(info["seed"])
    board = board_of([int(field) for field in info["opening"]])
    said: dict[str, list[Any]] = {role: list(data["messages"]) for role in ROLES}
    # Sessions share no client, see recipes/proxy_quickstart/agent.py.
    with OpenAI(base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(verify=False)) as client:
        while not is_over(board):
            side = side_to_move(board)
            role = role_of(side)
            if role == info["program"]:
                board = after(board, PLAYERS[info["player"]](board, rng))
                continue
            messages = said[role]
            messages.append({"role": "user", "content": show(board)})
            answer = client.chat.completions.create(model=role, messages=messages, max_tokens=MOST_TOKENS)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            field = read_move(text, board)
            if field is None:
                return {"roles": {role: -1.0, role_of(-side): 1.0}}
            board = after(board, field)
    won = winner(board)
    return {"roles": {role_of(side): float(won * side) if won else DRAW for side in (1, -1)}}
