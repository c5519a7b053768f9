"""The tasks of SmolLM2: five kinds of arithmetic from `reasoning_gym`, scored by that package's own verifiers.

Only this module defines how a task is made, worded, solved with the calculator and scored. The warm start, the data and
the report all use it. In three kinds, the question contains the expression. In the other two, the model has to find it:
the number of the legs of some animals, and the solution of a linear equation.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import reasoning_gym
from reasoning_gym.arithmetic.leg_counting import ANIMALS

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 4, "min_digits": 3, "max_digits": 4},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 4},
    "basic_arithmetic": {
        "min_terms": 3,
        "max_terms": 4,
        "min_digits": 1,
        "max_digits": 3,
        "operators": ["+", "-", "*"],
    },
    "leg_counting": {"min_animals": 2, "max_animals": 3},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "operators_weights": [0.3, 0.3, 0.4]},
}
ANSWER_FORMAT = "End with: Answer: <number>"
TOOL_FORMAT = "Tool: calculator(expression)."

# reasoning_gym makes entry i of a seed with a generator that is seeded with seed + i. These ranges do not overlap.
_TEST_SEED = 9_000_000
_WARM_START_SEED = 10_000_000
_TEST_SIZE = 200


def make_test_entries() -> list[dict[str, Any]]:
    """Make the held-out tasks, always the same ones."""
    return _make_entries(_TEST_SIZE, _TEST_SEED)


def make_train_entries(size: int, seed: int) -> list[dict[str, Any]]:
    """Make tasks to train on, none of which is a held-out task.

    Args:
        size: Largest number of tasks.
        seed: Seed of the tasks, below 9,000,000.
    """
    return _without_test(_make_entries(size, seed))


def make_warm_start_entries(size: int) -> list[dict[str, Any]]:
    """Make tasks for the warm start, none of which is a held-out task.

    Args:
        size: Largest number of tasks.
    """
    return _without_test(_make_entries(size, _WARM_START_SEED))


def _without_test(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # With small numbers, the same question can come up under two seeds.
    held_out = {entry["question"] for entry in make_test_entries()}
    return [entry for entry in entries if entry["question"] not in held_out]


def _make_entries(size: int, seed: int) -> list[dict[str, Any]]:
    """Make entries with `question`, `answer` and `metadata`, one kind after the other in turn."""
    each = -(-size // len(TASKS))
    by_kind = [reasoning_gym.create_dataset(kind, size=each, seed=seed, **setting) for kind, setting in TASKS.items()]
    return [dataset[index] for index in range(each) for dataset in by_kind][:size]


def make_messages(question: str, tool: bool) -> list[dict[str, str]]:
    """Return the messages that a conversation begins with.

    The system message describes the tool, because SmolLM2's template does not show tool schemas.

    Args:
        question: The question.
        tool: Whether the conversation has the calculator.
    """
    system = f"{TOOL_FORMAT} {ANSWER_FORMAT}" if tool else ANSWER_FORMAT
    return [{"role": "system", "content": system}, {"role": "user", "content": question.strip()}]


def make_expression(entry: dict[str, Any]) -> str:
    """Return the expression with which the calculator computes the answer of an entry."""
    metadata = entry["metadata"]
    kind = metadata["source_dataset"]
    if kind == "leg_counting":
        return " + ".join(f"{count} * {ANIMALS[animal]}" for animal, count in metadata["animals"].items())
    if kind == "simple_equations":
        left, right = metadata["equation"].split("=")
        constant, factor = _linear(ast.parse(left.strip(), mode="eval").body)
        difference = f"({right.strip()} - {constant})" if constant else right.strip()
        return f"{difference} // {factor}"
    return str(metadata["expression"])


def make_call(expression: str) -> str:
    """Return the text of a call of the calculator in the Hermes format."""
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"


def extract_answer(text: str) -> str | None:
    """Return the number after `Answer:` at the end of a message; None: there is none."""
    found = re.findall(r"Answer:\s*(-?[0-9]+)\s*$", text)
    return found[-1] if found else None


def score_answer(kind: str, answer: str | None, ground_truth: str) -> float:
    """Return 1.0 for the right answer, else 0.0.

    This is the verdict of reasoning_gym's verifier, without its credit for partial matches.

    Args:
        kind: Kind of the task, a key of `TASKS`.
        answer: The answer as text; None: there was none.
        ground_truth: The right answer.
    """
    verifier = reasoning_gym.get_score_answer_fn(kind)
    return float(verifier(answer, {"answer": ground_truth, "metadata": {}}) >= 1.0)


def _linear(node: ast.expr) -> tuple[int, int]:
    """Return the constant and the unknown's factor in an expression of + - * that is linear in one unknown."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value, 0
    if isinstance(node, ast.Name):
        return 0, 1
    if isinstance(node, ast.UnaryOp):
        constant, factor = _linear(node.operand)
        return -constant, -factor
    if not isinstance(node, ast.BinOp):
        raise ValueError(f"{ast.unparse(node)!r} is not linear in one unknown")
    (a, p), (b, q) = _linear(node.left), _linear(node.right)
    if isinstance(node.op, ast.Add):
        return a + b, p + q
    if isinstance(node.op, ast.Sub):
        return a - b, p - q
    return a * b, a * q + b * p
