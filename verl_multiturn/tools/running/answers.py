"""Reading of the value or error of `execute` into the result of its call, checked and within its limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_multiturn.calls.invocation import BusyError, TimedOutError
from verl_multiturn.calls.metrics import plain_metrics, warn_once
from verl_multiturn.calls.timeline import is_kept
from verl_multiturn.chat.clipping import shorten
from verl_multiturn.describe import describe, message_of, show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.rows.reward_numbers import USABLE, NoNumberError, UnusableNumberError, as_reward
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.running.results import CallResult, CallStatus

_MARKS = re.compile(r"\A(?:[\s*#>`_]*(?:\[error\]:?|\berror[*_`]*:(?!:))[*_`]*\s*)+", re.IGNORECASE)
_BEGINS_AS_ERROR = re.compile(r"\s*error\b", re.IGNORECASE)
LONGEST_WHOLE = 1_000_000
"""Characters of an answer that a record keeps."""


@dataclass(frozen=True)
class UnreadableReturn:
    """Mark of a return value that breaks the contract; `problem` has the fault and the remedy."""

    problem: str


def is_response(value: Any) -> bool:
    """Return whether a value is a tool's answer as it is: text, our `ToolResponse`, or one of verl's shape."""
    return isinstance(value, str | ToolResponse) or (hasattr(value, "text") and hasattr(value, "image"))


def read_answer(result: CallResult, returned: Any, most_characters: int, foreign: bool = False) -> CallResult:
    """Read the value of `execute` into the result of its call, and return that.

    Args:
        result: The result, which names the call and its tool.
        returned: The return value.
        most_characters: Largest number of characters in the answer's text; a longer text loses its middle.
        foreign: Whether the tool was written for another agent loop (`is_foreign`). Then a reward that is not a number,
            and metrics that are not a dict, are omitted; otherwise they are errors.

    Raises:
        ToolContractError: The value is none of `ToolResponse`, `str`, or one of these with a reward and metrics; or the
            response holds a video, or images that are not a list.
    """
    if isinstance(returned, ToolResponse) and type(returned.text) is str and not returned.image:  # the usual case
        return _with_text(result, returned.text, most_characters)
    name = result.tool
    if isinstance(returned, UnreadableReturn):
        raise ToolContractError(f"tool {name!r}: {returned.problem}")
    response, reward, metrics = returned if isinstance(returned, tuple) and len(returned) == 3 else (returned, 0.0, {})
    text: Any = response if isinstance(response, str) else getattr(response, "text", response)
    if text is None and hasattr(response, "text"):
        text = ""  # verl's ToolResponse has None for no text
    if getattr(response, "video", None):
        raise ToolContractError(f"tool {name!r}: videos in a tool's response are not supported; return images")
    images = getattr(response, "image", None)
    if not isinstance(images, list | tuple | None):
        raise ToolContractError(f"tool {name!r}: `image` must be a list of images, got {show(images)}")
    if foreign and not isinstance(metrics, Mapping | None):
        metrics = None
    if isinstance(text, UnreadableReturn):
        raise ToolContractError(f"tool {name!r}: {text.problem}")
    if not isinstance(text, str) or not isinstance(metrics, Mapping | None):
        raise ToolContractError(
            f"tool {name!r}: execute must return ToolResponse, str, or (response, reward, metrics); "
            f"got {show(returned)}"
        )
    number = None if reward is None else read_reward(name, "execute", reward, foreign)
    # All is read before anything is written: the author's code may raise, and then the call has failed.
    read = plain_metrics(name, metrics or {}), tuple(images or ())
    result.metrics, result.images = read
    result.reward = number or 0.0
    # A plain str: a subclass may have methods of the author's.
    return _with_text(result, str.__str__(text), most_characters)


def read_failure(result: CallResult, error: Exception, timeout_s: float, most_characters: int) -> CallResult:
    """Write into the result of a call how the call failed and the text for the model, and return that.

    Args:
        result: The result.
        error: The tool's error, or the one that stopped it.
        timeout_s: Seconds that the call had.
        most_characters: As for `read_answer`.
    """
    result.status, said = CallStatus.ERROR, describe(error)
    if isinstance(error, BusyError):
        result.status, said = CallStatus.OVERLOADED, str(error)
    elif isinstance(error, TimedOutError):
        result.status, said = CallStatus.TIMEOUT, f"the tool did not answer within {timeout_s:g} s"
    elif isinstance(error, ValueError):
        said = message_of(error) or said
    _with_text(result, as_error(said), most_characters)
    result.truncated = False  # it applies only to answers
    return result


def as_error(text: str) -> str:
    """Return the text of a failure as the model reads it: marked as an error once, also where the text marks itself.

    Example: `no such file`, `error: no such file` and `[ERROR] no such file` become `Error: no such file`. A text such
    as `Error executing tool f: …` stays as it is.
    """
    bare = _MARKS.sub("", text)
    is_marked = _BEGINS_AS_ERROR.match(text) if bare == text else not bare
    return text if is_marked else f"Error: {bare}"


def _with_text(result: CallResult, text: str, most_characters: int) -> CallResult:
    result.text = shorten(text, most_characters)
    if len(text) > most_characters:
        result.truncated = True
        result.whole = text[:LONGEST_WHOLE] if is_kept() else None
    return result


def read_reward(name: str, method: str, value: Any, foreign: bool = False) -> float | None:
    """Return a reward as a float; None for NaN, an infinite number, or one that is too large.

    The log names the tool once for each method whose reward is omitted.

    Args:
        name: The tool's name, for errors.
        method: The method that returned the reward, for errors.
        value: The reward.
        foreign: Whether the tool was written for another agent loop (`is_foreign`). Then the result is None, and no
            error, for a value that is not a number.

    Raises:
        ToolContractError: The value is not a number.
    """
    try:
        return as_reward(value)
    except NoNumberError as error:
        if not foreign:
            remedy = "" if "; return" in str(error) else "; return one number"
            raise ToolContractError(
                f"tool {name!r}: the reward of {method} must be a number, {error}{remedy}"
            ) from None
    except UnusableNumberError:
        pass
    warn_once(f"tool {name!r}", f"the reward of {method} is no {USABLE} and is left out", f": {show(value)}")
    return None
