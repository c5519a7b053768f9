"""Messages between workers, the keeper of breakers and the trainer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from verl_multiturn.calls.outages.breaker import Outage

Waiting = Literal["call", "failed", "conversation"]
"""A call; a call that has failed as a probe; a new conversation."""


class CallAdmission(NamedTuple):
    """The end of a wait."""

    why: Literal["closed", "probe", "scout", "again"]
    """The breaker is closed; the call is a probe; the new conversation may come in; enter again."""
    epoch: int
    """Epoch of the breaker."""


@dataclass
class Sums:
    """Calls of one name in one process since its last report."""

    answered: int = 0
    """Calls that were answered."""
    mistakes: int = 0
    """Calls that failed by the model's mistake, with or without an answer of the service."""
    bugs: int = 0
    """Calls that failed by a bug."""
    outages: list[Outage] = field(default_factory=list)
    """Calls that ended with an outage, after those that were answered."""
    hung: list[Outage] = field(default_factory=list)
    """Calls that had not ended when their conversation's time was up, where lateness is an outage; and outages that
    were held, and are seen now."""
    beside: int = 0
    """Calls that have not ended, and did not begin after the newest outage here."""
    masked: int = 0
    """Calls with an outage that the breaker does not count: those of `mode: mask`, where nothing waits, and those that
    may call another service than the other calls."""
    error: str = ""
    """Text of the last outage."""
    next_try_s: float | None = None
    """Seconds after which the service accepts calls again; None: unknown."""
    probe: str = ""
    """Id of a probe that has ended; "" for none."""
    probe_good: bool | None = False
    """True when that probe was answered; None: it failed by the model's mistake."""


class StoreAnswer(NamedTuple):
    """Answer of the keeper to a process."""

    keeper: str
    """Id of the keeper; another one has died."""
    version: int
    """Number of changes so far."""
    epochs: dict[str, int]
    """Epoch of each breaker, by name. It is odd while the breaker is open."""
    judged: tuple[str, ...]
    """Conversations found affected since."""


@dataclass(frozen=True)
class OutageState:
    """The state of one name, for the trainer."""

    is_open: bool
    """True when calls wait."""
    open_s: float
    """Seconds for which the breaker has been open now; 0 while it is closed."""
    lasting_s: float
    """Seconds of it in which the service was in demand; 0 after `IDLE_S` without demand.

    It is in demand while a call or a new conversation waits, a probe is under way, or a call fails.
    """
    open_total_s: float
    """Seconds for which it has been open in the whole run."""
    trips: int
    """How often it opened."""
    calls: int
    """Calls that have ended, outages included."""
    outages: int
    """Calls that ended with an outage."""
    bugs: int
    """Calls that failed by a bug."""
    waiting: int
    """Calls and new conversations that wait now."""
    error: str
    """Text of the last outage; "" without one."""


class RemoteOutageStore(Protocol):
    """Serve the processes of a run, which reach it through Ray; `process.py` calls it."""

    async def report(self, sums: Mapping[str, Sums], process: str = "") -> StoreAnswer:
        """Note calls that have ended; see `OutageStore.report`."""

    async def changes(self, keeper: str, seen: int, process: str = "") -> StoreAnswer:
        """Wait for a change; see `OutageStore.changes`."""

    async def enter(self, name: str, waiter: str, kind: Waiting, lease_s: float, process: str = "") -> CallAdmission:
        """Wait at a breaker; see `OutageStore.enter`."""

    async def leave(self, name: str, waiter: str) -> None:
        """Wait no longer; see `OutageStore.leave`."""

    async def recall(self, epochs: Mapping[str, tuple[int, float]], judged: Collection[str]) -> None:
        """Take over the state that a process knows; see `OutageStore.recall`."""


class StoreLostError(Exception):
    """The keeper has died, or cannot be reached."""
