"""The scripted model of the environments: the text of a turn, from its prompt alone, so that siblings say the same.

Some tasks are solved and others are not, by a digest of the task's own words.
"""

from __future__ import annotations

import hashlib
import json
import re

_ASSISTANT = "<|im_start|>assistant\n"
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
PRICES = {"apple": 3, "pear": 5, "plum": 8, "fig": 2, "kiwi": 7}


def say(prompt: str, turn: int) -> str:
    """Return the text of a turn.

    Args:
        prompt: The prompt.
        turn: How many turns of its own are in it.
    """
    if "role-playing a USER" in prompt:
        return "###DONE###" if turn else _question(prompt)
    if "Look up each price" in prompt:
        return _customer(prompt, turn)
    if (cost := re.search(r"a vase that cost you (\d+)", prompt)) is not None:
        return _seller(int(cost[1]), prompt, turn)
    if (limit := re.search(r"for at most (\d+)", prompt)) is not None:
        return _buyer(int(limit[1]), prompt)
    if "Hangman" in prompt:
        return f"I guess [{_LETTERS[turn % len(_LETTERS)].upper()}]"
    if "square-bracketed" in prompt:  # a search of words: a place that is mostly wrong
        return f"[{turn} {turn} {turn} {turn + 3}]"
    return _counter(prompt, turn)


def _question(prompt: str) -> str:
    found = re.search(r"What do a \w+ and a \w+ cost together\?", prompt)
    return found[0] if found else "What do a fig and a pear cost together?"


def _customer(prompt: str, turn: int) -> str:
    asked = re.findall(r"What do a (\w+) and a (\w+) cost", prompt)[-1]
    if turn < len(asked):
        call = json.dumps({"name": "price", "arguments": {"name": asked[turn]}})
        return f"<tool_call>\n{call}\n</tool_call>"
    kind = _digest(" ".join(asked)) % 3
    total = sum(PRICES[each] for each in asked)
    return (f"They cost {total}", f"They cost {total + 1}", "I do not know")[kind]


def _seller(cost: int, prompt: str, turn: int) -> str:
    if not turn:
        return str(cost + 20)
    offer = re.findall(r"\d+", _last(prompt))
    return "deal" if offer and int(offer[-1]) > cost else str(cost + 20 - 5 * turn)


def _buyer(limit: int, prompt: str) -> str:
    offer = re.findall(r"\d+", _last(prompt))
    price = int(offer[-1]) if offer else limit
    return "deal" if price <= limit else str(limit - 2 - _digest(str(limit)) % 3)


def _counter(prompt: str, turn: int) -> str:
    """Count towards the goal by the largest step, and past it where the digest of the goal is odd."""
    goals, totals = (re.findall(rf'"{name}": (\d+)', prompt) for name in ("goal", "total"))
    goal, total = int((goals or ["1"])[-1]), int((totals or ["0"])[-1])
    step = min(5, goal - total) + (1 if _digest(str(goal)) % 2 and goal - total <= 5 else 0)
    return json.dumps({"add": step})


def _last(prompt: str) -> str:
    """Return the last message of the user."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def _digest(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0]
