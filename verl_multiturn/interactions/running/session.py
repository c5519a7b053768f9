"""`InteractionSession`: the interaction of one conversation, from `start` to `close`.

Invariants:
- `start` runs once, `reply` and `score` only after it, and `close` exactly once for every `start` that began, also
  under cancellation, timeout and error; nothing runs after `close`;
- a method may change its kwargs or its messages: no other call or conversation sees the change;
- what an interaction's code, process or network does wrong ends the conversation (`InteractionFailedError`); a broken
  contract (a wrong return type) raises `InteractionContractError`, a row or a setting that cannot work `ConfigError`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_multiturn.calls.invocation import Invocation, TimedOutError, is_coroutine_method, task_name
from verl_multiturn.calls.limits import CallLimits, limits_of
from verl_multiturn.calls.slots import BusyError, SharedSlots, Slots
from verl_multiturn.describe import describe, place_of
from verl_multiturn.errors import ConfigError, InteractionContractError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.replies import CheckedReply, InteractionFailedError, read_number, read_reply
from verl_multiturn.tasks import Alarms, finish, keep
from verl_multiturn.tools.loading.kwargs import copy_kwargs

logger = logging.getLogger(__name__)

# Seconds beyond a request's budget: for calls that were given up to end, and for `close`.
_ABANDONED_S = 5.0
_CLOSE_S = 5.0


class InteractionGate(Slots):
    """Shared state of one interaction in one worker.

    Args:
        interaction: The interaction.
        timeout_s: As in `Slots`.
        shared: As in `Slots`.
    """

    def __init__(self, interaction: Interaction, timeout_s: float, shared: SharedSlots | None = None) -> None:
        limits = limits_of(interaction, CallLimits)
        super().__init__(interaction, "interaction", limits, timeout_s, shared)
        self.interaction = interaction
        self.most_characters = limits.response_characters
        methods = [name for name in METHODS if getattr(type(interaction), name) is not getattr(Interaction, name)]
        self.is_coroutine = {name: is_coroutine_method(getattr(interaction, name)) for name in methods}
        """Flags of the interaction's own methods: True for a coroutine. Methods that it inherits do nothing."""


METHODS = ("start", "reply", "score", "close")
"""Names of the methods that run in a conversation."""


