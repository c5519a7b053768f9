"""`Outages`: one process's state of outages: a `Watch` over each name, and its way to the keeper of the run.

Invariants:
- who waits, waits at most `stop_s`, also where the keeper has died and cannot be reached;
- a new keeper receives the state known here before any request;
- each event loop has one poll, which also shows that the process lives.
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
from weakref import WeakKeyDictionary

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.breaker import WINDOW_S
from verl_multiturn.calls.outages.messages import (
    CallAdmission,
    RemoteOutageStore,
    StoreAnswer,
    StoreLostError,
    Sums,
    Waiting,
)
from verl_multiturn.calls.outages.store import OutageStore
from verl_multiturn.calls.tasks import keep
from verl_multiturn.calls.timeline import during
from verl_multiturn.config import OutageSettings
from verl_multiturn.describe import describe, place_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOLD_S = 10.0
"""Seconds in which a keeper must take a report; a new one may have to start."""
_BESIDE_S = 1.0
"""Seconds after a call within which another one began beside it."""
HOLD_S = 2.0
"""Seconds after the first failure since a call was answered, or none failed for `WINDOW_S`, within which failures are
held."""
REPORT_S = 0.5
"""Seconds for which sums of calls are gathered."""
_AGAIN_S = (0.1, 5.0)
"""Seconds between two attempts to reach a keeper, at first and at most."""
_MOST_JUDGED = 10_000


class OutageEndError(Exception):
    """A conversation has to end, since it waited for too long for the end of an outage."""


def loop_time() -> float:
    """Return the time of the running loop's clock."""
    return asyncio.get_running_loop().time()


class Watch:
    """The watch of one process over one named service.

    Attributes:
        name: The name, for example `tool search`.
        epoch: Epoch of its breaker, as far as it is known here.
        opened_at: Time of the loop's clock at which it was learnt.
        running: Calls (`guarded_call.GuardedCall`) that have not ended, with the time at which they began.
        newest: When the newest call that hit an outage began.
        newest_answered: When the newest call that was answered began.
    """

    def __init__(self, outages: Outages, name: str, rules: OutageLimits, pauses: bool, lease_s: float) -> None:
        self.outages = outages
        self.name = name
        self.rules = rules
        self.pauses = pauses
        self.epoch = 0
        self._lease_s = lease_s
        self._sums = Sums()
        self._has_told = False
        self.opened_at = 0.0
        self.running: dict[object, float] = {}
        self.newest = self.newest_answered = -inf
        self._failing_since = inf
        """When the first call failed since one was answered, the breaker changed, or none failed for a while."""
        self._failed_at = -inf
        self._held: dict[asyncio.Future[None], float] = {}
        """The failures that are held, with the time at which the call failed."""

    @property
    def is_open(self) -> bool:
        """Return whether calls have to wait."""
        return self.epoch % 2 == 1 and self.pauses

    @property
    def is_due(self) -> bool:
        """Return whether there are calls to report."""
        sums = self._sums
        return sums.answered + sums.mistakes + sums.masked + sums.bugs > 0

    @property
    def waited_for(self) -> str:
        """Return the name that timelines have for a wait: without its kind, but for opponents, which are no calls."""
        kind, _, name = self.name.partition(" ")
        return self.name if kind == "opponent" else name

    def take(self) -> Sums:
        """Return the calls since the last report, to be reported."""
        sums, self._sums = self._sums, Sums()
        since, until = loop_time() - WINDOW_S, self.newest + _BESIDE_S
        sums.beside = sum(since < began <= until for began in self.running.values())
        return sums

    def learn(self, epoch: int) -> None:
        """Take over a newer epoch."""
        if epoch > self.epoch:
            self.epoch, self.opened_at = epoch, loop_time()
            self._failing_since = inf
            self._let_go(inf)

    @property
    def open_s(self) -> float:
        """Return the seconds for which the breaker is known to have been open."""
        return loop_time() - self.opened_at if self.epoch % 2 else 0.0

    def answered(self, began: float | None = None) -> None:
        """Count a call that was answered.

        Args:
            began: Time of the loop's clock at which it began; None: unknown.
        """
        self._sums.answered += 1
        self._failing_since = inf
        if began is not None and began > self.newest_answered:
            self.newest_answered = began
            if self._held:
                self._let_go(began)
        self.outages.report_soon()

    def is_sudden(self, failed_at: float) -> bool:
        """Note that a call failed; return whether it is still unknown if that is an outage.

        Args:
            failed_at: Time of the loop's clock at which it failed.
        """
        if failed_at > self._failed_at + WINDOW_S:  # the failures before say nothing of this one
            self._failing_since = failed_at
        self._failed_at = failed_at
        self._failing_since = min(self._failing_since, failed_at)
        return failed_at < self._failing_since + HOLD_S

    async def hold(self, failed_at: float) -> None:
        """Wait until it is known whether a sudden failure is that of an outage: at most `HOLD_S` after the first one.

        It is none where a call was answered that began after it, and one where the breaker changes.

        Args:
            failed_at: Time of the loop's clock at which the call failed.
        """
        hold_s = min(self._failing_since, failed_at) + HOLD_S - loop_time()
        if hold_s <= 0 or self.newest_answered > failed_at:
            return
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[held] = failed_at
        try:
            with during("wait", self.waited_for):
                await asyncio.wait({held}, timeout=hold_s)
        finally:
            del self._held[held]

    def _let_go(self, before: float) -> None:
        """Hold the failures no longer that came before a time."""
        for held, failed_at in self._held.items():
            if failed_at < before and not held.done():
                held.set_result(None)

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
        """Count a call that failed by a bug, and report the first one."""
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

    async def enter(self, kind: Waiting, until: float | None = None) -> tuple[CallAdmission, str]:
        """Wait while the breaker is open, with the conversation's clock stopped.

        Args:
            kind: Who waits.
            until: Time of the loop's clock until which it waits; None: for `stop_s`.

        Returns:
            Why the wait is over, and the id under which a probe is reported.

        Raises:
            OutageEndError: It took too long.
        """
        waiter, stop_s, again = uuid4().hex, self.outages.settings.stop_s, CallAdmission("again", 0)
        until = asyncio.get_running_loop().time() + stop_s if until is None else until
        with self.outages.stopped(), during("wait", self.waited_for):
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
        """Report to the keeper that a call waits no longer, or that a probe was cancelled."""
        keep(asyncio.ensure_future(self.outages.ask(lambda keeper: keeper.leave(self.name, waiter), TOLD_S)))

    async def admit(self) -> None:
        """Let a new conversation wait while the breaker is open.

        Raises:
            OutageEndError: It took longer than `stop_s`.
        """
        self.outages.begin()
        if self.is_open:
            await self.enter("conversation")


