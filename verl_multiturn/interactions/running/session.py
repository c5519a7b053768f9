"""`InteractionSession`: the interaction of one conversation, from `start` to `close`.

Invariants:
- `start` runs once, `reply` and `score` only after it, and `close` exactly once for every `start` that began, also
  under cancellation, timeout and error; nothing runs after `close`;
- a method may change its kwargs or its messages: no other call or conversation sees the change;
- a fault of an interaction's code, process or network ends the conversation (`InteractionFailedError`); a broken
  contract (a wrong return type) raises `InteractionContractError`, a row or a setting that cannot work `ConfigError`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_multiturn.calls.calls import Calls
from verl_multiturn.calls.invocation import BusyError, Invocation, TimedOutError
from verl_multiturn.calls.limits import CallLimits, limits_of
from verl_multiturn.calls.outages.authorship import WrittenTexts
from verl_multiturn.calls.outages.process import OutageEndError, Outages
from verl_multiturn.calls.owner import Owner
from verl_multiturn.calls.slots import SharedSlots, Slot, Slots
from verl_multiturn.calls.tasks import Alarms
from verl_multiturn.describe import describe, place_of
from verl_multiturn.errors import ConfigError, InteractionContractError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.replies import CheckedReply, InteractionFailedError, read_reply, read_score
from verl_multiturn.tools.loading.kwargs import copy_kwargs

METHODS = ("start", "reply", "score", "close")
"""Names of the methods that run in a conversation."""


def interaction_owner(interaction: Interaction) -> Owner:
    """Return an interaction as the owner of its calls."""
    limits = limits_of(interaction, CallLimits)
    return Owner(interaction, "interaction", METHODS, Interaction, limits, InteractionContractError)


class InteractionGate(Slots):
    """Shared state of one interaction in one worker.

    Args:
        interaction: The interaction.
        timeout_s: As in `Slots`.
        shared: As in `Slots`.
        outages: As in `Slots`.
    """

    def __init__(
        self,
        interaction: Interaction,
        timeout_s: float,
        shared: SharedSlots | None = None,
        outages: Outages | None = None,
    ) -> None:
        super().__init__(interaction_owner(interaction), timeout_s, shared, outages)
        self.most_characters = self.owner.limits.response_characters


class InteractionSession:
    """The interaction of one conversation, used as an async context manager.

    Args:
        gate: The state of the interaction that all conversations of the worker share.
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
        row = copy_kwargs(kwargs, gate.name, "interaction", instance_id)
        self._calls = Calls(gate, instance_id, {"start": row, "reply": row}, wait=self._wait)
        self.seconds = 0.0
        """Seconds spent in `start`, `reply` and `score`, with the wait for a slot."""
        self.owes = ""
        """Name of the method that was called last and has given nothing that can be used; "" otherwise."""
        self.scores: dict[str, float] = {}
        """Rewards by role, where `score` gave such ones; empty otherwise."""
        self._scored = False
        self._seen: Sequence[Any] = ()
        """The conversation, as `reply` saw it last."""
        self.outages: dict[str, None] = {}
        """Names whose outage a call of the conversation hit, in order."""

    @property
    def name(self) -> str:
        """Return the interaction's name."""
        return self._gate.name

    @property
    def scored(self) -> bool:
        """Return whether the reward of the whole conversation is known; always where the interaction gives none."""
        return self._scored or "score" in self._gate.owner.inherited

    async def __aenter__(self) -> InteractionSession:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await Calls.end([self._calls])

    async def start(self) -> CheckedReply | None:
        """Begin the conversation, and return the interaction's first message; None where it has none.

        Raises:
            InteractionFailedError: It could not begin, or it is over before the model's first turn.
            InteractionContractError: It returned something that is not a `Reply`.
            OutageEndError: There is an outage; `reply` and `score` raise it, too.
        """
        await self._gate.admit()
        self._calls.begin()
        if "start" in self._gate.owner.inherited:
            return None
        self.owes = "start"
        returned = await self._call("start")
        reply = None if returned is None else read_reply(self.name, "start", returned, self._gate.most_characters)
        if reply is not None:
            self._goes_on(reply)
        self.owes = ""
        return reply

    async def open(self, messages: Sequence[Mapping[str, Any]]) -> CheckedReply | None:
        """Begin the conversation, and return the interaction's message before the model's first turn, if any.

        That is the result of `start`. Where it returns nothing, and the row ends in a greeting of the assistant's, it
        is the answer to the greeting.

        Args:
            messages: The row's messages.

        Raises:
            InteractionFailedError, InteractionContractError, OutageEndError: As for `start` and `reply`.
        """
        opening = await self.start()
        if opening is not None or messages[-1]["role"] != "assistant":
            return opening
        opening = await self.reply(messages)
        if opening.shows:
            raise InteractionContractError(
                f"interaction {self.name!r}: reply shows the tool {opening.shows[0]!r} before the model's first turn; "
                "show it later"
            )
        return self._goes_on(opening)

    def _goes_on(self, reply: CheckedReply) -> CheckedReply:
        if reply.done or reply.truncated:
            raise InteractionFailedError(f"interaction {self.name!r}: it was over before the model's first turn")
        return reply

    async def reply(self, messages: Sequence[Mapping[str, Any]]) -> CheckedReply:
        """Return the answer to a turn.

        Args:
            messages: The conversation as the model saw it; the last message is the turn.

        Raises:
            InteractionFailedError: There is no answer.
            InteractionContractError: It returned something that is not a `Reply`, or the session is closed.
        """
        self.owes = "reply"
        seen = [_copied(message) for message in messages]
        returned = await self._call("reply", seen)
        reply = read_reply(self.name, "reply", returned, self._gate.most_characters)
        self.owes = ""
        return reply

    async def score(self) -> float:
        """Return the reward of the whole conversation; of rewards by role, which go to `scores`, the assistant's.

        Raises:
            InteractionFailedError: There is none, or it is not a finite number.
            InteractionContractError: It returned no reward, or none for one of the two roles.
        """
        if "score" in self._gate.owner.inherited:
            return 0.0
        self.owes = "score"
        score, self.scores = read_score(self.name, await self._call("score"))
        self.owes, self._scored = "", True
        return score

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method: the score at once, the others when there is a slot.

        Raises:
            InteractionFailedError: It raised, or did not return in time, or there was no slot.
            InteractionContractError: The session is closed, or the method raised it.
            ConfigError: The method raised it: the row or a setting cannot work.
            OutageEndError: It hit an outage that ends the conversation, or waited for its end for too long.
        """
        where, began = f"interaction {self.name!r}: {method}", time.perf_counter()
        self._seen = arguments or self._seen
        written = WrittenTexts(self._seen, list(self._calls.kwargs.values()))
        watched = self._gate.watched(self._calls.instance_id, method, written)
        try:
            async with watched:
                if method == "score":
                    await watched.wait()
                    return await self._calls.call(method)
                with Slot(self._gate) as slot:
                    await watched.take(slot.take, slot.give_back)
                    return await self._calls.call(method, *arguments, slot=slot)
        except BusyError as error:
            problem, cause = f"{where}: {error}", None
        except TimedOutError:
            problem, cause = f"{where} did not return within {self._gate.timeout_s:g} s", None
        except (InteractionContractError, ConfigError, OutageEndError):
            raise
        except Exception as error:  # the interaction's own code
            problem, cause = f"{where}: {describe(error)}{place_of(error)}", error
        finally:
            self.seconds += time.perf_counter() - began
        if watched.met:
            self.outages[watched.name] = None
        raise (OutageEndError if watched.ends else InteractionFailedError)(problem) from cause

    async def _wait(self, invocation: Invocation, alarms: Alarms) -> None:
        """Wait for the end of a call, once more if the engine was paused meanwhile."""
        while True:
            stood_still_s = self._stood_still_s()
            await invocation.ended(alarms)
            if invocation.done or self._stood_still_s() == stood_still_s:
                return


def _copied(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message that may be changed freely; its images are shared."""
    copied = dict(message)
    if "tool_calls" in copied:
        copied["tool_calls"] = copy.deepcopy(copied["tool_calls"])
    if isinstance(copied.get("content"), list):
        copied["content"] = [dict(block) if isinstance(block, Mapping) else block for block in copied["content"]]
    return copied
