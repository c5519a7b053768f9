"""Calculator for `+ - * / // % **` and parentheses over numbers, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.syntax import parse_expression
from verl_multiturn.tools.base import BaseTool, ToolResponse

_MAX_CHARACTERS = 500
_MAX_BITS = 4096

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> int | float:
    """Return the value of an arithmetic expression, in bounded time and memory.

    Args:
        expression: The expression, for example 3 * (4 + 5).

    Raises:
        ValueError: The expression is too long, is not arithmetic or divides by zero, or its value is too large, not
            real or not finite. The text is for the model.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS} are allowed")
    try:
        value = _value(parse_expression(expression.strip()))
    except SyntaxError:
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, RecursionError, MemoryError):
        raise ValueError("the value is too large") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the value is not finite")
    return value


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _value(node.operand)
        return operand if isinstance(node.op, ast.UAdd) else -operand
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * max(1, base.bit_length()) > _MAX_BITS:
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the value is not real")
    return value


def _bounded(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError
    return value


class CalculatorTool(BaseTool):
    """A tool that evaluates its argument `expression`; the YAML gives its schema."""

    outage_limits = OutageLimits(mode="off")  # it answers in this process

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Return the value of the expression as text.

        Raises:
            ValueError: As in `evaluate`.
        """
        return ToolResponse(text=str(evaluate(parameters["expression"])))