class Outages:
    """The state of outages known to one process.

    Args:
        settings: The run's settings.
        connect: Reaches the keeper of the run, or makes one; None: this process has a keeper of its own.
        stopped: Stops the clock of the conversation that the running task works for.
    """

    def __init__(
        self,
        settings: OutageSettings | None = None,
        connect: Callable[[], RemoteOutageStore] | None = None,
        stopped: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.settings = settings or OutageSettings()
        self.stopped = stopped
        self.process = uuid4().hex if connect is not None else ""
        own = OutageStore()
        self._connect: Callable[[], RemoteOutageStore] = connect or (lambda: own)
        self._keeper: RemoteOutageStore | None = None
        self._watches: dict[str, Watch] = {}
        self._judged: OrderedDict[str, None] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._polls: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = WeakKeyDictionary()

    def of(self, name: str, rules: OutageLimits, lease_s: float) -> Watch | None:
        """Return the watch over a named service; None where outages are not tracked.

        Args:
            name: The name, for example `tool search`.
            rules: Which failures are outages, and their effect.
            lease_s: Seconds after which a call of it must have ended.
        """
        mode = rules.mode or self.settings.mode
        if mode == "off":
            return None
        watch = Watch(self, name, rules, mode == "pause", lease_s)
        if name in self._watches:
            watch.epoch, watch.opened_at = self._watches[name].epoch, self._watches[name].opened_at
        self._watches[name] = watch
        return watch

    def is_judged(self, conversation: str) -> bool:
        """Return whether a conversation hit a confirmed outage; nothing that it still does is trained."""
        return conversation in self._judged

    def begin(self) -> None:
        """Begin to listen, with the first call or conversation of an event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._timer = loop, None
            if self.process and loop not in self._polls:
                self._polls[loop] = loop.create_task(self._listen(), name="outages")

    def report_soon(self) -> None:
        """Report the sums of all names within `REPORT_S`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def _report(self) -> None:
        self._timer = None
        if sums := {watch.name: watch.take() for watch in self._watches.values() if watch.is_due}:
            keep(asyncio.ensure_future(self.tell(sums)))

    async def tell(self, sums: dict[str, Sums]) -> bool:
        """Report calls, and wait until the keeper has decided on them; return whether it could be reached."""
        try:
            self._learn(await self.ask(lambda keeper: keeper.report(sums, self.process), TOLD_S))
        except StoreLostError as error:
            logger.error("the keeper of outages cannot be reached, what is known of %s is lost: %s", list(sums), error)
            return False
        return True

    async def ask(self, question: Callable[[RemoteOutageStore], Awaitable[T]], patience_s: float = inf) -> T:
        """Return the keeper's answer; where it has died, that of the next one.

        Raises:
            StoreLostError: There was none within `patience_s`.
        """
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + patience_s, _AGAIN_S[0]
        while True:
            asked = self._keeper
            try:
                if asked is None:
                    asked = self._connect()
                    known = {name: watch for name, watch in self._watches.items() if watch.epoch}
                    if epochs := {name: (watch.epoch, watch.open_s) for name, watch in known.items()}:
                        await asked.recall(epochs, list(self._judged))
                    self._keeper = asked
                return await question(asked)
            except StoreLostError as error:
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
            told = await self.ask(lambda each, known=(keeper, seen, self.process): each.changes(*known))  # type: ignore[misc]
            self._learn(told)
            keeper, seen = told.keeper, told.version

    def _learn(self, told: StoreAnswer) -> None:
        for name, epoch in told.epochs.items():
            if (watch := self._watches.get(name)) is not None:
                watch.learn(epoch)
        self._judged.update(dict.fromkeys(told.judged))
        while len(self._judged) > _MOST_JUDGED:
            self._judged.popitem(last=False)
