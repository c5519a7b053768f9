"""Reading of an interaction's results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.calls.metrics import plain_metrics
from verl_multiturn.chat.clipping import shorten
from verl_multiturn.chat.images import is_pil
from verl_multiturn.config import ASSISTANT, USER
from verl_multiturn.describe import show
from verl_multiturn.errors import InteractionContractError
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.running.state_digest import state_digest
from verl_multiturn.rows.reward_numbers import USABLE, NoNumberError, UnusableNumberError, as_reward, plain_scalar


class InteractionFailedError(Exception):
    """The interaction cannot go on with a conversation; the text gives the reason."""


@dataclass(frozen=True)
class CheckedReply:
    """A `Reply` that has been checked, in plain types and within its limits."""

    text: str = ""
    images: tuple[Any, ...] = ()
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    state: str | None = None
    """Digest of the reply's state, equal for equal states in all processes; None without a state."""
    metrics: dict[str, Any] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    at: float = field(default_factory=time.time, compare=False)
    """Time (`time.time`) at which it was there; for traces alone."""


def read_reply(name: str, method: str, returned: Any, most_characters: int) -> CheckedReply:
    """Read the result of `start` or `reply`.

    Args:
        name: The interaction's name, for errors.
        method: The method that returned it, for errors.
        returned: The return value.
        most_characters: Largest number of characters in the text; a longer text loses its middle.

    Raises:
        InteractionContractError: The value is not a `Reply`, or one of its fields has a wrong type.
        InteractionFailedError: The reward cannot be used (`read_number`).
    """
    if not isinstance(returned, Reply):
        raise InteractionContractError(f"interaction {name!r}: {method} must return a Reply, got {show(returned)}")
    where = f"interaction {name!r}: {method} returned a Reply whose"
    if not isinstance(returned.text, str):
        raise InteractionContractError(f"{where} text is {show(returned.text)}; give a str")
    if not isinstance(returned.image, list | tuple | None):
        raise InteractionContractError(f"{where} image is {show(returned.image)}; give a list of PIL images")
    images = tuple(image for image in returned.image or () if image is not None)
    if strange := [image for image in images if not is_pil(image)]:
        raise InteractionContractError(f"{where} image holds {show(strange[0])}; give PIL images")
    if not isinstance(returned.metrics, Mapping):
        raise InteractionContractError(f"{where} metrics are {show(returned.metrics)}; give a mapping")
    return CheckedReply(
        shorten(str.__str__(returned.text), most_characters),
        images,
        None if returned.reward is None else read_number(name, method, returned.reward),
        _flag(returned.done, f"{where} done"),
        _flag(returned.truncated, f"{where} truncated"),
        None if returned.state is None else state_digest(returned.state, f"{where} state"),
        plain_metrics(name, returned.metrics, "interaction"),
        _names(returned.shows, method, f"{where} shows"),
    )


def read_score(name: str, value: Any) -> tuple[float, dict[str, float]]:
    """Return the result of `score` as a number and as rewards by role, {} where it gives none.

    Of rewards by role, the number is the assistant's.

    Raises:
        InteractionContractError: It is neither a number nor rewards of the two roles.
        InteractionFailedError: A number cannot be used.
    """
    if not isinstance(value, Mapping):
        return read_number(name, "score", value), {}
    where, roles = f"interaction {name!r}: score", value.get("roles")
    if set(value) != {"roles"} or not isinstance(roles, Mapping):
        raise InteractionContractError(
            f"{where} returned {show(value, 100)}; give a number, or {{'roles': {{'{ASSISTANT}': 1.0, '{USER}': 0.0}}}}"
        )
    if strange := [role for role in roles if role not in (ASSISTANT, USER)]:
        raise InteractionContractError(
            f"{where} rewards the role {show(strange[0], 60)}; the roles are {ASSISTANT!r} and {USER!r}"
        )
    if missing := [role for role in (ASSISTANT, USER) if role not in roles]:
        raise InteractionContractError(f"{where} gives {missing[0]!r} no reward; give one to each role")
    given = {str(role): read_number(name, f"score of {role!r}", reward) for role, reward in roles.items()}
    return given[ASSISTANT], given


def read_number(name: str, method: str, value: Any) -> float:
    """Return a reward or score as a float.

    Raises:
        InteractionContractError: The value is not a number.
        InteractionFailedError: It is NaN, infinite, or too large. To leave it out would make it a zero.
    """
    where = f"interaction {name!r}: {method}"
    try:
        return as_reward(value)
    except NoNumberError as error:
        raise InteractionContractError(f"{where} must give a number as reward, {error}") from None
    except UnusableNumberError:
        raise InteractionFailedError(f"{where} gave {show(value)}, which is no {USABLE}") from None


def _names(value: Any, method: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise InteractionContractError(f"{where} is {show(value)}; give a list of names of tools")
    if value and method == "start":
        raise InteractionContractError(
            f"{where} is {show(value)}, and what the row hides is shown by reply() alone; leave the tools shown in the "
            "row, or show them later"
        )
    return tuple(value)


def _flag(value: Any, where: str) -> bool:
    flag = plain_scalar(value)
    if not isinstance(flag, bool):
        raise InteractionContractError(f"{where} is {show(value)}; give True or False")
    return flag
