"""Reading a body as a pydantic model, and the refusal of one that does not fit.

A refusal names the field, its value, the expected one, and the remedy. It is made of pydantic's first error, in one
place, for all protocols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from verl_multiturn.chat.parsing.call_json import MOST_DEPTH, is_deeper
from verl_multiturn.describe import show
from verl_multiturn.proxy.protocols.requests import RefusedError

_MOST_SHOWN = 100
# The two halves of a surrogate pair, or another escape; else a half alone, which UTF-8 cannot express.
_ESCAPES = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).)|\\u[dD][89a-fA-F][0-9a-fA-F]{2}",
    re.S,
)
_EXPECTED = {
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "bool_type": "true or false",
    "int_type": "a whole number",
}
Model = TypeVar("Model", bound=BaseModel)


def read_as(model: type[Model], body: Mapping[str, Any], context: object = None) -> Model:
    """Read a body.

    Args:
        model: Its required type.
        body: The JSON object.
        context: The context of the model's validators.

    Raises:
        RefusedError: It is nested too deeply, or a field does not fit the model.
    """
    check_depth(body)
    try:
        return model.model_validate(body, context=context)
    except ValidationError as error:
        raise _refusal(error) from None


def check_depth(body: Mapping[str, Any]) -> None:
    """Refuse a body that is nested deeper than `MOST_DEPTH`; templates and renderers would fail on it."""
    if is_deeper(body, MOST_DEPTH + 1):
        raise _refused(f"the body is nested deeper than {MOST_DEPTH} levels; send a flatter one")


def without_halves(text: bytes) -> bytes:
    """Return a JSON text with U+FFFD in the place of halves of surrogate pairs that are alone."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return text
    return _ESCAPES.sub(lambda found: found[1] or b"\\ufffd", text)


def wrong(expected: str, todo: str = "send that", field: str = "") -> PydanticCustomError:
    """Return the error that a validator raises for an unexpected value.

    Args:
        expected: The expected value.
        todo: The remedy.
        field: The field of the value, an object, that is wrong; "": the value itself is.
    """
    said = {"expected": expected, "todo": todo}
    return PydanticCustomError("wrong", "{expected}; {todo}", {**said, "field": field} if field else said)


def refused(where: str, got: object, expected: str, todo: str = "send that") -> RefusedError:
    """Return the error for a field that holds something else than expected."""
    return _refused(f"{where}: got {show(got, _MOST_SHOWN)}, expected {expected}; {todo}")


def _refusal(error: ValidationError) -> RefusedError:
    first = error.errors(include_url=False)[0]
    kind, got, said = first["type"], first["input"], first.get("ctx", {})
    path = [part for part in first["loc"] if isinstance(part, int) or not part.startswith("=")]  # tags of unions
    if "field" in said and isinstance(got, dict):
        path, got = [*path, said["field"]], got.get(said["field"])
    elif "field" in said:
        kind, said = "model_type", {}
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if kind == "too_long":
        most = said["max_length"]
        return _refused(f"{where}: got {said['actual_length']} items, expected at most {most}; send fewer")
    expected = _EXPECTED.get(kind) or said.get("expected", first["msg"])
    return refused(where, got, expected, said.get("todo", "send that"))


def _refused(message: str) -> RefusedError:
    return RefusedError(400, "invalid_request_error", message)
