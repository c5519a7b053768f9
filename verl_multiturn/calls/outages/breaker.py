"""`Breaker`: decides, from the calls of a whole run, whether the service of one name is there.

                 of the last calls as many failed as did not: of 8 calls or more,
                 failures of two conversations or more
      ┌────────┐ ────────────────────────────────────────────────────────────────▶ ┌──────┐ ──┐ a probe fails: the next
      │ closed │                                                                   │ open │   │ one follows after 1, 2,
      └────────┘ ◀──────────────────────────────────────────────────────────────── └──────┘ ◀─┘ 4, then every 5 s
                 three probes in a row are answered; the next one follows at once

**It opens** where one of two stretches of calls shows an outage, since each is blind where the other sees:
- the calls of the last 30 s. Of a slow service, with fewer than 8, the last 8, up to five minutes old;
- the calls since the last one that did not fail, up to five minutes old: in a busy run half of 30 s are more calls than
  its conversations have.

A call that still runs counts as one that did not fail, if it began beside the failures: a call that fails at once ends
first. A mistake of the model may never have reached the service, and counts half.

**It closes** by probes: waiting calls of the run, one at a time. One that hangs has failed when its lease is over. A
mistake of the model counts a quarter of a good probe. A call that fails as a probe once more may be the only one that
the service does not answer, so the good ones before it still count. If the service names a time to retry, the next
probe follows then.

Invariants:
- pure: the caller gives the time, always of the same clock. Nothing here waits, and nothing knows Ray;
- `epoch` counts the changes of the state: it is odd exactly while the breaker is open, and never falls;
- a conversation is affected when one of its outages lies in the evidence on which the breaker opens, comes while it is
  open, or is that of a call which began before the last change. So one late call of a healthy run affects no
  conversation;
- an outage that is held is evidence, but affects no conversation: its own has not seen it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

WINDOW_S = 30.0
"""Seconds of calls that are looked at."""
OLDEST_S = 300.0
"""Seconds of calls that are looked at where fewer than `LEAST_CALLS` are newer, or all of them failed."""
LEAST_CALLS = 8
"""Fewest calls that are evidence."""
LEAST_CONVERSATIONS = 2
"""Fewest conversations of the outages: one conversation alone is not evidence about the service."""
MISTAKE = 0.5
"""Part of a call that did not fail for which a mistake of the model counts."""
PROBE_S = (1.0, 2.0, 4.0, 5.0)
"""Seconds from the opening to the first probe, and from each failed probe to the next; the last holds on."""
GOOD_PROBES = 3
"""Probes in a row that must be answered."""
MISTAKEN_PROBES = 12
"""Probes in a row that may end by the model's mistake instead: so many have reached the service."""


class Outage(NamedTuple):
    """One call that ended with an outage."""

    conversation: str
    """Id of the conversation."""
    epoch: int
    """Epoch of the breaker, as far as it was known where the call began."""
    held: bool = False
    """Whether its conversation has not seen it yet. If it does, the outage is reported once more, as one that hung."""


class _ReportedCalls(NamedTuple):
    """Calls that were reported together; those that were answered come first."""

    at: float
    answered: float
    outages: tuple[str, ...]
    """Conversations whose calls failed."""
    seen: tuple[str, ...]
    """Conversations that are affected if the breaker opens."""


