"""`Outages`: what one process knows of outages. `Watched` stands beside each of its calls.

    wait  ──open──▶ clock stands still ──closed, or the probe──▶ slot → call ──┬─ answered, whatever it was ─▶ a sum
      └──closed────────────────────────────────────────────────▶               └─ outage ─▶ told at once
                                                                                    ├─ closed: the model reads it
                                                                                    └─ open: the conversation ends

While nothing is wrong a call costs the look at one number and a sum, which is reported twice a second.

Invariants:
- an outage is known to the keeper before its conversation goes on;
- a call that waits, waits at most `stop_s`, also where the keeper has died and cannot be reached;
- a keeper that is made anew is told what is known here before it is asked anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import TypeVar
from uuid import uuid4

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.breaker import Outage
from verl_multiturn.calls.outages.causes import cause_of
from verl_multiturn.calls.outages.keeper import Admitted, Keeper, KeeperLostError, OutageKeeper, Sums, Told, Waiting
from verl_multiturn.config import OutageSettings
from verl_multiturn.describe import describe, place_of
from verl_multiturn.errors import InteractionContractError, ToolContractError
from verl_multiturn.tasks import keep

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_S = 0.5
"""Seconds for which sums of calls are gathered."""
_TOLD_S = 10.0
"""Seconds in which a keeper must take a report; a new one may have to start."""
_AGAIN_S = (0.1, 5.0)
"""Seconds between two attempts to reach a keeper, at first and at most."""
_MOST_JUDGED = 10_000


class OutageEndError(Exception):
    """A conversation has to end, since it waited for too long for the end of an outage."""


_NO_CAUSE = (OutageEndError, ToolContractError, InteractionContractError)


class Outages:
    """What one process knows of outages.

    Args:
        settings: The run's settings.
        connect: Reaches the keeper of the run, or makes one; None: this process has a keeper of its own.
        stopped: Lets the clock of the conversation that the running task works for stand still.
    """

    def __init__(
        self,
        settings: OutageSettings | None = None,
        connect: Callable[[], Keeper] | None = None,
        stopped: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.settings = settings or OutageSettings()
        self.stopped = stopped
        self._is_shared = connect is not None
        own = OutageKeeper()
        self._connect: Callable[[], Keeper] = connect or (lambda: own)
        self._keeper: Keeper | None = None
        self._watches: dict[str, Watch] = {}
        self._judged: OrderedDict[str, None] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._poll: asyncio.Task[None] | None = None

    def of(self, name: str, rules: OutageLimits, lease_s: float, is_quiet: bool = False) -> Watch | None:
        """Return the watch over what has a name; None where nobody asks whether a failure is an outage.

        Args:
            name: The name, for example `tool search`.
            rules: What counts as an outage, and what it does.
            lease_s: Seconds after which a call of it must have ended.
            is_quiet: Whether answered calls are reported only once one has met an outage.
        """
        mode = rules.mode or self.settings.mode
        if mode == "off":
            return None
        watch = Watch(self, name, rules, mode == "pause", lease_s, is_quiet)
        if name in self._watches:
            watch.epoch = self._watches[name].epoch
        self._watches[name] = watch
        return watch

    def is_judged(self, conversation: str) -> bool:
        """Tell whether a conversation met an outage that is known to be one; nothing that it still does is trained."""
        return conversation in self._judged

    def begin(self) -> None:
        """Begin to listen, with the first call or conversation of an event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._timer = loop, None
            if self._is_shared:
                self._poll = loop.create_task(self._listen(), name="outages")

    def report_soon(self) -> None:
        """Report the sums of all names within `REPORT_S`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def _report(self) -> None:
        self._timer = None
        if sums := {watch.name: watch.take() for watch in self._watches.values() if watch.is_due}:
            keep(asyncio.ensure_future(self.tell(sums)))

    async def tell(self, sums: dict[str, Sums]) -> None:
        """Report calls, and wait until the keeper has judged them. A keeper that cannot be reached is only logged."""
        try:
            self._learn(await self.ask(lambda keeper: keeper.report(sums), _TOLD_S))
        except KeeperLostError as error:
            logger.error("the keeper of outages cannot be reached, what is known of %s is lost: %s", list(sums), error)

    async def ask(self, question: Callable[[Keeper], Awaitable[T]], patience_s: float = inf) -> T:
        """Return the keeper's answer; where it has died, that of the next one.

        Raises:
            KeeperLostError: There was none within `patience_s`.
        """
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + patience_s, _AGAIN_S[0]
        while True:
            asked = self._keeper
            try:
                if asked is None:
                    asked = self._connect()
                    if epochs := {name: watch.epoch for name, watch in self._watches.items() if watch.epoch}:
                        await asked.recall(epochs, list(self._judged))
                    self._keeper = asked
                return await question(asked)
            except KeeperLostError as error:
                if asked is not None and self._keeper is asked:
                    self._keeper = None
                    logger.warning("the keeper of outages has died, the next one is told what is known: %s", error)
                if loop.time() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_S[1])

    async def _listen(self) -> None:
        keeper, seen = "", 0
        while True:
            told = await self.ask(lambda each, known=(keeper, seen): each.changes(*known))  # type: ignore[misc]
            self._learn(told)
            keeper, seen = told.keeper, told.version

    def _learn(self, told: Told) -> None:
        for name, epoch in told.epochs.items():
            if (watch := self._watches.get(name)) is not None:
                watch.epoch = max(watch.epoch, epoch)
        self._judged.update(dict.fromkeys(told.judged))
        while len(self._judged) > _MOST_JUDGED:
            self._judged.popitem(last=False)


class Watch:
    """The watch of one process over what has a name.

    Attributes:
        name: The name, for example `tool search`.
        epoch: Epoch of its breaker, as far as it is known here.
        is_quiet: Whether answered calls are not reported yet.
    """

    def __init__(
        self, outages: Outages, name: str, rules: OutageLimits, pauses: bool, lease_s: float, is_quiet: bool
    ) -> None:
        self.outages = outages
        self.name = name
        self.rules = rules
        self.pauses = pauses
        self.epoch = 0
        self._lease_s = lease_s
        self.is_quiet = is_quiet
        self._sums = Sums()
        self._has_told = False

    @property
    def is_open(self) -> bool:
        """Tell whether calls have to wait."""
        return self.epoch % 2 == 1 and self.pauses

    @property
    def is_due(self) -> bool:
        """Tell whether there are calls to report."""
        return self._sums.answered > 0 or self._sums.masked > 0 or self._sums.bugs > 0

    def take(self) -> Sums:
        """Return the calls since the last report, to be reported."""
        sums, self._sums = self._sums, Sums()
        return sums

    def answered(self) -> None:
        """Count a call that was answered."""
        if self.is_quiet and not self.epoch:
            return
        self._sums.answered += 1
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
        waiter, stop_s = uuid4().hex, self.outages.settings.stop_s
        until = asyncio.get_running_loop().time() + stop_s if until is None else until
        with self.outages.stopped():
            try:
                async with asyncio.timeout_at(until) as limit:
                    admitted = await self.outages.ask(
                        lambda keeper: keeper.enter(self.name, waiter, kind, self._lease_s)
                    )
            except (TimeoutError, asyncio.CancelledError):
                self.leave(waiter)
                if limit.expired():
                    raise OutageEndError(f"{self.name}: its outage has lasted for more than {stop_s:g} s") from None
                raise
        self.epoch = max(self.epoch, admitted.epoch)
        return admitted, waiter

    def leave(self, waiter: str) -> None:
        """Tell the keeper that somebody waits no longer, or that a probe was cancelled."""
        keep(asyncio.ensure_future(self.outages.ask(lambda keeper: keeper.leave(self.name, waiter), _TOLD_S)))

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
        counts: Whether an answer says that the service is there.
        is_outage: Whether each failure is an outage.

    Attributes:
        met: Whether the call ended with an outage.
        ends: Whether the conversation has to end for it.
        again: Whether the call has to be made once more: nobody has seen its answer.
    """

    __slots__ = (
        "_conversation",
        "_counts",
        "_epoch",
        "_is_outage",
        "_may_wait_again",
        "_probe",
        "_until",
        "_watch",
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
    ) -> None:
        self._watch = watch
        self._conversation = conversation
        self._may_wait_again = may_wait_again
        self._counts = counts
        self._is_outage = is_outage
        self._probe = ""
        self._epoch = 0
        self._until: float | None = None
        self.met = self.ends = self.again = False

    @property
    def name(self) -> str:
        """Return the name of what is called, where outages are spoken of; "" where nobody asks."""
        return self._watch.name if self._watch is not None else ""

    @property
    def must_wait(self) -> bool:
        """Tell whether there is an outage, and the call is not a probe."""
        return self._watch is not None and self._watch.is_open and not self._probe

    def begin(self) -> None:
        """Note that the call begins, where nothing is waited for."""
        if (watch := self._watch) is not None:
            watch.outages.begin()
            self._epoch = watch.epoch

    async def wait(self) -> bool:
        """Wait while there is an outage; return whether that took time.

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
            admitted, waiter = await watch.enter("call", self._until)
            self._probe = waiter if admitted.why == "probe" else ""
        self._epoch = watch.epoch
        return waits

    async def __aenter__(self) -> Watched:
        self.again = False
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.answered()
        elif isinstance(error, Exception) and not isinstance(error, _NO_CAUSE):
            await self.failed(error)
        else:
            self.dropped()

    def dropped(self) -> None:
        """Note that the call was cancelled, or says nothing."""
        if self._watch is not None and self._probe:
            self._watch.leave(self._probe)
            self._probe = ""

    def answered(self) -> None:
        """Tell that the call was answered, in whatever way."""
        watch = self._watch
        if watch is None or not self._counts:
            return
        if not self._probe:
            watch.answered()
            return
        sums = watch.take()
        sums.answered += 1
        sums.probe, sums.probe_good, self._probe = self._probe, True, ""
        keep(asyncio.ensure_future(watch.outages.tell({watch.name: sums})))

    async def failed(self, error: BaseException) -> None:
        """Tell how the call failed.

        Args:
            error: What it raised.
        """
        watch = self._watch
        if watch is None:
            return
        cause = cause_of(error, watch.rules.timeouts or "model", watch.rules.errors)
        if self._is_outage and not isinstance(error, ValueError):  # that is the row's mistake
            cause = "outage"
        if cause != "outage":
            if cause == "bug":
                watch.bug(error)
            if cause != "model" or (self._probe and not isinstance(error, ValueError)):
                self.dropped()  # as where it was late by what the model wrote: that says nothing of the service
            else:
                self.answered()
            return
        text = describe(error)
        watch.is_quiet = False
        if not watch.pauses:
            watch.masked(text)
            self.met = self.ends = True
            return
        probe, self._probe = self._probe, ""
        self.again = bool(probe) and self._may_wait_again
        self.met = not self.again
        sums = watch.take()
        sums.error, sums.probe = text, probe
        if self.met:
            sums.outages.append(Outage(self._conversation, self._epoch))
        await watch.outages.tell({watch.name: sums})
        self.ends = self.met and (watch.is_open or watch.outages.is_judged(self._conversation))
