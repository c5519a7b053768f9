"""`CallAnswer`: what `execute` returned, checked and within its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.calls.metrics import plain_metrics, warn_once
from verl_multiturn.calls.timeline import is_kept
from verl_multiturn.chat.clipping import shorten
from verl_multiturn.describe import show
from verl_multiturn.errors import ToolContractError
from verl_multiturn.reward_numbers import USABLE, NoNumberError, UnusableNumberError, as_reward
from verl_multiturn.tools.base import ToolResponse

LONGEST_WHOLE = 1_000_000
"""Characters of an answer that a record keeps."""


@dataclass(frozen=True)
class UnreadableReturn:
    """Mark of a return value that breaks the contract; `problem` says how, and what to do."""

    problem: str


def is_response(value: Any) -> bool:
    """Return whether a value is a tool's answer as it is: text, our `ToolResponse`, or one of verl's shape."""
    return isinstance(value, str | ToolResponse) or (hasattr(value, "text") and hasattr(value, "image"))


@dataclass(slots=True)
class CallAnswer:
    """Answer of `execute` to one call, checked and within its limits."""

    text: str
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    truncated: bool = False
    """True if the text lost its middle, because it was longer than `response_characters`."""
    whole: str | None = None
    """The text before that, for a record; None: it lost nothing, or the conversation is not recorded."""


def whole_of(text: str, most_characters: int) -> str | None:
    """Return what a record keeps of a text that loses its middle: its first `LONGEST_WHOLE` characters.

    None: it loses nothing, or the conversation is not recorded.

    Args:
        text: The text.
        most_characters: Largest number of characters that the model may read.
    """
    return text[:LONGEST_WHOLE] if len(text) > most_characters and is_kept() else None


def read_answer(name: str, returned: Any, most_characters: int, foreign: bool = False) -> CallAnswer:
    """Read what `execute` returned.

    Args:
        name: The tool's name, for errors.
        returned: The return value.
        most_characters: Largest number of characters in the answer's text; a longer text loses its middle.
        foreign: Whether the tool was written for another agent loop (`is_foreign`). Then a reward that is not a number,
            and metrics that are not a dict, are left out; otherwise they are errors.

    Raises:
        ToolContractError: The value is none of `ToolResponse`, `str`, or one of these with a reward and metrics; or the
            response holds a video, or images that are not a list.
    """
    if isinstance(returned, ToolResponse) and type(returned.text) is str and not returned.image:  # the usual case
        said = returned.text
        if len(said) <= most_characters:
            return CallAnswer(said)
        return CallAnswer(shorten(said, most_characters), truncated=True, whole=whole_of(said, most_characters))
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
    text = str.__str__(text)  # a plain str: a subclass may have methods of the author's
    short = shorten(text, most_characters)
    metrics = plain_metrics(name, metrics or {})
    is_long, whole = len(text) > most_characters, whole_of(text, most_characters)
    return CallAnswer(short, number or 0.0, metrics, tuple(images or ()), is_long, whole)


def read_reward(name: str, method: str, value: Any, foreign: bool = False) -> float | None:
    """Return a reward as a float; None for NaN, an infinite number, or one that is too large.

    The log names the tool once for each method whose reward is left out.

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
