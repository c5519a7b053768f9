"""Calls of the methods of an author's object under examination, made as the runtime makes them.

Invariant: whatever the author's code does comes back as a `ProbeResult`, an end by `exit` and a call that never ends
included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_multiturn.calls.invocation import Invocation, TimedOutError
from verl_multiturn.calls.limits import outage_rules
from verl_multiturn.calls.outages.authorship import WrittenTexts
from verl_multiturn.calls.outages.causes import Cause, cause_of
from verl_multiturn.calls.owner import Owner
from verl_multiturn.calls.tasks import Alarms
from verl_multiturn.checking import instruments
from verl_multiturn.checking.shared_state import Moment, seen
from verl_multiturn.describe import describe, place_among, place_of

DEFAULT_TIMEOUT_S = 10.0
"""Seconds after which a call counts as hanging, where neither the caller nor the object's YAML entry sets them."""

LONGEST_TIMEOUT_S = 60.0
"""Most seconds taken from an object's YAML entry alone: no one waits for hours to learn that a call hangs."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of a call of a method: a value or an error, and the seconds that it took."""

    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    cause: Cause = "model"
    """Whose the error is, with the limits of the object's entry."""
    place: str = ""
    """Where the call was when its time was up, in the words of `place_of`."""

    @property
    def timed_out(self) -> bool:
        """True if the method did not end in time."""
        return isinstance(self.error, TimedOutError)

    @property
    def kind(self) -> Literal["", "late", "outage", "raised"]:
        """Return how the call failed, as the advice names it; "" where it did not."""
        if self.error is None:
            return ""
        return "late" if self.timed_out else "outage" if self.cause == "outage" else "raised"

    def failure(self, refusals: bool = True) -> str:
        """Return how the call failed, in words; empty where it did not.

        Args:
            refusals: Whether a ValueError is a failure, and not an answer.
        """
        if self.error is None or (isinstance(self.error, ValueError) and not refusals):
            return ""
        if self.timed_out:
            return f"hangs: {self.error}{self.place}"
        counts = {"outage": ", an outage in a run", "bug": ", a bug in a run"}
        return f"raised {describe(self.error)[:250]}{place_of(self.error)}{counts.get(self.cause, '')}"


class CallProbe:
    """An author's object whose methods are called, one by one.

    Args:
        owner: The object.
        timeout_s: Seconds after which a method counts as hanging; None: the `limits.timeout_s` of its YAML entry, but
            neither less than `DEFAULT_TIMEOUT_S`, since many calls run at once, nor more than `LONGEST_TIMEOUT_S`.

    Attributes:
        owner: As given.
        timeout_s: Seconds after which a call counts as hanging.
        outage: Which failures are its outages.
        end_s: Seconds for steps without a limit in a run: the end of a conversation, a call that was cancelled, and the
            loop.
    """

    def __init__(self, owner: Owner, timeout_s: float | None) -> None:
        self.end_s = timeout_s or DEFAULT_TIMEOUT_S
        self.timeout_s = timeout_s or min(max(DEFAULT_TIMEOUT_S, owner.limits.timeout_s or 0.0), LONGEST_TIMEOUT_S)
        self.moments: list[Moment] | None = None
        """Calls while it is a list, with the object's attributes before and after each."""
        self.owner = owner
        self.outage = outage_rules(owner.made, owner.limits, f"{owner.kind} {owner.name!r}")

    def kwargs_of(self, method: str, arguments: tuple[Any, ...]) -> Mapping[str, Any]:
        """Return the keyword arguments of a call.

        Args:
            method: Name of the method.
            arguments: Positional arguments of the call.
        """
        return {}

    def attributes(self) -> Iterable[tuple[str, Any]]:
        """Return the names and values of the object's attributes."""
        return list(getattr(self.owner.made, "__dict__", {}).items())

    async def call(self, method: str, *arguments: Any) -> ProbeResult:
        """Call a method, and return how it ended; one that does not end within its time is cancelled."""
        before = seen(self.attributes()) if self.moments is not None else {}
        outcome = await self._call(method, arguments)
        if self.moments is not None:
            self.moments.append(Moment(method, arguments[0], before, seen(self.attributes())))
        return outcome

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> ProbeResult:
        loop = asyncio.get_running_loop()
        started, limit_s = loop.time(), self.end_s if method == self.owner.end else self.timeout_s
        value: Any = None
        failure: Exception | None = None
        place = ""
        try:
            invocation = self._start(method, arguments)
            await invocation.ended(Alarms(limit_s, is_fair=False))
            place = "" if invocation.done else place_among(invocation.frames())
            value = invocation.result()
        except TimedOutError:
            failure = TimedOutError(f"no answer within {limit_s:g} s")
        except Exception as error:  # the author's own code
            failure = error
        rules, written = self.outage, WrittenTexts(arguments[1:], [self.kwargs_of(method, arguments)])
        cause: Cause = "model"
        if failure is not None:
            cause = cause_of(failure, rules.timeouts or "model", rules.errors, written, rules.addresses)
        return ProbeResult(value, failure, loop.time() - started, cause, place)

    async def cancel(self, method: str, wait: Callable[[], Awaitable[None]], *arguments: Any) -> tuple[bool, Any]:
        """Start a call, cancel it after `wait`, and return whether it ended, and its value if it returned one."""
        invocation = self._start(method, arguments)
        await asyncio.sleep(0)
        await wait()
        if left := invocation.stop():
            # A thread cannot be cancelled: it gets the time to end by itself.
            settle_s = instruments.SETTLE_S if self.owner.is_coroutine[method] else self.end_s
            _, running = await asyncio.wait(left, timeout=settle_s)
            if running:
                return False, None
        try:
            return True, invocation.result()
        except Exception:  # also where it was cancelled
            return True, None

    def _start(self, method: str, arguments: tuple[Any, ...]) -> Invocation:
        return self.owner.invoke(method, arguments, self.kwargs_of(method, arguments))
