"""Reading the action in the model's text, and writing how to give one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_multiturn.chat.model_text import last_tag
from verl_multiturn.describe import show

_TAG = "action"
_MARKUP = " \t*_`\"'.,!"


class UnreadableError(ValueError):
    """A turn in which no action can be read; the text is for the model."""


def read_action(text: str, actions: Sequence[str] | None, space: Any) -> Any:
    """Return the action that a turn gives.

    An action is in the turn's last `<action>…</action>`, or is its last line. An environment that has neither a
    list of names nor a `Discrete` space reads text: it gets the content of the tag, or the whole turn.

    Args:
        text: The model's text.
        actions: Names of the actions 0, 1, …; None: there is no list.
        space: The environment's `action_space`; None if it has none.

    Raises:
        UnreadableError: The turn gives none.
    """
    said = last_tag(text, _TAG)
    numbers = type(space).__name__ == "Discrete"
    if actions is None and not numbers:
        if not (whole := text if said is None else said):
            raise UnreadableError("it is empty")
        return whole
    if said is None:
        lines = [line for line in text.splitlines() if line.strip()]
        said = lines[-1] if lines else ""
    said = said.strip().strip(_MARKUP)
    if actions is not None:
        wanted = said.casefold()
        found = [index for index, name in enumerate(actions) if name.casefold() == wanted]
        if found:
            return found[0]
        raise UnreadableError(f"{show(said, 60)} is none of the actions")
    first, count = int(getattr(space, "start", 0)), int(space.n)
    if said.isascii() and said.isdigit() and len(said) < 10 and first <= int(said) < first + count:
        return int(said)
    raise UnreadableError(f"{show(said, 60)} is no number from {first} to {first + count - 1}")


def asking(problem: str, actions: Sequence[str] | None, own: bool) -> str:
    """Return the message that asks the model for another action.

    Args:
        problem: Why the last turn could not be read.
        actions: As in `read_action`.
        own: Whether a function of the author reads the actions. It need not know the tag.
    """
    named = f" Give one of these actions: {', '.join(actions)}." if actions else ""
    end = "" if own else f" End with <{_TAG}>…</{_TAG}>."
    return f"Your action cannot be read: {problem}.{named}{end}"


def plain(value: Any) -> Any:
    """Return a value of NumPy, as rows may hold, as JSON has it; the `default` of `json.dumps`."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{show(value, 60)} is no plain value")
