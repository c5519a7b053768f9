"""An examination: checks of an author's object, one after the other, each with a finding.

Invariants:
- a check compares the object with itself, alone and warmed up: slow machines, first imports and pools are not findings;
- a check that cannot pass, for a reason that an earlier check has found, is skipped, and its finding gives that reason.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from verl_multiturn.checking.instruments import LATE_S, ExaminationWatch, growth, private_temporary_folder
from verl_multiturn.checking.method_calls import CallProbe, ProbeResult
from verl_multiturn.errors import ConfigError, InteractionContractError, ToolContractError

AT_ONCE = 64
"""Largest number of conversations at once in a check."""
_RUNS = 3
_CLOSING_S = 5.0


class Grade(StrEnum):
    """Result of a check. PROBLEM: the examined object will fail in a run."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: its name, its verdict, the finding, and the remedy."""

    check: str
    verdict: Grade
    found: str
    remedy: str = ""


Timed = Callable[[str, Coroutine[Any, Any, ProbeResult]], Awaitable[ProbeResult]]
"""Await a call of a method, given by name, and note its time."""
Wait = Callable[[], Awaitable[None]]


class Examination(ABC):
    """All checks of one object, in order; a failed early check makes the later ones meaningless, and skips them.

    Args:
        called: Calls the methods of the object.
        watch: ExaminationWatch over the event loop of the examination.
        temporary: Folder of temporary files of this process.
        advice: Advice by the name of the check.
    """

    def __init__(self, called: CallProbe, watch: ExaminationWatch, temporary: Path, advice: Mapping[str, str]) -> None:
        self._called = called
        self.findings: list[CheckResult] = []
        self.done = False
        self.watch = watch
        self.advice = advice
        self.temporary = temporary
        self.seconds: dict[str, float] = {}
        """Shortest time of a call, by method."""

    @abstractmethod
    async def first(self) -> bool:
        """Run the checks that the others need, and return whether more of them are of use."""

    @abstractmethod
    def checks(self) -> dict[str, Callable[[str], Awaitable[None]]]:
        """Return the checks by name. The first is the one of the event loop."""

    @abstractmethod
    async def converse(self, timed: Timed) -> None:
        """Run one conversation.

        Args:
            timed: Wrapper in which each call is awaited.
        """

    @abstractmethod
    async def end(self) -> None:
        """Close the examined object."""

    @abstractmethod
    def arguments_of(self, method: str) -> tuple[Any, ...]:
        """Return the arguments of a call after the conversation's id.

        Args:
            method: Name of the method.
        """

    def id_of(self, begun: Any, given: str) -> str:
        """Return the id of a conversation.

        Args:
            begun: The return value of the method that began it.
            given: The id that it was given.
        """
        return given

    def note(self, check: str, verdict: Grade, found: str, remedy: str = "") -> None:
        """Add a finding."""
        self.findings.append(CheckResult(check, verdict, found, remedy))

    def judge(self, check: str, problem: str, remedy: str, fine: str = "") -> None:
        """Add the finding that there is a problem, or none."""
        self.note(check, Grade.PROBLEM if problem else Grade.OK, problem or fine, remedy if problem else "")

    async def run(self) -> None:
        """Run all checks, close the examined object, and set `done`."""
        self.watch.start()
        try:
            sound = await self.first()
            for name, check in self.checks().items():
                if not sound:
                    self.note(name, Grade.SKIPPED, "", "first mend what is above")
                    continue
                try:
                    await check(name)
                except (ToolContractError, InteractionContractError) as error:
                    self.note(name, Grade.PROBLEM, str(error), self.advice["every call"])
                sound = name != "event loop" or self.findings[-1].verdict is Grade.OK
        finally:
            await self.end()
            self.watch.stop()
            self.done = True

    async def event_loop(self, check: str) -> None:
        """Find code that blocks the loop in every run; a busy machine, or a first import, does so only in some."""
        shortest: dict[str, tuple[float, str]] = {}

        async def timed(method: str, call: Coroutine[Any, Any, ProbeResult]) -> ProbeResult:
            outcome, blocked, place = await self.watch.longest(call)
            before, known_place = shortest.get(method, (math.inf, ""))
            shortest[method] = min(before, blocked), place or known_place
            self.seconds[method] = min(self.seconds.get(method, math.inf), outcome.seconds)
            return outcome

        for _ in range(_RUNS):
            await self.converse(timed)
        worst = max(shortest, key=lambda method: shortest[method])
        seconds, place = shortest[worst]
        at = place and f", at {place}"
        problem = f"{worst} blocks it for {seconds * 1000:.0f} ms{at}" if seconds > LATE_S else ""
        took = ", ".join(f"{method} {seconds * 1000:.0f} ms" for method, seconds in self.seconds.items())
        self.judge(check, problem, self.advice[check], f"free; {took}")

    async def leftovers(self, check: str) -> None:
        """Find leftovers of every conversation, and attributes that still hold an ended conversation's id."""
        ids: list[str] = []

        async def untimed(_: str, call: Coroutine[Any, Any, ProbeResult]) -> ProbeResult:
            return await call

        async def converse() -> None:
            await self.converse(untimed)
            ids.append(self.last_id)

        left = await growth(converse, self.temporary)
        holding = [
            name
            for name, value in self._called.attributes()
            if isinstance(value, dict | set | list) and len(value) < 100_000
            if any(instance_id in str(key) for key in value for instance_id in ids)
        ]
        left += [f"the id of an ended conversation in self.{name}" for name in holding]
        problem = f"each conversation leaves {'; '.join(left)}" if left else ""
        self.judge(check, problem, self.advice[check], "none")

    last_id = ""
    """Id of the conversation of the last `converse`."""

    async def end_after_a_failed_begin(self, check: str) -> None:
        """End a conversation that never began."""
        ended = await self._called.call(self._called.owner.end, uuid.uuid4().hex)
        remedy = self.advice[check]
        if ended.timed_out:
            self.note(check, Grade.PROBLEM, ended.failure(), remedy)
        elif ended.error is not None:
            self.note(check, Grade.WARNING, f"{ended.failure()}; all that it gives back otherwise is lost", remedy)
        else:
            self.note(check, Grade.OK, "")

    async def cancel(self, check: str, method: str) -> None:
        """Cancel a method at several moments, and check its leftovers.

        Args:
            check: Name of the check.
            method: Name of the method.
        """
        problems: list[str] = []

        async def at_all_moments() -> None:
            for wait in _moments(self.seconds[method]):
                if not problems and (problem := await self._cancelled(method, wait)):
                    problems.append(problem)

        left = await growth(at_all_moments, self.temporary)
        if left:
            problems.append(f"a cancelled {method} leaves {'; '.join(left)}")
        self.judge(check, "; ".join(dict.fromkeys(problems)), self.advice["cancel"], "leaves nothing")

    async def _cancelled(self, method: str, wait: Wait) -> str:
        """Run a conversation, cancel a method after a wait, and return the fault."""
        called, owner = self._called, self._called.owner
        problems: list[str] = []
        given = uuid.uuid4().hex
        if method != owner.begin:
            given = self.id_of((await called.call(owner.begin, given)).value, given)
        ended, value = await called.cancel(method, wait, given, *self.arguments_of(method))
        if not ended:
            problems.append(f"{method} goes on after it was cancelled")
        if method != owner.end:
            last = await called.call(owner.end, self.id_of(value, given) if method == owner.begin else given)
            if last.timed_out or (last.error is not None and method != owner.begin):
                problems.append(f"{owner.end} {last.failure()} after {method} was cancelled")
        return "; ".join(problems)


