"""An agent that solves sums with a calculator: a plain program around OpenAI's client.

It would run in the same way against any other server. Nothing here knows that the model is being trained.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from openai import BadRequestError, DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletion

MODEL = "policy"  # the endpoint serves one model, whatever its name
TURNS = 3
CALLS = 2
"""Most calls that are answered in one turn."""

_ROOT = Path(__file__).resolve().parents[2]
TOOLS = [
    entry["tool_schema"]
    for entry in yaml.safe_load((_ROOT / "tool_configs" / "calculator.yaml").read_text(encoding="utf-8"))["tools"]
]

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def run(data: dict[str, Any], base_url: str, api_key: str) -> None:
    """Solve the task of a data row. The answer is scored by the reward function of the run.

    Args:
        data: The row, with the `messages` to begin with.
        base_url: Address of the endpoint.
        api_key: The session's key.
    """
    with connect(base_url, api_key) as client:
        solve(client, data["messages"])


def connect(base_url: str, api_key: str) -> OpenAI:
    """Return a client of a session, to be closed.

    Sessions share none: where many threads do, a connection may be closed under a request, which then hangs until its
    time is up (httpcore#1110). Without certificates a client takes a quarter of a millisecond to make.
    """
    return OpenAI(base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(verify=False))


def solve(client: OpenAI, asked: list[dict[str, Any]]) -> list[ChatCompletion]:
    """Let the model call the calculator until it answers, and return its completions.

    Args:
        client: A client of the session.
        asked: The messages to begin with.
    """
    messages, completions = list(asked), []
    for _ in range(TURNS):
        try:
            completion = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            break
        completions.append(completion)
        said = completion.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for number, call in enumerate(said.tool_calls):
            found = call_calculator(call.function.arguments) if number < CALLS else "Error: too many calls"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return completions


def call_calculator(arguments: str) -> str:
    """Return the calculator's answer to a call.

    Args:
        arguments: Arguments of the call, as JSON.
    """
    try:
        expression = json.loads(arguments)["expression"]
        if len(expression) > 100:
            raise ValueError(f"{len(expression)} characters are too many")
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (ArithmeticError, AttributeError, KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"Error: {type(error).__name__}: {error}"


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no sum")
