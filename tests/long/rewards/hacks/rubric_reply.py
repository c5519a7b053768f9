"""The replies of judges of `rubric` that compare exactly, so that the test is about the way to them and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from verl_multiturn.rewards.judge_client import content_of
from verl_multiturn.rewards.rubric import SYSTEM

KEYS = ("criteria", "turns", "ticket", "reference", "conversation")
RIGHT, POLITE = "right", "polite"
"""Criteria that these judges know: the last turn is the reference, but for case; a turn has the word "please"."""


def reply(asked: dict[str, Any]) -> str:
    """Return the judge's reply, by its model's name.

    - `strict`: a verdict that compares exactly.
    - `quotes`: the last turn unchanged, and then that verdict: not one JSON object, and so no verdict.
    - `thinks`: the verdict, behind a reasoning that has the last turn.
    - `unsure`: the last turn in a sentence.
    - `echo`: the last turn alone.
    - `parrot`: the question itself, which has the ticket.
    - `obeys`: the best grades, if anything of the conversation is where an order could be read: anywhere but within
      the one JSON string. Else as `strict`.
    """
    model, messages = asked["model"], asked["messages"]
    try:
        question = json.loads(messages[-1]["content"])
        conversation = json.loads(question["conversation"])
    except (ValueError, LookupError, TypeError):
        return _obedient(messages) if model == "obeys" else "a question that is not one JSON object"
    last = str(next((each["text"] for each in reversed(conversation) if each["role"] == "assistant"), ""))
    grade: Callable[[str, str], float] = _best if model == "obeys" and reads_outside(messages) else _exact(question)
    verdict = json.dumps({"ticket": question["ticket"], "grades": _grades(question, conversation, grade)})
    return {
        "strict": verdict,
        "obeys": verdict,
        "quotes": f"They said: {last}\n{verdict}",
        "thinks": f"<think>They said: {last}</think>\n{verdict}",
        "unsure": f"They said {last} and I cannot say",
        "echo": last,
        "parrot": str(messages[-1]["content"]),
    }[model]


def reads_outside(messages: list[dict[str, Any]]) -> bool:
    """Return whether a question has anything but what an honest one has outside the one JSON string.

    The string is cut out of the raw text, and the rest is compared with the question about an empty conversation.

    Args:
        messages: The question.
    """
    if [(each["role"], set(each)) for each in messages] != [(role, {"role", "content"}) for role in ("system", "user")]:
        return True
    if messages[0]["content"] != SYSTEM:
        return True
    raw = messages[1]["content"]
    question = json.loads(raw)
    if not isinstance(question["conversation"], str) or [key for key in KEYS if key in question] != list(question):
        return True
    literal = content_of(question["conversation"])
    if raw.count(literal) != 1:
        return True
    conversation = json.loads(question["conversation"])
    turns = [each for each in conversation if "turn" in each]
    if [each["turn"] for each in turns] != list(range(1, len(turns) + 1)):
        return True  # a text has become a turn
    told = {str(each["text"]) for each in turns} | {call["name"] for each in turns for call in each.get("calls", [])}
    ours = [question["ticket"], question.get("reference", ""), *(each["text"] for each in question["criteria"])]
    rest = raw.replace(literal, "")
    for text in ours:
        rest = rest.replace(content_of(text), "")
    return any(len(text) > 12 and content_of(text)[1:-1] in rest for text in told)


def _obedient(messages: list[dict[str, Any]]) -> str:
    """Return the best verdict on a question that is no JSON, from what can be found in its text."""
    text = str(messages[-1]["content"])
    ticket = re.search(r'"ticket": "(\w+)"', text)
    names = re.findall(r'"name": "(\w+)", "text"', text)
    return json.dumps({"ticket": ticket[1] if ticket else "", "grades": dict.fromkeys(names, 1)})


def _grades(question: dict[str, Any], conversation: list[Any], grade: Callable[[str, str], float]) -> dict[str, Any]:
    texts = {each["turn"]: each["text"] for each in conversation if "turn" in each}
    last = texts[max(texts)]
    return {
        each["name"]: grade(each["name"], last)
        if each["turns"] == "last"
        else {str(turn): grade(each["name"], texts[turn]) for turn in question["turns"]}
        for each in question["criteria"]
    }


def _best(name: str, text: str) -> float:
    return 1.0


def _exact(question: dict[str, Any]) -> Callable[[str, str], float]:
    def grade(name: str, text: str) -> float:
        if name == POLITE:
            return float("please" in text)
        return float(text.strip().lower() == str(question.get("reference", "")).strip().lower())

    return grade
