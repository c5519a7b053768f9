"""Common parts of replays: `ReplayDifference`, `DivergedError`, and `RecordedCalls`, which a record answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_multiturn.calls.calls import Calls
from verl_multiturn.calls.slots import Slot, Slots
from verl_multiturn.calls.tasks import Alarms


class ReplayDifference(NamedTuple):
    """A place where a replay differs from the record."""

    turn: int | None
    """Number of the generation that it belongs to; None: to none."""
    field: str
    """The field that differs, as the record names it, for example `calls.status`."""
    token: int | None
    """Position of the first token that differs, in its row or in the engine's input; None: no token does."""
    recorded: Any
    """The record's value."""
    now: Any
    """The value that today's code makes."""


class DivergedError(BaseException):
    """The replay of a conversation has come to an event that its record does not hold, and ends.

    It is not an `Exception`, since the conversation would take that for a failure of a tool or an interaction.

    Args:
        difference: Where.
    """

    def __init__(self, difference: ReplayDifference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class RecordedCalls(Calls):
    """Calls of one author's object in one recorded conversation.

    Args:
        slots: The state of the object that all conversations share.
        instance_id: Id of the conversation.
        answer: Returns the recorded result of a method, or raises its recorded error; None for the method that ends.
    """

    def __init__(self, slots: Slots, instance_id: str, answer: Callable[[str], Awaitable[Any]]) -> None:
        super().__init__(slots, instance_id, {})
        self._answer = answer

    async def call(self, method: str, *arguments: Any, slot: Slot | None = None, alarms: Alarms | None = None) -> Any:
        """Return the recorded result of a method.

        Raises:
            Exception: The recorded error of the method.
        """
        return await self._answer(method)


def raised(text: str) -> Exception:
    """Return an exception that `describe` shows as a text that it wrote, such as `KeyError: 'a'`."""
    name, colon, message = text.partition(": ")
    if not name.isidentifier():
        return Exception(text)
    made: type[Exception] = type(name, (Exception,), {})
    return made(message) if colon else made()


@dataclass(frozen=True)
class Recording:
    """The input of the recorded sessions of one conversation."""

    record: Mapping[str, Any]
    """Its record."""
    progress: Callable[[], tuple[int, int]]
    """Returns how many turns the model has made, and how many tokens are written in all rows."""
    expire: Callable[[], None]
    """Lets the conversation's time be up."""
    run_out: Callable[[], Awaitable[None]]
    """Does the same, and does not return."""
    image: Callable[[Mapping[str, Any]], Any]
    """Returns the placeholder of an image of the record."""
    user_turns: Callable[[], Sequence[int]] = tuple
    """Returns the numbers of the generations that come next and are the user's, and passes over them."""

    @property
    def turn(self) -> int:
        """Return the number of the last turn."""
        return self.progress()[0] - 1

    async def end(self) -> None:
        """Let the time be up while the conversation ends, if it was."""
        if self.record["time_up"] == "score" and self.record["stop_reason"] != "environment_error":
            self.expire()
            await asyncio.sleep(0)
