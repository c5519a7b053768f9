"""`Life`: one conversation from its beginning to its end, whatever ends it.

    worker        `with live(life, recorder, tracer):`   it begins, and its listeners hear of it
    conversation    `async with running(deadline):`        its wall clock runs
    engine            `with stopped(): await …`              the clock pauses, and the deadline is put off
    cache             `with life.held(): await …`            a turn waits for room, and the clock pauses, too
    loop            `life.complete(outcome, …)`            it has ended by itself: its record is made of this
    worker          `life.leave()`                         it needs no more tokens; its reward, its rows
                  the block ends                         its listeners hear how it ended ──▶ record, lines, trace

A life is never handed on: it is a context variable, and tasks and threads of the conversation inherit it.
`_entered` is the one place that sets this variable, and that of the life's timeline, which lies in `calls`.

Invariants:
- a life that has begun is over exactly once, and then nothing of it changes any more: its record is made in a thread;
- a conversation within a conversation, as a tool may run one, has a clock of its own. Its timeline, its place in the
  cache, its record and its end are those of the outermost one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

from verl_multiturn.calls.timeline import Timeline, during, kept
from verl_multiturn.describe import describe
from verl_multiturn.rollout.clock import WallClock
from verl_multiturn.rollout.outcome import Outcome, Request

Status = Literal["finished", "cut", "cancelled", "error"]


@dataclass(eq=False)
class Life:
    """A conversation, or an agent's session, that began."""

    id: str = ""
    """Id of its request; "" where it is a clock alone, as `running` makes one."""
    group: str = ""
    """verl's uid of its group; "" without one: then it has no siblings, and its turns neither lead nor wait."""
    number: int = 0
    """Number of the conversation in its group (verl's `session_id`)."""
    rerolled_from: str | None = None
    """uid of the group in whose place its group was begun; None: none."""
    loop: str = ""
    """Name of the agent loop."""
    step: int = 0
    """Step of the trainer in which it was begun."""
    validation: bool = False
    row: Mapping[str, Any] = field(default_factory=dict)
    """verl's row: `raw_prompt`, `data_source`, `reward_model`, `extra_info`, `index`."""
    data_row: tuple[int, str] | None = None
    """Number and digest of the row of an evaluation's file of rows (`schema.DataRow`); None: a trainer began it."""
    model: str | Sequence[str] | None = None
    """Digest of the weights; None: those of a trainer. A gateway's session has the digests of all its deployments, of
    which a token's weight version is the place."""
    task: str | None = None
    """Of a gateway's session: `task_id` of its start; None: it is of none."""
    user: str | None = None
    """Of a gateway's session: the user that its start names; None: none."""
    began: float = 0.0
    """Time (`time.time`) at which it began: the earlier, the sooner a full cache lets its turns in."""

    clock: WallClock | None = None
    """Its wall clock; None before it runs. It stays when it is over."""
    timeline: Timeline | None = None
    """Its waits so far, the current one included; None: it has no record and no trace."""
    outer: Life | None = None
    """The outermost conversation in which it runs; None: it is that itself."""

    servers: dict[str, str] = field(default_factory=dict)
    """Name of the generation server of each of its requests."""
    held_s: float = 0.0
    """Seconds for which its turns waited for room in a server's cache."""
    led_s: float = 0.0
    """Seconds for which its turns waited for those that lead them."""
    asks_no_more: bool = False
    """Whether it asks for no more tokens."""
    at_last: list[Callable[[Life], None]] = field(default_factory=list)
    """Called when it asks for no more tokens."""

    outcome: Outcome | None = None
    """Its result so far; None while its loop has not begun."""
    generations: Sequence[Any] | None = None
    """Receipts (`certificate.receipts.Receipt`) of the engine's generations, in the order of `outcome.turns`; None
    while it has not ended by itself."""
    request: Request | None = None
    """The request made of the row; None for a session, whose agent makes requests."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, under the engine's names."""
    void: bool = False
    """Whether it has a void turn."""
    ended: float = 0.0
    """Time at which it ended, before its reward was computed."""
    status: Status = "finished"
    error: str = ""
    """Text of the error that its loop raised."""
    score: float | None = None
    """Its whole reward; None where none was computed."""
    reported: dict[str, Any] = field(default_factory=dict)
    """The other numbers of its reward function."""
    verdicts: dict[str, Any] = field(default_factory=dict)
    """The verdicts of its reward's criteria (`rewards.score.Verdicts`); {} without any."""
    session: Any = None
    """RL-Insight's session of the conversation; None without it."""

    def complete(
        self,
        outcome: Outcome,
        generations: Sequence[Any],
        row: Mapping[str, Any],
        sampling: Mapping[str, Any],
        request: Request | None,
        void: bool,
    ) -> None:
        """Note that it has ended by itself, and keep the parts of its record: the fields of these names."""
        self.outcome, self.generations, self.row = outcome, generations, row
        self.sampling, self.request, self.void = sampling, request, void
        self.ended = time.time()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold a turn back for want of room: the conversation's clock pauses."""
        since = time.perf_counter()
        try:
            with stopped(), during("pause"):
                yield
        finally:
            self.held_s += time.perf_counter() - since

    @contextmanager
    def led(self) -> Iterator[None]:
        """Let a turn wait for one that leads it, as `held` does for room."""
        since = time.perf_counter()
        try:
            with stopped(), during("pause"):
                yield
        finally:
            self.led_s += time.perf_counter() - since

    def leave(self) -> None:
        """Give up its place in the cache: it asks for no more tokens, whatever else it still waits for."""
        self.asks_no_more = True
        while self.at_last:
            self.at_last.pop()(self)


