"""`Watch` over what has a name, in one process (`process.py`); `Watched` stands beside each call of it.

    wait  ──open──▶ clock stands still ──closed, or the probe──▶ slot → call ──┬─ answered, whatever it was ─▶ a sum
      └──closed────────────────────────────────────────────────▶               └─ outage ─▶ told at once
                                                                                    ├─ closed: the model reads it
                                                                                    └─ open: the conversation ends

While nothing is wrong a call costs the look at one number and a sum, which is reported twice a second.

Invariants:
- an outage is known to the keeper before its conversation goes on;
- a call that waits, waits at most `stop_s`, also where the keeper has died and cannot be reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from math import inf
from typing import Any, Protocol
from uuid import uuid4

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.authorship import NOTHING, WrittenTexts
from verl_multiturn.calls.outages.breaker import WINDOW_S, Outage
from verl_multiturn.calls.outages.causes import cause_of, next_try_s
from verl_multiturn.calls.outages.keeper import Admitted, Keeper, Sums, Waiting
from verl_multiturn.calls.timeline import during
from verl_multiturn.config import OutageSettings
from verl_multiturn.describe import describe, place_of
from verl_multiturn.errors import InteractionContractError, ToolContractError
from verl_multiturn.tasks import keep

logger = logging.getLogger(__name__)

TOLD_S = 10.0
"""Seconds in which a keeper must take a report; a new one may have to start."""
_BESIDE_S = 1.0
"""Seconds after a call within which another one began beside it."""
_MOST_PROBES = 3
"""Probes of one call that fail, over at least `_PROBES_S`, after which its conversation ends: it may be its doing."""
_PROBES_S = 600.0


class OutageEndError(Exception):
    """A conversation has to end, since it waited for too long for the end of an outage."""


_NO_CAUSE = (OutageEndError, ToolContractError, InteractionContractError)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Process(Protocol):
    """What a watch needs of its process: `Outages`, of `process.py`."""

    settings: OutageSettings
    stopped: Callable[[], AbstractContextManager[None]]
    process: str

    def is_judged(self, conversation: str) -> bool:
        """See `Outages.is_judged`."""

    def begin(self) -> None:
        """See `Outages.begin`."""

    def report_soon(self) -> None:
        """See `Outages.report_soon`."""

    async def tell(self, sums: dict[str, Sums]) -> bool:
        """See `Outages.tell`."""

    async def ask(self, question: Callable[[Keeper], Awaitable[Any]], patience_s: float = inf) -> Any:
        """See `Outages.ask`."""


class Watch:
    """The watch of one process over what has a name.

    Attributes:
        name: The name, for example `tool search`.
        epoch: Epoch of its breaker, as far as it is known here.
        opened_at: Time of the loop's clock at which it was learnt.
        running: Calls that have not ended, with the time at which they began.
        newest: When the newest call that met an outage began.
    """

    def __init__(self, outages: Process, name: str, rules: OutageLimits, pauses: bool, lease_s: float) -> None:
        self.outages = outages
        self.name = name
        self.rules = rules
        self.pauses = pauses
        self.epoch = 0
        self._lease_s = lease_s
        self._sums = Sums()
        self._has_told = False
        self.opened_at = 0.0
        self.running: dict[Watched, float] = {}
        self.newest = -inf

    @property
    def is_open(self) -> bool:
        """Tell whether calls have to wait."""
        return self.epoch % 2 == 1 and self.pauses

    @property
    def is_due(self) -> bool:
        """Tell whether there are calls to report."""
        sums = self._sums
        return sums.answered + sums.mistakes + sums.masked + sums.bugs > 0

    def take(self) -> Sums:
        """Return the calls since the last report, to be reported."""
        sums, self._sums = self._sums, Sums()
        since, until = _now() - WINDOW_S, self.newest + _BESIDE_S
        sums.beside = sum(since < began <= until for began in self.running.values())
        return sums

    def learn(self, epoch: int) -> None:
        """Take over a newer epoch."""
        if epoch > self.epoch:
            self.epoch, self.opened_at = epoch, _now()

    @property
    def open_s(self) -> float:
        """Return the seconds for which the breaker is known to have been open."""
        return _now() - self.opened_at if self.epoch % 2 else 0.0

    def answered(self) -> None:
        """Count a call that was answered."""
        self._sums.answered += 1
        self.outages.report_soon()

    def mistaken(self) -> None:
        """Count a call that failed by the model's mistake."""
        self._sums.mistakes += 1
        self.outages.report_soon()

    def masked(self, error: str) -> None:
        """Count a call whose outage ends its conversation, and nothing else."""
        self._sums.masked += 1
        self._sums.error = error
        self.outages.report_soon()

    def bug(self, error: BaseException) -> None:
        """Count a call that failed by a bug, and tell of the first one."""
        self._sums.bugs += 1
        self.outages.report_soon()
        if not self._has_told:
            self._has_told = True
            logger.error(
                "%s raised %s%s, which is neither the model's mistake (ValueError) nor an outage (OutageError, errors "
                "of connections, limits.outage.errors): mend it, or say which it is (said once)",
                self.name,
                describe(error),
                place_of(error),
            )

    async def enter(self, kind: Waiting, until: float | None = None) -> tuple[Admitted, str]:
        """Wait while the breaker is open, with the conversation's clock standing still.

        Args:
            kind: Who waits.
            until: Time of the loop's clock until which it waits; None: for `stop_s`.

        Returns:
            Why the wait is over, and the id under which a probe is reported.

        Raises:
            OutageEndError: It took too long.
        """
        waiter, stop_s, again = uuid4().hex, self.outages.settings.stop_s, Admitted("again", 0)
        until = asyncio.get_running_loop().time() + stop_s if until is None else until
        with self.outages.stopped(), during("wait", self.name.partition(" ")[2]):
            try:
                async with asyncio.timeout_at(until) as limit:
                    admitted = again
                    while admitted.why == "again":
                        admitted = await self.outages.ask(
                            lambda keeper: keeper.enter(self.name, waiter, kind, self._lease_s, self.outages.process)
                        )
            except (TimeoutError, asyncio.CancelledError):
                self.leave(waiter)
                if limit.expired():
                    raise OutageEndError(f"{self.name}: its outage has lasted for more than {stop_s:g} s") from None
                raise
        self.learn(admitted.epoch)
        return admitted, waiter

    def leave(self, waiter: str) -> None:
        """Tell the keeper that somebody waits no longer, or that a probe was cancelled."""
        keep(asyncio.ensure_future(self.outages.ask(lambda keeper: keeper.leave(self.name, waiter), TOLD_S)))

    async def admit(self) -> None:
        """Let a new conversation wait while the breaker is open.

        Raises:
            OutageEndError: It took longer than `stop_s`.
        """
        self.outages.begin()
        if self.is_open:
            await self.enter("conversation")