def _moments(seconds: float) -> Iterable[Wait]:
    """Yield waits after which to cancel a call of so many seconds: after its first steps, and during its waits."""

    async def steps(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    yield from (functools.partial(steps, count) for count in (0, 1, 2, 3))
    if seconds > 0.004:
        yield from (functools.partial(asyncio.sleep, seconds * share) for share in (0.25, 0.5, 0.75))


def examine(check: Callable[..., list[CheckResult]], advice: str, made: Any, **given: Any) -> list[CheckResult]:
    """Examine an object, and return a ConfigError as a finding, too.

    Args:
        check: `check_tool` or `check_interaction`.
        advice: Remedy for a ConfigError.
        made: The object.
        given: The other arguments of the check, as keywords.
    """
    try:
        return check(made, **given)
    except ConfigError as error:
        return [CheckResult("row kwargs", Grade.PROBLEM, str(error), advice)]


def run_examination(make: Callable[[ExaminationWatch, Path], Examination], timeout_s: float) -> list[CheckResult]:
    """Run an examination on an event loop that is watched from outside, and return its findings.

    Args:
        make: Makes the examination.
        timeout_s: Seconds after which a call counts as hanging.
    """
    watch = ExaminationWatch()
    failures: list[BaseException] = []
    with private_temporary_folder() as temporary:
        examination = make(watch, temporary)

        def run() -> None:
            try:
                asyncio.run(examination.run())
            except BaseException as error:  # raised again in the caller's thread
                failures.append(error)

        # Run the loop in a thread of its own: it is watched from outside, and the author's code may block it forever.
        thread = threading.Thread(target=run, daemon=True, name="check")
        thread.start()
        while thread.is_alive() and not examination.done:
            thread.join(0.01)
            if watch.stands_still_s > timeout_s + AT_ONCE * LATE_S:
                found = f"blocked for ever by {watch.place}"
                watch.stop()
                examination.note("event loop", Grade.PROBLEM, found, examination.advice["event loop"])
                break
        else:
            thread.join(_CLOSING_S)  # not longer: a task that ignores its cancellation keeps the loop from closing
    if failures:
        raise failures[0]
    return list(examination.findings)
