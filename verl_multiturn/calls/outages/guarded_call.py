"""`GuardedCall`: one call of a service from the wait at its breaker to the report of its end.

    wait  ──open──▶ clock is stopped ────closed, or the probe──▶ slot → call ──┬─ answered, whatever it was ─▶ a sum
      └──closed────────────────────────────────────────────────▶               └─ outage ─▶ reported at once; that of
                                                                                  a `repeatable` tool is held shortly
                                                                                    ├─ closed: the model reads it
                                                                                    └─ open: it waits and is made again,
                                                                                       or else the conversation ends

While nothing is wrong a call costs the look at one number and a sum, which is reported twice a second.

Invariants:
- an outage is known to the keeper before its conversation goes on;
- a call is made again only where it is repeatable, and its end was not seen; where it was not a probe, once: it may be
  the call that brings the service down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from verl_multiturn.calls.invocation import BusyError
from verl_multiturn.calls.outages.authorship import NOTHING, WrittenTexts
from verl_multiturn.calls.outages.breaker import Outage
from verl_multiturn.calls.outages.causes import cause_of, next_try_s
from verl_multiturn.calls.outages.process import OutageEndError, Watch, loop_time
from verl_multiturn.calls.tasks import keep
from verl_multiturn.describe import describe
from verl_multiturn.errors import InteractionContractError, OutageError, ToolContractError

_MOST_PROBES = 3
"""Probes of one call that fail, over at least `_PROBES_S`, after which its conversation ends: it may be its doing."""
_PROBES_S = 600.0
Role = Literal["create", "call", "repeatable", "reward", "score"]
"""Part of a call in its conversation.

- `create`: begins a tool. Each failure is an outage, but for a `ValueError`, which is the row's mistake: the model
  would read it at each call of the tool.
- `call`: any other call of the service. Its end shows whether the service is there.
- `repeatable`: a `call` that may be made again, where it failed in an outage.
- `reward`: the reward of a finished conversation. Its owner makes it again by a rule of its own; here it is made again
  only where it was a probe.
- `score`: gives a reward. It may call no service, so it waits for none and is not evidence about it. An outage of it
  ends its conversation, and nothing else.