class InteractionSession:
    """The interaction of one conversation, used as an async context manager.

    Args:
        gate: What all conversations of the worker share of the interaction.
        instance_id: Id of the conversation, passed to every method.
        kwargs: The row's kwargs for `start` and `reply`.
        stood_still_s: Returns the seconds for which the engine was paused so far. An interaction that asks the engine
            (`PolicyUser`) may wait for it, which is not its fault: a call during which this grows is given its time
            once more.
    """

    def __init__(
        self,
        gate: InteractionGate,
        instance_id: str,
        kwargs: Mapping[str, Any],
        stood_still_s: Callable[[], float] = float,
    ) -> None:
        self._gate = gate
        self._stood_still_s = stood_still_s
        self._instance_id = instance_id
        self._kwargs = copy_kwargs(kwargs, gate.name, "interaction", instance_id)
        self._began = False
        self._closed = False
        self._left: list[asyncio.Future[Any]] = []
        self.seconds = 0.0
        """Seconds spent in `start`, `reply` and `score`, with the wait for a slot."""
        self.owes = ""
        """Name of the method that was asked last and has given nothing that can be used; "" otherwise."""
        self._scored = False

    @property
    def name(self) -> str:
        """Return the interaction's name."""
        return self._gate.name

    @property
    def scored(self) -> bool:
        """Tell whether the reward of the whole conversation is known; always where the interaction gives none."""
        return self._scored or "score" not in self._gate.is_coroutine

    async def __aenter__(self) -> InteractionSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._began and not self._closed:
            self._closed = True
            # Also a cancelled conversation waits until its interaction is closed.
            await finish(asyncio.ensure_future(self._close()))

    async def start(self) -> CheckedReply | None:
        """Begin the conversation, and return the interaction's first message; None where it has none.

        Raises:
            InteractionFailedError: It could not begin, or it is over before the model's first turn.
            InteractionContractError: It returned something that is no `Reply`.
        """
        self._began = True
        if "start" not in self._gate.is_coroutine:
            return None
        self.owes = "start"
        returned = await self._within_slot("start", self._instance_id, **copy.deepcopy(self._kwargs))
        reply = None if returned is None else read_reply(self.name, "start", returned, self._gate.most_characters)
        if reply is not None and (reply.done or reply.truncated):
            raise InteractionFailedError(f"interaction {self.name!r}: it was over before the model's first turn")
        self.owes = ""
        return reply

    async def reply(self, messages: Sequence[Mapping[str, Any]]) -> CheckedReply:
        """Return the answer to a turn.

        Args:
            messages: The conversation as the model saw it; the last message is the turn.

        Raises:
            InteractionFailedError: There is no answer.
            InteractionContractError: It returned something that is no `Reply`, or the session is closed.
        """
        self.owes = "reply"
        seen = [_copied(message) for message in messages]
        returned = await self._within_slot("reply", self._instance_id, seen, **copy.deepcopy(self._kwargs))
        reply = read_reply(self.name, "reply", returned, self._gate.most_characters)
        self.owes = ""
        return reply

    async def score(self) -> float:
        """Return the reward of the whole conversation.

        Raises:
            InteractionFailedError: There is none, or it is no finite number.
            InteractionContractError: It returned something that is no number.
        """
        if "score" not in self._gate.is_coroutine:
            return 0.0
        self.owes = "score"
        score = read_number(self.name, "score", await self._call("score", self._gate.alarms, self._instance_id))
        self.owes, self._scored = "", True
        return score

    async def _within_slot(self, method: str, /, *arguments: Any, **kwargs: Any) -> Any:
        gate, lease = self._gate, None
        if not gate.try_enter():
            waited_from = time.perf_counter()
            try:
                lease = await gate.enter()
            except BusyError as error:
                raise InteractionFailedError(f"interaction {self.name!r}: {method}: {error}") from None
            finally:
                self.seconds += time.perf_counter() - waited_from
        try:
            return await self._call(method, gate.alarms, *arguments, **kwargs)
        finally:
            # A call that was given up keeps its slot until it has really ended.
            left = [remaining for remaining in self._left if not remaining.done()]
            if left:
                ended = asyncio.gather(*left, return_exceptions=True)
                ended.add_done_callback(lambda _: gate.leave(lease))
            else:
                gate.leave(lease)

    async def _call(self, method: str, alarms: Alarms, /, *arguments: Any, **kwargs: Any) -> Any:
        """Call a method. A row chooses the names of the kwargs.

        Raises:
            InteractionFailedError: It raised, or did not return in time.
            InteractionContractError: The session is closed, or the method raised it.
            ConfigError: The method raised it: the row or a setting cannot work.
        """
        if self._closed and method != "close":
            raise InteractionContractError(f"interaction {self.name!r}: {method} after close")
        gate, began = self._gate, time.perf_counter()
        function, is_coroutine = getattr(gate.interaction, method), gate.is_coroutine.get(method, False)
        try:
            # Made in the try block: a coroutine function that does not take the arguments raises here.
            name = task_name("interaction", self.name, method)
            invocation = Invocation(function, is_coroutine, arguments, kwargs, name)
            try:
                while True:
                    stood_still_s = self._stood_still_s()
                    await invocation.ended(alarms)
                    if invocation.done or self._stood_still_s() == stood_still_s:
                        break
                returned = invocation.result()
            except (TimedOutError, asyncio.CancelledError):
                self._give_up(invocation)
                raise
        except TimedOutError:
            raise InteractionFailedError(
                f"interaction {self.name!r}: {method} did not return within {alarms.after_s:g} s"
            ) from None
        except (InteractionContractError, ConfigError):
            raise
        except Exception as error:  # the interaction's own code
            said = f"{describe(error)}{place_of(error)}"
            raise InteractionFailedError(f"interaction {self.name!r}: {method}: {said}") from error
        else:
            return returned
        finally:
            if method != "close":
                self.seconds += time.perf_counter() - began

    def _give_up(self, invocation: Invocation) -> None:
        for remaining in invocation.stop():
            self._left.append(remaining)
            keep(remaining)

    async def _close(self) -> None:
        # A call that was given up may still run; wait for its end, but not for ever.
        if left := [remaining for remaining in self._left if not remaining.done()]:
            await asyncio.wait(left, timeout=_ABANDONED_S)
        if "close" not in self._gate.is_coroutine:
            return
        try:
            await self._call("close", Alarms(_CLOSE_S, is_fair=False), self._instance_id)
        except (
            InteractionFailedError,
            InteractionContractError,
            ConfigError,
        ) as error:  # it is over anyway
            logger.warning("%s", error)


def _copied(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message that may be changed freely; its images are shared."""
    copied = dict(message)
    if "tool_calls" in copied:
        copied["tool_calls"] = copy.deepcopy(copied["tool_calls"])
    if isinstance(copied.get("content"), list):
        copied["content"] = [dict(block) if isinstance(block, Mapping) else block for block in copied["content"]]
    return copied
