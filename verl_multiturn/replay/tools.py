"""`RecordedToolSession`: the tools of a recorded conversation, whose answers are the record's.

Results and errors of tools come from the record. All that a session decides is decided anew: which call is refused
and why, the status of one that fails, how much of an answer is kept, and which text of it the model reads.

    execute ─→ checks, limits ─→ slot ─→ the record's answer ─→ read_answer ─→ CallResult
"""

from __future__ import annotations

from typing import Any

from verl_multiturn.calls.invocation import BusyError, TimedOutError
from verl_multiturn.calls.outages.process import OutageEndError
from verl_multiturn.calls.slots import Slot
from verl_multiturn.errors import UnjudgedError
from verl_multiturn.replay.calls import DivergedError, RecordedCalls, Recording, ReplayDifference, raised
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import EXECUTED, CallResult, CallStatus
from verl_multiturn.tools.running.session import ToolSession

_ANSWERED = {*EXECUTED, CallStatus.OVERLOADED}
_ERROR = "Error: "


class RecordedGate(Gate):
    """A gate without a cache and places: the record shows whether an answer came from it, and no tool is created."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = self.limits.model_copy(update={"cache": 0})
        self.places = None


class RecordedToolSession(ToolSession):
    """Tools of one recorded conversation.

    Args:
        recording: The record of it.
        args: As for `ToolSession`, and so `kwargs`.
    """

    def __init__(self, recording: Recording, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recording, self._record = recording, recording.record
        self._recorded = {call["id"]: call for call in self._record["calls"]}
        self.outages = dict.fromkeys(name for name in self._record["outages"] if name.startswith("tool "))

    @property
    def lost(self) -> str:
        """Return the outage for which the conversation had to end by now; "" for none."""
        record = self._record
        written = len(record["generations"]), sum(len(row["ids"]) for row in record["rows"])
        is_over = record["time_up"] is None and self._recording.progress() >= written
        return record["error"] if self._is_outage and is_over else ""

    @property
    def shut_out(self) -> str:
        """Return the outage of which alone the conversation had seen something when its time was up; "" for none."""
        return self._record["error"] if self._is_outage and self._record["time_up"] is not None else ""

    @property
    def _is_outage(self) -> bool:
        return self._record["stop_reason"] == "outage" and not self._record["error"].startswith("interaction ")

    @property
    def _is_unjudged(self) -> bool:
        return bool(self._record["stop_reason"] == "unjudged")

    def _calls_of(self, gate: Gate) -> RecordedCalls:
        async def answer(method: str) -> Any:
            if method == gate.owner.end:
                return await self._recording.end()
            return await (self._created(gate.name) if method == "create" else self._rewarded(gate.name))

        calls = RecordedCalls(gate, self._request_id, answer)
        calls.kwargs = super()._calls_of(gate).kwargs
        return calls

    async def _created(self, name: str) -> None:
        record = self._record
        if not record["generations"] and record["time_up"] == "tools":
            await self._recording.run_out()
        if not record["generations"] and self._is_outage:
            raise OutageEndError(record["error"])
        for call in record["calls"]:
            if call["tool"] == name and call["status"] == CallStatus.ERROR and not call["attempts"]:
                raise raised(call["text"].partition("(")[2].removesuffix(")"))

    async def _rewarded(self, name: str) -> Any:
        rewards = self._record["calc_rewards"]
        if not rewards and self._record["time_up"] == "score":
            await self._recording.run_out()
        if name not in rewards and (said := self._record["error"]).startswith(f"tool {name!r}: ") and self._is_unjudged:
            raise UnjudgedError(said.removeprefix(f"tool {name!r}: "))
        if name not in rewards:
            raise raised("it raised, or gave no reward")
        return float(rewards[name])

    async def _execute(self, gate: Gate, result: CallResult, slot: Slot, arguments: dict[str, Any]) -> Any:
        """Return the recorded result of `execute` for a call."""
        record, call = self._record, self._recorded.get(result.call_id)
        if call is None:
            if record["time_up"] == "tools":
                await self._recording.run_out()
            if self._is_outage:
                raise OutageEndError(record["error"])
        if call is None or call["status"] not in _ANSWERED:
            status = "no call" if call is None else call["status"]
            raise DivergedError(ReplayDifference(self._recording.turn, "calls.status", None, status, "executed"))
        result.attempts = call["attempts"]
        text: str = call["text"]
        if call["status"] == CallStatus.TIMEOUT:
            raise TimedOutError(text)
        if call["status"] == CallStatus.OVERLOADED:
            raise BusyError(text.removeprefix(_ERROR))
        if call["status"] == CallStatus.ERROR:
            raise ValueError(text.removeprefix(_ERROR))
        images = [self._recording.image(image) for image in call["images"]]
        return ToolResponse(text, images or None), float(call["reward"]), call["metrics"]
