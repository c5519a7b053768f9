"""Reading of a typed function's result: an answer with a reward, or data.

| it returns | which is |
|---|---|
| a text, a `ToolResponse` | the answer |
| a tuple of three whose last is a dictionary | (response, reward, metrics) |
| (text, number, None) | (response, reward, metrics) without metrics |
| (text, number), `[text, …, {…}]`, another tuple or list that begins with a `ToolResponse` | refused: reward or data? |
| anything else, such as (48.9, 2.4) | data, which the model reads as JSON (`calls/json_values.py`) |

A number is a value that `reward_numbers.is_number` accepts: True and False, too.

Invariants:
- a reward counts, or the tool's contract is broken and the error shows how: it never becomes text for the model;
- a function's result is read by its form alone, and a tuple whose annotation names another form is data.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Union

from verl_multiturn.calls.json_values import NoJsonError, json_text
from verl_multiturn.describe import show
from verl_multiturn.rows.reward_numbers import is_number, plain_scalar
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.running.answers import UnreadableReturn, is_response

_REMEDY = "return (text, reward, {}) for a reward, or a dictionary for data"


@dataclass(frozen=True)
class ReturnAnnotation:
    """Annotation of a function, as far as it describes the tuples that it returns.

    Attributes:
        is_pair_with_a_reward: Whether it is a text and a number, which may be meant as a reward.
        is_data: Whether it is a tuple of another form than (response, reward, metrics).
    """

    is_pair_with_a_reward: bool = False
    is_data: bool = False

    @classmethod
    def read(cls, annotation: Any) -> ReturnAnnotation:
        """Read the annotation of a return value.

        Args:
            annotation: The annotation; None where the function has none.
        """
        options = _options(annotation)
        if named := [each for each in options if isinstance(each, type) and hasattr(each, "_fields")]:
            last = list(typing.get_type_hints(named[0]).values())[-1:]
            return cls(is_data=not (last and _may_be_metrics(last[0])))
        for option in options:
            parts = typing.get_args(option)
            if typing.get_origin(option) is not tuple or not parts or ... in parts:
                continue
            if len(parts) == 2 and any(each in (str, ToolResponse) for each in _options(parts[0])):
                return cls(is_pair_with_a_reward=any(map(_is_number_type, _options(parts[1]))))
            return cls(is_data=len(parts) != 3 or not _may_be_metrics(parts[2]))
        return cls()


def read_return(returned: Any, annotation: ReturnAnnotation) -> Any:
    """Return a function's return value in a form that `execute` may return.

    Args:
        returned: The return value.
        annotation: The function's annotation of its result.
    """
    if is_response(returned):
        return returned
    if isinstance(returned, tuple | list) and not annotation.is_data:
        if isinstance(returned, tuple) and _is_result(returned):
            response, reward, metrics = returned
            return response if is_response(response) else _as_json(response), reward, metrics
        if _is_like_a_result(returned):
            return UnreadableReturn(f"execute returned {show(returned)}, which may be a reward or data; {_REMEDY}")
    return _as_json(returned)


def _as_json(value: Any) -> Any:
    try:
        return json_text(value)
    except NoJsonError as error:
        return UnreadableReturn(
            f"execute returned what JSON cannot express: {error}; return text, a ToolResponse, "
            "(response, reward, metrics), or data in plain types"
        )


def _is_result(returned: tuple[Any, ...]) -> bool:
    """Return whether a tuple is (response, reward, metrics)."""
    if len(returned) != 3:
        return False
    response, reward, metrics = returned
    if isinstance(metrics, Mapping):
        return True
    return metrics is None and is_response(response) and (not isinstance(response, str) or _is_nearly_number(reward))


def _is_like_a_result(returned: tuple[Any, ...] | list[Any]) -> bool:
    """Return whether a tuple or a list that is not a result looks like one: the reward would be lost."""
    if not returned or not is_response(returned[0]):
        return False
    if not isinstance(returned[0], str):
        return True
    if isinstance(returned, list):
        return len(returned) == 3 and isinstance(returned[2], Mapping)
    return len(returned) == 2 and (is_number(returned[1]) or _is_array_of_one(returned[1]))


def _is_nearly_number(value: Any) -> bool:
    """Return whether a value is a number, or a container of one: a text, a list or an array."""
    if is_number(value) or _is_array_of_one(value):
        return True
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, list | tuple) and len(value) == 1 and is_number(value[0])


def _is_array_of_one(value: Any) -> bool:
    if isinstance(value, str | list | tuple):
        return False
    try:
        return is_number(plain_scalar(value.reshape(())))
    except Exception:  # it is not an array or tensor, or one of more numbers
        return False


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; the annotation itself, where it is none."""
    if hasattr(annotation, "__metadata__"):
        return _options(annotation.__origin__)
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _is_number_type(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Real | Decimal)


def _may_be_metrics(annotation: Any) -> bool:
    """Return whether an annotation allows metrics: a mapping, or None alone."""
    kinds = [typing.get_origin(each) or each for each in _options(annotation)]
    return set(kinds) == {types.NoneType} or any(
        each in (Any, object) or (isinstance(each, type) and issubclass(each, Mapping)) for each in kinds
    )
