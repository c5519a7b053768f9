"""Attributes of an author's object that hold data of one conversation, though all conversations share them.

Invariant: an attribute is named only where beginning a conversation overwrites another one's value in it. Counters,
caches, connections that are made at first, and containers with the ids of conversations as their keys are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.describe import show

_CHARACTERS = 5_000
"""Characters of an attribute's `repr` that are compared."""


@dataclass(frozen=True)
class Moment:
    """A call of a method, and the attributes of the object before and after it, as text."""

    method: str
    instance_id: str
    before: Mapping[str, str]
    after: Mapping[str, str]


def seen(attributes: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the attributes of an object as texts that can be compared."""
    return {name: show(value, _CHARACTERS) for name, value in attributes}


def overwritten(moments: Sequence[Moment], begin: str, others: Sequence[bool]) -> dict[str, str]:
    """Return the attributes that each conversation overwrites when it begins, and how, in words.

    Args:
        moments: All calls of conversations that ran one after the other.
        begin: The method that begins a conversation; each ends with its last call.
        others: For each conversation, whether it is of another row than the first one. The last one is of the first.
    """
    first = [index for index, moment in enumerate(moments) if moment.method == begin]
    begun = [moments[index] for index in first]
    worked = [moments[after - 1].before for after in [*first[1:], len(moments)]]
    found: dict[str, str] = {}
    for name in begun[0].after:
        after = [moment.after.get(name, "") for moment in begun]
        same = {value for value, is_other in zip(after, others, strict=True) if not is_other}
        beside = {value for value, is_other in zip(after, others, strict=True) if is_other}
        if all(value == repr(moment.instance_id) for value, moment in zip(after, begun, strict=True)):
            found[name] = "is the id of the conversation that began last"
        elif len(same) == 1 and beside and not beside & same:
            found[name] = f"is {after[0]:.60} for one row, {next(iter(beside)):.60} for another"
        elif len(same | beside) == 1 and any(
            moment.before.get(name) != moment.after[name] and left.get(name) != moment.after[name]
            for moment, left in zip(begun[1:], worked[:-1], strict=True)
        ):
            found[name] = f"is set to {after[0]:.60} again by each conversation that begins"
    return found