_life: ContextVar[Life | None] = ContextVar("life", default=None)


class LifeListener(Protocol):
    """Hears of conversations that live: the recorder and the tracer of a worker."""

    def begun(self, life: Life) -> None:
        """Take note of a conversation that begins."""

    def over(self, life: Life) -> None:
        """Take note of a conversation that is over, whatever ended it."""


@contextmanager
def live(life: Life, *listeners: LifeListener | None) -> Iterator[Life]:
    """Let a conversation live until the block ends, in whose task it runs; yield it.

    Args:
        life: The conversation, which begins now.
        listeners: Those that hear of it. With one of them its timeline is kept. Each that heard of its beginning hears
            of its end, also where another one raises.

    Raises:
        Exception: A listener raised it, the first one that did.
    """
    hearing = [listener for listener in listeners if listener is not None]
    heard: list[LifeListener] = []
    life.began = life.began or time.time()
    if hearing and life.timeline is None:
        life.timeline = Timeline()
    try:
        for listener in hearing:
            listener.begun(life)
            heard.append(listener)
        with _entered(life):
            yield life
    except asyncio.CancelledError:
        life.status = "cut" if life.status == "cut" else "cancelled"
        raise
    except Exception as error:  # it is noted, and goes on
        life.status, life.error = "error", describe(error)
        raise
    finally:
        life.ended = life.ended or time.time()
        if life.timeline is not None:
            life.timeline.end()
        _end(life, heard)


def _end(life: Life, listeners: Sequence[LifeListener]) -> None:
    """Let listeners know that a life is over, and let it give up its place in the cache; then raise the first error."""
    errors: list[BaseException] = []
    for call in (*(listener.over for listener in listeners), Life.leave):
        try:
            call(life)
        except BaseException as error:  # the others hear of the end first
            errors.append(error)
    if errors:
        raise errors[0]


@contextmanager
def _entered(life: Life) -> Iterator[None]:
    """Make a life, and its timeline, those of the running task and of those that it starts, until the block ends."""
    token = _life.set(life)
    try:
        with kept(life.timeline):
            yield
    finally:
        _life.reset(token)


def current() -> Life | None:
    """Return the running conversation, of several within one another the outermost; None: there is none."""
    life = _life.get()
    if life is None:
        return None
    life = life.outer or life
    return life if life.id else None


def note(outcome: Outcome, request: Request | None = None) -> None:
    """Note the running conversation's outcome; a loop calls it before the outcome is complete, or after."""
    if (life := current()) is not None:
        life.outcome, life.request = outcome, request


@asynccontextmanager
async def running(deadline: asyncio.Timeout) -> AsyncIterator[None]:
    """Make an entered timeout the wall clock of the running conversation, until the block ends.

    A conversation that runs within another one, or that has none, gets a life of its own for the clock.
    """
    around, clock = _life.get(), WallClock(deadline)
    try:
        if around is not None and around.clock is None:
            around.clock = clock
            yield
        else:
            timeline = None if around is None else around.timeline
            with _entered(Life(clock=clock, timeline=timeline, outer=current())):
                yield
    finally:
        clock.is_over = True


def stopped() -> AbstractContextManager[None]:
    """Stop the clock of the conversation that this task works for, until the block ends.

    Nothing happens without a conversation. A time that is up stays so.
    """
    clock = _clock()
    return nullcontext() if clock is None else clock.stopped()


def stood_still_s() -> float:
    """Return the seconds for which the clock of the running conversation has been stopped, up to now."""
    clock = _clock()
    return 0.0 if clock is None else clock.stood_still_s()


def expire() -> None:
    """Let the time of the conversation that this task works for be up now, as in a replay; once it is up, it stays so.

    Raises:
        RuntimeError: The task works for no conversation.
    """
    clock = _clock()
    if clock is None:
        raise RuntimeError("there is no conversation whose time could be up")
    clock.expire()


async def run_out() -> NoReturn:
    """Let the time be up, as `expire` does, and wait for the cancellation that follows from it."""
    expire()
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing ends this future")


def _clock() -> WallClock | None:
    """Return the clock of the conversation that this task works for, of several the innermost."""
    life = _life.get()
    return None if life is None else life.clock