class Watched:
    """What stands beside one call: wait for the end of an outage, and tell how the call ended.

    It is an async context manager around the call, and raises nothing itself but on `wait`.

    Args:
        watch: The watch over what is called; None: nobody asks.
        conversation: Id of the conversation.
        may_wait_again: Whether the call may be made once more, where it was a probe that failed.
        counts: Whether an answer says that the service is there, and an outage that it is not. Without it the outage of
            this call ends its conversation, and nothing else.
        is_outage: Whether each failure is an outage, but for a `ValueError`.
        written: What others than the service and the author wrote for the call.

    Attributes:
        met: Whether the call ended with an outage.
        ends: Whether the conversation has to end for it.
        again: Whether the call has to be made once more: nobody has seen its answer.
    """

    __slots__ = (
        "_conversation",
        "_counts",
        "_epoch",
        "_failed_at",
        "_failed_probes",
        "_is_outage",
        "_may_wait_again",
        "_probe",
        "_until",
        "_was_good",
        "_watch",
        "_written",
        "again",
        "ends",
        "met",
    )

    def __init__(
        self,
        watch: Watch | None,
        conversation: str,
        may_wait_again: bool = False,
        counts: bool = True,
        is_outage: bool = False,
        written: WrittenTexts = NOTHING,
    ) -> None:
        self._watch = watch
        self._written = written
        self._conversation = conversation
        self._may_wait_again = may_wait_again
        self._counts = counts
        self._is_outage = is_outage
        self._probe = ""
        self._was_good = False
        self._failed_probes = 0
        self._failed_at = 0.0
        self._epoch = 0
        self._until: float | None = None
        self.met = self.ends = self.again = False

    @property
    def name(self) -> str:
        """Return the name of what is called, where outages are spoken of; "" where nobody asks."""
        return self._watch.name if self._watch is not None else ""

    @property
    def is_probe(self) -> bool:
        """Tell whether the call is a probe of which nothing was told yet."""
        return bool(self._probe)

    @property
    def must_wait(self) -> bool:
        """Tell whether there is an outage, and the call is not a probe."""
        return self._watch is not None and self._watch.is_open and not self._probe

    def begin(self) -> None:
        """Note that the call begins, where nothing is waited for."""
        if (watch := self._watch) is not None:
            watch.outages.begin()
            self._began(watch)

    async def wait(self, begins: bool = True) -> bool:
        """Wait while there is an outage; return whether that took time.

        Args:
            begins: Whether the call begins then; else `begin` says it.

        Raises:
            OutageEndError: It took too long.
        """
        watch = self._watch
        if watch is None:
            return False
        watch.outages.begin()
        if waits := self.must_wait:
            if self._until is None:  # also a probe that failed waits no longer than this in all
                self._until = asyncio.get_running_loop().time() + watch.outages.settings.stop_s
            admitted, waiter = await watch.enter("failed" if self._failed_probes else "call", self._until)
            self._probe = waiter if admitted.why == "probe" else ""
        self._epoch = watch.epoch
        if begins:
            self._began(watch)
        return waits

    def _began(self, watch: Watch) -> None:
        self._epoch = watch.epoch
        if self._counts:
            watch.running[self] = _now()

    def _ended(self) -> float | None:
        """Note that the call runs no more; return when it began, None where it did not run."""
        return self._watch.running.pop(self, None) if self._watch is not None else None

    async def __aenter__(self) -> Watched:
        self.again = False
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.answered()
        elif isinstance(error, Exception) and not isinstance(error, _NO_CAUSE):
            await self.failed(error)
        else:
            if isinstance(error, asyncio.CancelledError):
                self._hung()
            self.dropped()

    def _hung(self) -> None:
        """Tell of a call that is cut off: if there is an outage, that was it."""
        watch = self._watch
        if watch is not None and watch.pauses and watch.rules.timeouts == "outage" and self._ended() is not None:
            self.met = True
            sums = watch.take()
            sums.hung.append(Outage(self._conversation, self._epoch))
            keep(asyncio.ensure_future(watch.outages.tell({watch.name: sums})))

    def dropped(self) -> None:
        """Note that the call was cancelled, or says nothing."""
        self._ended()
        if self._watch is not None and self._probe:
            self._watch.leave(self._probe)
            self._probe = ""

    def answered(self) -> None:
        """Tell that the call was answered."""
        self._tell_end(mistaken=False)

    def _tell_end(self, mistaken: bool) -> None:
        """Tell that the call ended without an outage: answered, or by the model's mistake."""
        watch = self._watch
        self._ended()
        if watch is None or not self._counts:
            return
        watch.mistaken() if mistaken else watch.answered()
        if self._probe:
            sums = watch.take()
            sums.probe, sums.probe_good, self._probe = self._probe, None if mistaken else True, ""
            self._was_good = not mistaken
            keep(asyncio.ensure_future(watch.outages.tell({watch.name: sums})))

    async def failed(self, error: BaseException) -> None:
        """Tell how the call failed.

        Args:
            error: What it raised.
        """
        watch = self._watch
        if watch is None:
            return
        rules = watch.rules
        cause = cause_of(error, rules.timeouts or "model", rules.errors, self._written, rules.addresses)
        if self._is_outage and not isinstance(error, ValueError):  # that is the row's mistake
            cause = "outage"
        if cause != "outage":
            if cause == "bug":
                watch.bug(error)
            if cause != "model" or (self._probe and not isinstance(error, ValueError)):
                self.dropped()  # as where it was late by what the model wrote: that says nothing of the service
            else:
                self._tell_end(mistaken=True)
            return
        began = self._ended()
        text = describe(error)
        if not (watch.pauses and self._counts):
            watch.masked(text)
            self.met = self.ends = True
            return
        if began is not None:
            watch.newest = max(watch.newest, began)
        probe, self._probe = self._probe, ""
        self.again = bool(probe) and self._may_wait_again and not self._has_probed_enough()
        self.met = not self.again
        sums = watch.take()
        sums.error, sums.probe, sums.next_try_s = text, probe, next_try_s(error)
        if self.met:
            sums.outages.append(Outage(self._conversation, self._epoch))
            if self._was_good:
                sums.taken_back.append(sums.outages[-1])
        told = await watch.outages.tell({watch.name: sums})
        self.ends = self.met and (not told or watch.is_open or watch.outages.is_judged(self._conversation))

    def _has_probed_enough(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._failed_at = self._failed_at if self._failed_probes else now
        self._failed_probes += 1
        return self._failed_probes >= _MOST_PROBES and now - self._failed_at >= _PROBES_S
