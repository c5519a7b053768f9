"""The quickstart's task: sums from `reasoning_gym`, scored by that package's own verifier.

Only this module defines how a task is made, worded and scored. The warm start, the data set and the reward all use it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import reasoning_gym

DATA_SOURCE = "reasoning_gym/chain_sum"
SYSTEM_PROMPT = "You are a helpful assistant. End with: Answer: <number>"
_TASK = {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3}


def make_entries(size: int, seed: int) -> list[dict[str, Any]]:
    """Make entries of reasoning_gym's chain_sum, each with `question`, `answer` and `metadata`."""
    return list(reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **_TASK))


def make_messages(question: str, examples: list[dict[str, str]] | None = None) -> list[dict[str, str]]:
    """Return the messages that a conversation begins with.

    Args:
        question: The question.
        examples: Messages with worked examples, put before the question; None: none.
    """
    return [{"role": "system", "content": SYSTEM_PROMPT}, *(examples or []), {"role": "user", "content": question}]


def make_examples(size: int, seed: int) -> list[dict[str, str]]:
    """Make worked examples as messages: question, tool call, tool response and answer.

    They are for a model that was not trained to call tools and whose template does not show tool schemas.

    Args:
        size: Number of examples.
        seed: Seed of the examples.
    """
    messages: list[dict[str, str]] = []
    for entry in make_entries(size, seed) if size else []:
        call = json.dumps({"name": "calculator", "arguments": {"expression": entry["metadata"]["expression"]}})
        messages += [
            {"role": "user", "content": entry["question"]},
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": entry["answer"]},
            {"role": "assistant", "content": f"Answer: {entry['answer']}"},
        ]
    return messages


def extract_answer(text: str) -> str | None:
    """Return the number after `Answer:` at the end of a message; None: there is none."""
    found = re.findall(r"Answer:\s*(-?\d+)\s*$", text)
    return found[-1] if found else None


def score_answer(answer: str | None, ground_truth: str) -> float:
    """Return 1.0 for the right answer, else 0.0.

    This is the verdict of reasoning_gym's verifier, without its credit for partial matches.

    Args:
        answer: The answer as text; None: there was none.
        ground_truth: The right answer.
    """
    verifier = reasoning_gym.get_score_answer_fn("chain_sum")
    return float(verifier(answer, {"answer": ground_truth, "metadata": {}}) >= 1.0)
