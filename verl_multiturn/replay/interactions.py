"""`RecordedInteractionSession`: the interaction of a recorded conversation, whose answers are the record's.

Its results come from the record, and so does the text of its failure. The consequences of an answer are decided anew:
how much of it is kept, and whether the conversation is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_multiturn.calls.outages.process import OutageEndError
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.running.replies import CheckedReply, InteractionFailedError
from verl_multiturn.interactions.running.session import InteractionSession
from verl_multiturn.replay.calls import DivergedError, RecordedCalls, Recording, ReplayDifference
from verl_multiturn.replay.user_turns import note_user_turns
from verl_multiturn.rollout.user_rows import current_user


class RecordedInteractionSession(InteractionSession):
    """The interaction of one recorded conversation.

    Args:
        recording: The record of it.
        args: As for `InteractionSession`, and so `kwargs`.
    """

    def __init__(self, recording: Recording, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recording, self._record = recording, recording.record
        self._calls = RecordedCalls(self._gate, self._calls.instance_id, self._answer)
        self.outages = dict.fromkeys(name for name in self._record["outages"] if name.startswith("interaction "))

    async def start(self) -> CheckedReply | None:
        """Return the recorded opening, read anew."""
        record = self._record
        is_outage = record["stop_reason"] == "outage" and record["error"].startswith("interaction ")
        if is_outage and not record["generations"] and self._recorded(None) is None:  # before it began
            raise OutageEndError(record["error"])
        try:
            reply = await super().start()
        finally:
            self._note_user()
        return None if reply is None else self._with_state(reply, None)

    def _note_user(self) -> None:
        """Note the recorded turns of the user that come next."""
        numbers = self._recording.user_turns()  # passed over, also where the replay's settings train no user
        if (rows := current_user()) is not None:
            note_user_turns(rows, self._record, numbers)

    async def reply(self, messages: Sequence[Mapping[str, Any]]) -> CheckedReply:
        """Return the recorded answer to the last turn, read anew.

        The turns of a user that is trained are parts of its answers.
        """
        turn = self._turn
        try:
            return self._with_state(await super().reply(messages), turn)
        finally:
            self._note_user()

    @property
    def _turn(self) -> int | None:
        """Return the number of the turn that is answered; None before the first, when a greeting is."""
        turn = self._recording.turn
        return turn if turn >= 0 else None

    def _with_state(self, reply: CheckedReply, turn: int | None) -> CheckedReply:
        """Return a reply with the digest of its state, which is all that a record keeps of it."""
        recorded = self._recorded(turn)
        return reply if recorded is None else replace(reply, state=recorded["state"])

    def _recorded(self, turn: int | None) -> Mapping[str, Any] | None:
        return next((reply for reply in self._record["replies"] if reply["turn"] == turn), None)

    async def _answer(self, method: str) -> Any:
        """Return the recorded result of a method.

        Raises:
            InteractionFailedError: There was nothing, by the record.
            DivergedError: The record has no call of it.
        """
        record, turn = self._record, None if method == "start" else self._turn
        if method == self._gate.owner.end:
            return await self._recording.end()
        if method == "score":
            if record["time_up"] == "score":
                await self._recording.run_out()
            if record["stop_reason"] != "environment_error":
                return {"roles": scores} if (scores := record.get("scores")) else float(record["score"])
        elif (reply := self._recorded(turn)) is not None:
            images = [self._recording.image(image) for image in reply["images"]]
            given = None if reply["reward"] is None else float(reply["reward"])
            return Reply(
                reply["text"],
                images or None,
                given,
                reply["done"],
                reply["truncated"],
                None,
                reply["metrics"],
                reply.get("shows", ()),
            )
        if method == "start" and record["generations"]:  # the fault came later
            return None
        if record["time_up"] == "interaction":
            await self._recording.run_out()
        if record["stop_reason"] == "outage":
            raise OutageEndError(record["error"])
        if record["stop_reason"] == "environment_error":
            raise InteractionFailedError(record["error"])
        if method == "start":
            return None
        raise DivergedError(ReplayDifference(turn, "replies", None, "no reply", "asked for one"))

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Return the recorded result of a method, without the words that a session puts before a failure."""
        return await self._calls.call(method)