class Breaker:
    """The breaker of one name.

    Attributes:
        epoch: Number of changes of the state.
        trips: How often it opened.
        opened_at: Time at which it opened last.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.trips = 0
        self.opened_at = 0.0
        self._open_before_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._window: deque[_ReportedCalls] = deque()
        self._answered = 0.0
        self._failed = 0
        self._beside: dict[str, tuple[float, int]] = {}
        """Calls beside the outages of each process, and the time of the report."""
        self._row: list[tuple[float, str]] = []
        """Times and conversations of the outages since the last call that ended in any other way."""
        self._probe: str | None = None
        self._probe_ends = 0.0
        self._has_failed = False
        self._next_probe = 0.0
        self._failed_probes = 0
        self._good_probes = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether calls have to wait."""
        return self.epoch % 2 == 1

    def open_s(self, now: float) -> float:
        """Return the seconds for which it has been open now; 0 while it is closed."""
        return now - self.opened_at if self.is_open else 0.0

    def is_probed(self, now: float) -> bool:
        """Return whether a probe is under way."""
        return self._probe is not None and now < self._probe_ends

    def open_total_s(self, now: float) -> float:
        """Return the seconds for which it has been open in all."""
        return self._open_before_s + self.open_s(now)

    def report(
        self,
        now: float,
        answered: int,
        outages: Sequence[Outage] = (),
        hung: Sequence[Outage] = (),
        process: str = "",
        beside: int = 0,
        mistakes: int = 0,
    ) -> list[str]:
        """Note calls that have ended, those that were answered first.

        Args:
            now: The time.
            answered: Number of calls that were answered, in whatever way.
            outages: The calls that ended with an outage.
            hung: Calls whose conversation's time was up, and outages that were held and are seen now. They affect
                conversations as outages do, and open nothing.
            process: Id of the process that made the calls.
            beside: Calls of that process that have not ended, and did not begin after its newest outage.
            mistakes: Number of calls that ended with the model's mistake.

        Returns:
            The conversations that it affects; empty while it stays closed.
        """
        met = [each for each in (*outages, *hung) if not each.held]
        if self.is_open:
            self.take_back(outages)
            return [each.conversation for each in met]
        judged = [each.conversation for each in met if each.epoch < self.epoch]
        seen = tuple(each.conversation for each in met if each.epoch >= self.epoch)
        self._beside[process] = now, beside
        counted = tuple(outage.conversation for outage in outages if outage.epoch >= self.epoch)
        answers = answered + MISTAKE * mistakes
        if answers:
            self._row.clear()
        self._row += [(now, conversation) for conversation in counted]
        if answers or counted or seen:
            self._window.append(_ReportedCalls(now, answers, counted, seen))
            self._answered += answers
            self._failed += len(counted)
            self._forget(now)
        if counted and self._is_out(now):
            judged += [conversation for calls in self._window for conversation in calls.seen]
            self._open(now, self.epoch + 1)
        return judged

    def _forget(self, now: float) -> None:
        while self._window:
            first = self._window[0]
            left = self._answered + self._failed - first.answered - len(first.outages)
            if first.at >= now - WINDOW_S or (left < LEAST_CALLS and first.at >= now - OLDEST_S):
                return
            self._window.popleft()
            self._answered -= first.answered
            self._failed -= len(first.outages)

    def _is_out(self, now: float) -> bool:
        """Return whether the last calls show that the service is out, whatever becomes of those that still run."""
        running = sum(calls for at, calls in self._beside.values() if at >= now - WINDOW_S)
        failed = [conversation for each in self._window for conversation in each.outages]
        row = [conversation for at, conversation in self._row if at >= now - OLDEST_S]
        return any(
            len(calls) >= others + running and len(calls) + others >= LEAST_CALLS and _several(calls)
            for calls, others in ((failed, self._answered), (row, 0.0))
        )

    def _open(self, now: float, epoch: int) -> None:
        self._clear()
        self.epoch = epoch
        self.trips += 1
        self.opened_at = now
        self._next_probe = now + PROBE_S[0]

    def _close(self, now: float) -> None:
        self._open_before_s += self.open_s(now)
        self._clear()
        self.epoch += 1

    def unjudged(self) -> list[str]:
        """Return the conversations of the last calls, if these are two or more outages that no answered call follows.

        A step may end before there are enough calls for a judgement. Then it is not known that the service is there.
        """
        row = [conversation for _, conversation in self._row]
        return row if _several(row) else []

    def recall(self, now: float, epoch: int, open_s: float = 0.0) -> bool:
        """Take over an epoch that somebody else knows; return whether it is newer. Called after a keeper has died.

        Args:
            now: The time.
            epoch: The epoch.
            open_s: Seconds for which the breaker is known to have been open.
        """
        if epoch < self.epoch:
            return False
        if epoch == self.epoch:
            self.opened_at = min(self.opened_at, now - open_s)
            return False
        if epoch % 2:
            self._open(now, epoch)
            self.opened_at = now - open_s
        else:
            self._open_before_s += self.open_s(now)
            self._clear()
            self.epoch = epoch
        return True

    def next_probe_s(self, now: float) -> float:
        """Return the seconds until the next probe may begin; infinite while the breaker is closed.

        While one is under way, that is when its lease ends.
        """
        if not self.is_open:
            return inf
        if self._probe is not None:
            if now < self._probe_ends:
                return self._probe_ends - now
            self.end_probe(now, self._probe, False)
        return max(0.0, self._next_probe - now)

    def begin_probe(self, now: float, probe: str, lease_s: float, has_failed: bool = False) -> None:
        """Note that a call begins as a probe.

        Args:
            now: The time.
            probe: Id of the call.
            lease_s: Seconds after which it counts as failed, since its process must have died.
            has_failed: Whether the call has failed as a probe before. Where it does so again, that may be its own
                doing, and the good ones before it still count.
        """
        self._probe, self._probe_ends, self._has_failed = probe, now + lease_s, has_failed

    def put_off(self, now: float, next_try_s: float) -> None:
        """Let the next probe begin when the service accepts calls again, at the soonest after the first pause."""
        self._next_probe = now + max(PROBE_S[0], next_try_s)

    def let_in(self, now: float) -> None:
        """Note that a new conversation was let in, since no call waits that could be a probe."""
        self._wait_longer(now)

    def end_probe(self, now: float, probe: str, good: bool | None, mistaken: bool = False) -> bool:
        """Note how a probe ended; return False where that is not the probe under way.

        Args:
            now: The time.
            probe: Id of the call.
            good: Whether it was answered; None: it is not evidence, and the next one follows at once.
            mistaken: Whether it is not evidence since the model made a mistake; else it was cancelled.
        """
        if probe != self._probe:
            return False
        self._probe = None
        if good is False:
            if not self._has_failed:
                self._good_probes = 0.0
            self._wait_longer(now)
            return True
        self._next_probe = now
        if good:
            self._failed_probes = 0
        self._good_probes += 1 if good else GOOD_PROBES / MISTAKEN_PROBES if mistaken else 0
        if self._good_probes >= GOOD_PROBES:
            self._close(now)
        return True

    def take_back(self, outages: Iterable[Outage]) -> None:
        """Forget the good probes where one of them hit an outage after all; a long one is reported good early.

        Args:
            outages: Outages of calls. One that began while the breaker is open was a probe.
        """
        if self.is_open and any(outage.epoch == self.epoch for outage in outages):
            self._good_probes = 0.0

    def _wait_longer(self, now: float) -> None:
        self._failed_probes = min(self._failed_probes + 1, len(PROBE_S) - 1)
        self._next_probe = now + PROBE_S[self._failed_probes]


def _several(conversations: Iterable[str]) -> bool:
    return len(set(conversations)) >= LEAST_CONVERSATIONS
