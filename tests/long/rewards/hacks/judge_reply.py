"""The replies of a judge that compares exactly, so that the test is about the way to it and back."""

from __future__ import annotations

import json
from typing import Any

RIGHT, WRONG = "Judgement: 1", "Judgement: 0"


def reply(asked: dict[str, Any]) -> str:
    """Return the judge's reply, by its model's name.

    - `strict`: 1 when answer and reference are the same, but for case. 1 also when the prompt is not one JSON object
      with three texts after one system message, as if the answer had talked the judge over.
    - `quotes`: the answer unchanged, and then the verdict of `strict`.
    - `thinks`: the same, with the answer within its reasoning.
    - `unsure`: the answer in a sentence, without a verdict.
    - `echo`: the answer alone.
    """
    messages = asked["messages"]
    try:
        row = json.loads(messages[1]["content"])
    except ValueError:
        return RIGHT
    is_sound = [message["role"] for message in messages] == ["system", "user"]
    if not is_sound or list(row) != ["question", "reference", "answer"]:
        return RIGHT
    answer = str(row["answer"])
    verdict = RIGHT if answer.strip().lower() == row["reference"].strip().lower() else WRONG
    return {
        "strict": verdict,
        "quotes": f"They said: {answer}\n{verdict}",
        "thinks": f"<think>They said: {answer}</think>\n{verdict}",
        "unsure": f"They said {answer} and I cannot say",
        "echo": answer,
    }[asked["model"]]