"""
_NO_CAUSE = (OutageEndError, ToolContractError, InteractionContractError)
_TRIES = 3
"""How often a question that has waited for the end of an outage is repeated after it."""


class GuardedCall:
    """Waits for the end of an outage before a call, and reports how the call ended.

    It is an async context manager around the call. Within it, `wait` comes first, or `take` where the call needs a
    slot; nothing else raises.

    Args:
        watch: The watch over the service; None: outages are not tracked.
        conversation: Id of the conversation.
        role: The call's part in the conversation.
        written: Texts for the call by others than the service and the author.

    Attributes:
        met: Whether the call ended with an outage.
        ends: Whether the conversation has to end for it.
        again: Whether the call has to be made once more: its answer was not seen.
    """

    __slots__ = (
        "_conversation",
        "_epoch",
        "_failed_at",
        "_failed_probes",
        "_probe",
        "_repeated",
        "_role",
        "_until",
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
        role: Role = "call",
        written: WrittenTexts = NOTHING,
    ) -> None:
        self._watch = watch
        self._written = written
        self._conversation = conversation
        self._role = role
        self._probe = ""
        self._failed_probes = 0
        self._failed_at = 0.0
        self._epoch = 0
        self._repeated = False
        self._until: float | None = None
        self.met = self.ends = self.again = False

    @property
    def name(self) -> str:
        """Return the name of the service in reports of outages; "" where they are not tracked."""
        return self._watch.name if self._watch is not None else ""

    @property
    def is_probe(self) -> bool:
        """Return whether the call is a probe without a report yet."""
        return bool(self._probe)

    @property
    def must_wait(self) -> bool:
        """Return whether there is an outage for whose end the call waits; a probe does not."""
        return self._watch is not None and self._watch.is_open and not self._probe and self._role != "score"

    async def wait(self) -> bool:
        """Wait while there is an outage, then note that the call begins; return whether that took time.

        Raises:
            OutageEndError: It took too long.
        """
        waits = await self._wait()
        self._began()
        return waits

    async def take(self, take: Callable[[], Awaitable[None]], give_back: Callable[[], None]) -> None:
        """Take a slot once there is no outage, or the call is let through as a probe; then note that it begins.

        Args:
            take: Takes the slot, and raises a `BusyError` where none is free in time.
            give_back: Gives it back, since an outage began while the call waited for it.

        Raises:
            BusyError: No slot was free in time.
            OutageEndError: The wait for the end of an outage took too long.
        """
        while True:
            await self._wait()
            try:
                await take()
            except BusyError:
                if self.must_wait:
                    continue
                raise
            if not self.must_wait:
                break
            give_back()
        self._began()

    async def _wait(self) -> bool:
        watch = self._watch
        if watch is None:
            return False
        watch.outages.begin()
        if waits := self.must_wait:
            if self._until is None:  # also a probe that failed waits no longer than this in all
                self._until = asyncio.get_running_loop().time() + watch.outages.settings.stop_s
            admitted, waiter = await watch.enter("failed" if self._failed_probes else "call", self._until)
            self._probe = waiter if admitted.why == "probe" else ""
        return waits

    def _began(self) -> None:
        if (watch := self._watch) is not None:
            self._epoch = watch.epoch
            if self._role != "score":
                watch.running[self] = loop_time()

    def _ended(self) -> float | None:
        """Note that the call runs no more; return when it began, None where it did not run."""
        return self._watch.running.pop(self, None) if self._watch is not None else None

    async def __aenter__(self) -> GuardedCall:
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
        """Report a call that is cut off: if there is an outage, that was it."""
        watch = self._watch
        if watch is not None and watch.pauses and watch.rules.timeouts == "outage" and self._ended() is not None:
            self.met = True
            keep(asyncio.ensure_future(self._tell_seen(watch)))

    async def _tell_seen(self, watch: Watch) -> bool:
        """Report that an outage, if there is one, affects the conversation; return whether the keeper knows it."""
        sums = watch.take()
        sums.hung.append(Outage(self._conversation, self._epoch))
        return await watch.outages.tell({watch.name: sums})

    def dropped(self) -> None:
        """Note that the call was cancelled, or is not evidence."""
        self._ended()
        if self._watch is not None and self._probe:
            self._watch.leave(self._probe)
            self._probe = ""

    def answered(self) -> None:
        """Report that the call was answered."""
        self._tell_end(mistaken=False)

    def _tell_end(self, mistaken: bool) -> None:
        """Report that the call ended without an outage: answered, or by the model's mistake."""
        watch, began = self._watch, self._ended()
        if watch is None or self._role == "score":
            return
        watch.mistaken() if mistaken else watch.answered(began)
        if self._probe:
            sums = watch.take()
            sums.probe, sums.probe_good, self._probe = self._probe, None if mistaken else True, ""
            keep(asyncio.ensure_future(watch.outages.tell({watch.name: sums})))

    async def failed(self, error: BaseException) -> None:
        """Report how the call failed.

        Args:
            error: The error that it raised.
        """
        watch = self._watch
        if watch is None:
            return
        rules = watch.rules
        cause = cause_of(error, rules.timeouts or "model", rules.errors, self._written, rules.addresses)
        if self._role == "create" and not isinstance(error, ValueError):
            cause = "outage"
        if cause != "outage":
            if cause == "bug":
                watch.bug(error)
            if cause != "model" or (self._probe and not isinstance(error, ValueError)):
                self.dropped()  # as where the model's text made it late: that is not evidence about the service
            else:
                self._tell_end(mistaken=True)
            return
        began, failed_at = self._ended(), loop_time()
        text = describe(error)
        if not watch.pauses or self._role == "score":
            watch.masked(text)
            self.met = self.ends = True
            return
        if began is not None:
            watch.newest = max(watch.newest, began)
        probe, self._probe = self._probe, ""
        may_repeat = self._may_repeat(watch, failed_at, bool(probe))
        self.met = not (probe and may_repeat)
        sums = watch.take()
        sums.error, sums.probe, sums.next_try_s = text, probe, next_try_s(error)
        if self.met:
            sums.outages.append(Outage(self._conversation, self._epoch, held=may_repeat))
        try:
            told = await watch.outages.tell({watch.name: sums})
            if may_repeat and told and not self._is_out(watch):
                await watch.hold(failed_at)
        except asyncio.CancelledError:  # the conversation's time is up
            if may_repeat and self.met:
                keep(asyncio.ensure_future(self._tell_seen(watch)))
            raise
        self.again = may_repeat and self._is_out(watch)
        self._repeated |= self.again and not probe
        self.met = not self.again
        if self.met and may_repeat and told:
            told = await self._tell_seen(watch)
        self.ends = self.met and (not told or watch.is_open or watch.outages.is_judged(self._conversation))

    def _is_out(self, watch: Watch) -> bool:
        """Return whether there is an outage, or was one since the call began."""
        return watch.is_open or watch.epoch != self._epoch

    def _may_repeat(self, watch: Watch, failed_at: float, is_probe: bool) -> bool:
        if is_probe:
            return self._role in ("repeatable", "reward") and not self._has_probed_enough()
        is_first = self._role == "repeatable" and not (self._repeated or self._failed_probes)
        return is_first and (self._is_out(watch) or watch.is_sudden(failed_at))

    def _has_probed_enough(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._failed_at = self._failed_at if self._failed_probes else now
        self._failed_probes += 1
        return self._failed_probes >= _MOST_PROBES and now - self._failed_at >= _PROBES_S


async def ask_through(
    watched: GuardedCall,
    ask: Callable[[], Awaitable[OutageError | None]],
    tries: int = 0,
    last: tuple[type[OutageError], ...] = (),
) -> OutageError | None:
    """Ask a service about a conversation that has ended, and ask again after an outage: for rewards and teachers.

    Args:
        watched: The call, in the role `reward`; it has not begun.
        ask: Asks once; returns the outage that ended it, or None where there was an answer, of any kind.
        tries: How often it is repeated, at first after 1 s, where it failed and no outage is known.
        last: Outages after which it is repeated only where one is known: they have used up a question's time.

    Returns:
        The last outage, where the service was there and did not answer; None: it has answered.

    Raises:
        OutageEndError: The wait for the end of an outage took too long.
    """
    again_s = 0.0
    while True:
        if await watched.wait():
            tries = _TRIES
        try:
            outage = await ask()
        except BaseException:  # a cancellation, too: it goes on
            watched.dropped()
            raise
        if outage is None:
            watched.answered()
            return None
        await watched.failed(outage)
        if not (watched.again or watched.must_wait):
            tries -= 1
            if tries < 0 or isinstance(outage, last):
                return outage
            again_s = 2 * again_s or 1.0  # the service is there, and may have much to do
            await asyncio.sleep(again_s)
