"""Games between two players, over real HTTP in any of the endpoint's protocols: the agents of `benchmarks.roles`."""

from __future__ import annotations

from typing import Any

import httpx

PLAYERS = ("white", "black")
PROTOCOLS = ("chat", "messages", "responses")
MOVES = 2
"""Completions of a player in a game."""


def ask(session: Any, protocol: str, model: str, messages: list[Any]) -> tuple[str, list[Any]]:
    """Ask the model once; return the completion's id and the messages of the answer, as a client sends them back."""
    key = {"authorization": f"Bearer {session.api_key}"}
    if protocol == "messages":
        body: dict[str, Any] = {"messages": messages, "max_tokens": 32}
        url = f"{session.anthropic_base_url}/v1/messages"
    elif protocol == "responses":
        body, url = {"input": messages}, f"{session.base_url}/responses"
    else:
        body, url = {"messages": messages}, f"{session.base_url}/chat/completions"
    answered = httpx.post(url, json={"model": model, **body}, headers=key, timeout=60.0)
    answered.raise_for_status()
    found = answered.json()
    if protocol == "messages":
        return found["id"], [{"role": "assistant", "content": found["content"]}]
    if protocol == "responses":
        return found["id"], found["output"]
    return found["id"], [found["choices"][0]["message"]]


def game(row: dict[str, Any], session: Any) -> dict[str, Any]:
    """Let each player move twice, in turns, in a dialogue of its own; return the result.

    `extra_info` of the row has `protocol`; `white`, white's result; `models`, the name of each player's model; and
    `rewards`: `roles`, `completions` (of each player's last one) or `reward` (white's result for the whole session).
    """
    told = row["extra_info"]
    dialogues: dict[str, list[Any]] = {player: [] for player in PLAYERS}
    last: dict[str, str] = {}
    for move in range(MOVES):
        for player in PLAYERS:
            dialogues[player].append({"role": "user", "content": f"You are {player}. Move {move}."})
            last[player], answer = ask(session, told["protocol"], told["models"][player], dialogues[player])
            dialogues[player] += answer
    results = {"white": told["white"], "black": -told["white"]}
    if told["rewards"] == "roles":
        return {"roles": results}
    if told["rewards"] == "completions":
        return {"reward": 0.0, "completions": {last[player]: result for player, result in results.items()}}
    return {"reward": told["white"]}
