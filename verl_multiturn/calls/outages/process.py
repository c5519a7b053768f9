"""`Outages`: what one process knows of outages: its watches (`watch.py`), and how it reaches the keeper of the run.

Invariants:
- a keeper that is made anew is told what is known here before it is asked anything;
- each event loop has one poll, which also says that the process lives.
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
from verl_multiturn.calls.outages.keeper import Keeper, KeeperLostError, OutageKeeper, Sums, Told
from verl_multiturn.calls.outages.watch import TOLD_S, Watch
from verl_multiturn.config import OutageSettings
from verl_multiturn.tasks import keep

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_S = 0.5
"""Seconds for which sums of calls are gathered."""
_AGAIN_S = (0.1, 5.0)
"""Seconds between two attempts to reach a keeper, at first and at most."""
_MOST_JUDGED = 10_000


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
        self.process = uuid4().hex if connect is not None else ""
        own = OutageKeeper()
        self._connect: Callable[[], Keeper] = connect or (lambda: own)
        self._keeper: Keeper | None = None
        self._watches: dict[str, Watch] = {}
        self._judged: OrderedDict[str, None] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._polls: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = WeakKeyDictionary()

    def of(self, name: str, rules: OutageLimits, lease_s: float) -> Watch | None:
        """Return the watch over what has a name; None where nobody asks whether a failure is an outage.

        Args:
            name: The name, for example `tool search`.
            rules: What counts as an outage, and what it does.
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
        """Tell whether a conversation met an outage that is known to be one; nothing that it still does is trained."""
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
        """Report calls, and wait until the keeper has judged them; return whether it could be reached."""
        try:
            self._learn(await self.ask(lambda keeper: keeper.report(sums, self.process), TOLD_S))
        except KeeperLostError as error:
            logger.error("the keeper of outages cannot be reached, what is known of %s is lost: %s", list(sums), error)
            return False
        return True

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
                    known = {name: watch for name, watch in self._watches.items() if watch.epoch}
                    if epochs := {name: (watch.epoch, watch.open_s) for name, watch in known.items()}:
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
            told = await self.ask(lambda each, known=(keeper, seen, self.process): each.changes(*known))  # type: ignore[misc]
            self._learn(told)
            keeper, seen = told.keeper, told.version

    def _learn(self, told: Told) -> None:
        for name, epoch in told.epochs.items():
            if (watch := self._watches.get(name)) is not None:
                watch.learn(epoch)
        self._judged.update(dict.fromkeys(told.judged))
        while len(self._judged) > _MOST_JUDGED:
            self._judged.popitem(last=False)
