"""Agents that the tests of the endpoint run, with a blocking client."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx

from verl_multiturn import ConfigError, OutageError, UnjudgedError


def ask(session: Any, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Ask the model once; return the answer's JSON."""
    answered = httpx.post(
        f"{session.base_url}/chat/completions",
        json={"model": "m", "messages": list(messages), **more},
        headers={"authorization": f"Bearer {session.api_key}"},
        timeout=30.0,
    )
    answered.raise_for_status()
    found: dict[str, Any] = answered.json()
    return found


def chat(row: dict[str, Any], session: Any) -> dict[str, Any]:
    """Take two turns, and give each of them a reward."""
    messages = list(row["messages"])
    rewards = {}
    for reward in (0.25, 0.5):
        answer = ask(session, *messages, temperature=0.3)
        rewards[answer["id"]] = reward
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return {"reward": 1.0, "completions": rewards}


def game(row: dict[str, Any], session: Any) -> dict[str, Any]:
    """Let white ask by chat completions, black by responses, and white again by Anthropic's messages; white wins."""
    ask(session, *row["messages"], model="white")
    black = {"model": "black", "input": "x"}
    white = {"model": "white", "max_tokens": 9, "messages": row["messages"]}
    for path, body in (("responses", black), ("messages", white)):
        answered = httpx.post(
            f"{session.base_url}/{path}",
            json=body,
            headers={"authorization": f"Bearer {session.api_key}"},
            timeout=30.0,
        )
        answered.raise_for_status()
    return {"roles": {"white": 1, "black": -1}}


def both_roles(row: dict[str, Any], session: Any) -> dict[str, Any]:
    """Ask as white and as black, and give each answer a reward."""
    ids = [ask(session, *row["messages"], model=role)["id"] for role in ("white", "black")]
    return {"roles": {"white": 1.0, "black": -1.0}, "completions": dict.fromkeys(ids, 0.5)}


def black_alone(row: dict[str, Any], session: Any) -> dict[str, Any]:
    """Ask as black alone."""
    ask(session, *row["messages"], model="black")
    return {"roles": {"white": 1.0, "black": -1.0}}


def undecided(row: dict[str, Any], session: Any) -> None:
    """Ask once, and leave the score to others."""
    ask(session, *row["messages"])


def idle(row: dict[str, Any], session: Any) -> float:
    """Ask nothing."""
    return 1.0


def broken(row: dict[str, Any], session: Any) -> None:
    """Raise an error after an answer."""
    ask(session, *row["messages"])
    raise ValueError("no such planet")


def broken_at_once(row: dict[str, Any], session: Any) -> None:
    """Raise an error before an answer."""
    raise ValueError("no such planet")


def misconfigured(row: dict[str, Any], session: Any) -> None:
    """Raise `ConfigError`, after an answer or before one, by the row."""
    if row["extra_info"]["asks"]:
        ask(session, *row["messages"])
    raise ConfigError("extra_info.grid: 'x' is no grid; mend the row")


def slow(row: dict[str, Any], session: Any) -> None:
    """Ask once, note the answer in the file `row["noted"]`, and end late."""
    ask(session, *row["messages"])
    if "noted" in row:
        Path(row["noted"]).touch()
    for _ in range(600):
        time.sleep(0.05)


def dreamer(row: dict[str, Any], session: Any) -> dict[str, Any]:
    """Give a reward to a completion that does not exist."""
    ask(session, *row["messages"])
    return {"completions": {f"chatcmpl-of-a-dream-{'x' * 1_000_000}": 1.0}}


def tell_tale(row: Any, session: Any) -> None:
    raise RuntimeError(f"cannot reach {session.anthropic_base_url}/s/{session.api_key}/v1")


def asks_late(row: dict[str, Any], session: Any) -> None:
    """Ask, and write down how that was answered."""
    answered = httpx.post(
        f"{session.base_url}/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "One more."}]},
        headers={"authorization": f"Bearer {session.api_key}"},
        timeout=30.0,
    )
    Path(row["extra_info"]["late"]).write_text(f"{answered.status_code} {answered.text}")


async def asks_after_its_return(row: dict[str, Any], session: Any) -> float:
    """Ask, and leave a task that asks once more when it is ended, which is after the return."""
    ask(session, *row["messages"])

    async def linger() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            asks_late(row, session)

    row["kept"] = asyncio.ensure_future(linger())
    await asyncio.sleep(0)
    return 1.0


def ungraded(row: dict[str, Any], session: Any) -> float:
    """Report that its grader is lost, after an answer."""
    ask(session, *row["messages"])
    raise UnjudgedError("the grader is lost")


def out(row: dict[str, Any], session: Any) -> float:
    """Report that its database is missing, after an answer; a row that is `up` finds it."""
    ask(session, *row["messages"])
    if not row.get("up"):
        raise OutageError("the database does not answer")
    return 1.0
