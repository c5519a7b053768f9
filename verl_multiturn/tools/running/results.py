"""`CallResult`: the answer to one call, with its status, reward, metrics and times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class CallStatus(StrEnum):
    """Way in which a call ended: the tool was called (the first three), or the call was refused (the others).

    ERROR is also the status of a call of a tool whose `create` failed.
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
    """Answer to one call, with its reward, metrics and times.

    A session begins it with the call, `answers.py` fills it once the tool has answered, and the session adds the times.
    """

    call_id: str
    tool: str
    status: CallStatus = CallStatus.OK
    text: str = ""
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
    """The tool's answer before `text` lost its middle; None: it lost nothing, or no record keeps it."""
