"""`CallResult`: the answer to one call, with its status, reward, metrics and times; and `Run`, which makes it."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from verl_multiturn.calls.slots import Slot
from verl_multiturn.chat.clipping import shorten
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.tools.calls.answers import CallAnswer, whole_of
from verl_multiturn.tools.calls.gate import Gate


class CallStatus(StrEnum):
    """Way in which a call ended: the tool was called (the first three), or the call was refused (the others).

    ERROR also stands for a call of a tool whose `create` failed.
    """

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    OVER_LIMIT = "over_limit"
    OVERLOADED = "overloaded"


EXECUTED = frozenset({CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT})


@dataclass(slots=True)
class CallResult:
    """Answer to one call, with its reward, metrics and times."""

    call_id: str
    tool: str
    status: CallStatus
    text: str
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds that the call ran, all attempts together."""
    images: tuple[Any, ...] = ()
    queue_s: float = 0.0
    """Seconds that the call waited for a slot."""
    attempts: int = 0
    """Number of times that `execute` was called."""
    cached: bool = False
    truncated: bool = False
    """True if the model reads less than the tool answered."""
    altered: bool = False
    """True if zero-width spaces part control tokens in the text; a model that copies the text writes them, too."""
    at: float = field(default_factory=time.time, compare=False)
    """Time (`time.time`) at which the answer was there; for traces alone."""
    whole: str | None = None
    """What the tool answered before `text` lost its middle; None: nothing was lost, or nobody keeps it."""


class Run:
    """One call on its way to its result, with its slot and its times."""

    __slots__ = ("attempts", "call", "gate", "slot")

    def __init__(self, gate: Gate, call: ToolCall) -> None:
        self.gate, self.call = gate, call
        self.slot = Slot(gate)
        self.attempts = 0

    def answered(self, answer: CallAnswer) -> CallResult:
        """Return the result of a call that was answered; without an attempt the answer is from the cache."""
        slot, is_cached = self.slot, self.attempts == 0
        return CallResult(
            self.call.id,
            self.call.name,
            CallStatus.OK,
            answer.text,
            answer.reward,
            copy.deepcopy(answer.metrics),  # the cache keeps them
            0.0 if is_cached else asyncio.get_running_loop().time() - slot.started,
            answer.images,
            slot.started - slot.asked,
            self.attempts,
            is_cached,
            answer.truncated,
            whole=answer.whole,
        )

    def failed(self, status: CallStatus, text: str) -> CallResult:
        """Return the result of a call that the tool did not answer."""
        slot, most = self.slot, self.gate.limits.response_characters
        return CallResult(
            self.call.id,
            self.gate.name,
            status,
            shorten(text, most),
            whole=whole_of(text, most),
            seconds=asyncio.get_running_loop().time() - slot.started if self.attempts else 0.0,
            queue_s=slot.started - slot.asked,
            attempts=self.attempts,
        )
