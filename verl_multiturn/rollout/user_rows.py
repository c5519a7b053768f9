"""`UserRows`: the turns that the policy speaks as the user of one conversation, and the rows in which they are trained.

The user has a view of its own: its persona, and the conversation with flipped roles. So its turns have rows of their
own, before the assistant's:

    question ─ turn ─ question that goes on from it ─ turn ─ other question ─ turn
    row 0: prompt turn observation turn                      row 1: prompt turn      row 2: the assistant's

A question goes on from the turn before if it has that one's messages, the turn's own text, and something new. Any other
question is rendered whole, and begins a row. So does one that does not fit into `response_length` any more, one after a
turn that its budget cut, and the second of two that were asked at the same time.

Invariants:
- a turn and the receipt of its generation are noted together, or neither is: one that comes back when the conversation
  is over belongs to nobody;
- a turn is in a row exactly as the engine was asked and answered. One whose prompt is longer than a row's is in none
  (`dropped_row`), nor is one after which the same question came again (`undelivered`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_multiturn.calls.timeline import during
from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.chat.model_text import spoken
from verl_multiturn.chat.parsing.turns import AssistantTurn
from verl_multiturn.config import USER
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.engines.sample import sample
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.rollout.outcome import ConversationRow, Outcome
from verl_multiturn.rollout.trajectory import Source, Trajectory
from verl_multiturn.rollout.turn import Turn


class ReceiptKeeper(Protocol):
    """An engine that keeps a receipt of each generation (`certificate.receipts.ReceiptingEngine`)."""

    async def generate(self, ask: Ask) -> Generation:
        """Sample tokens, as `Engine.generate` does."""

    def take(self, request_id: str) -> Sequence[Any]:
        """Return the receipts of a request, and forget them."""


@dataclass(eq=False)
class UserQuestion:
    """A question to the policy as the user."""

    messages: list[Message]
    """Messages of the question, the persona first."""
    ids: list[int]
    """All ids that the engine is given."""
    trusted: list[Message] = field(default_factory=list)
    """The messages as the template gets them."""
    before: _UserTurn | None = None
    """The turn from which it goes on; None: it is rendered whole."""
    template: list[int] = field(default_factory=list)
    """Ids of the template after that turn."""
    added: list[int] = field(default_factory=list)
    """Ids of the new messages after these."""
    room: int = 0
    """The most tokens that its row has left for the turn."""


@dataclass(eq=False)
class _UserTurn:
    turn: Turn
    question: UserQuestion
    made: Generation
    text: str | None = None
    """Its words, as a message of the next question has them; None: nobody got them."""


class UserRows:
    """The user's turns of one conversation.

    Args:
        outcome: The conversation; the turns are noted in it.
        limits: Limits of a row.
        sampling: Sampling parameters of the conversation: both speakers sample alike.
    """

    def __init__(self, outcome: Outcome, limits: Limits, sampling: Mapping[str, Any]) -> None:
        self.sampling = sampling
        self._outcome = outcome
        self._limits = limits
        self._spoken: list[_UserTurn] = []
        self._lanes: set[int] = set()
        self._closed = False

    async def question(self, messages: list[Message], codec: ChatCodec) -> UserQuestion:
        """Return the question with these messages: the ids that go on from the turn before, or all of them.

        Args:
            messages: The messages, the persona first.
            codec: Renders them.
        """
        before, trusted = self._before(messages), await codec.render(codec.trusted, messages)
        if before is not None:
            asked = before.question
            ids = [*asked.ids, *before.made.ids]
            said: list[Message] = [*asked.messages, {"role": "assistant", "content": before.text or ""}]
            increment = await codec.render(codec.observation, said, trusted[len(said) :], ids, [])
            used = len(ids) - self._begin(before)
            if self._limits.fits_observation(used, len(increment)):
                whole = [*ids, *increment.separator, *increment.observation]
                room = self._limits.response_length - used - len(increment)
                return UserQuestion(messages, whole, trusted, before, increment.separator, increment.observation, room)
        ids = await codec.render(codec.initial, trusted, [])
        return UserQuestion(messages, list(ids), trusted, room=self._limits.response_length)

    def _before(self, messages: Sequence[Message]) -> _UserTurn | None:
        """Return the turn from which messages go on; note a turn that nobody got, since its question came again."""
        last = self._spoken[-1] if self._spoken else None
        if last is not None and last.question.messages == messages and self._outcome.turns[-1] is last.turn:
            last.text, last = None, last.question.before
        if last is None or last.text is None or last.made.finish != "stop":
            return None
        known = len(last.question.messages)
        goes_on = len(messages) > known + 1 and messages[:known] == last.question.messages
        return last if goes_on and messages[known] == {"role": "assistant", "content": last.text} else None

    def _begin(self, last: _UserTurn) -> int:
        """Return the length of the prompt of a turn's row."""
        question = last.question
        while question.before is not None:
            question = question.before.question
        return len(question.ids)

    async def ask(
        self, engine: ReceiptKeeper, question: UserQuestion, budget: int, stop_ids: Sequence[int]
    ) -> Generation:
        """Let the engine answer a question, and note its turn with the receipt.

        Args:
            engine: Samples the tokens.
            question: The question.
            budget: The most tokens that may be sampled.
            stop_ids: Token ids that end a turn.

        Raises:
            CancelledError: The task was cancelled meanwhile.
            EngineError: The engine failed, or the tokens cannot be trained.
        """
        # One lane, in which the engine finds the questions before; others only for questions at the same time.
        number = min({*range(len(self._lanes) + 1)} - self._lanes)
        lane = f"{self._outcome.request_id}.user{number}"
        asked, started = {"stop_token_ids": list(stop_ids), **self.sampling}, time.perf_counter()
        self._lanes.add(number)
        try:
            with during("generation") as span:
                ask = Ask(lane, question.ids, asked, budget, messages=question.trusted, role=USER)
                sampled = await sample(engine, ask)
                span.turn = len(self._outcome.turns)
        finally:
            self._lanes.remove(number)
            receipts = engine.take(lane)
        made = sampled.generation
        if not self._closed:
            outcome, before = self._outcome, question.before
            turn = Turn(
                len(outcome.turns),
                parent=None if before is None else before.turn.number,
                role=USER,
                place="invalid" if sampled.fault or made.finish == "abort" else "undelivered",
                seconds=time.perf_counter() - started,
                finish=made.finish,
                cached=made.cached,
            )
            outcome.turns.append(turn)
            outcome.user_receipts[turn.number] = receipts[0]
            self._spoken.append(_UserTurn(turn, question, made))
        return sampled.whole()

    def read(self, question: UserQuestion, said: AssistantTurn) -> None:
        """Note the words of the turn that answers a question.

        Args:
            question: The question.
            said: The turn, as the parser read it.
        """
        for each in self._spoken:
            if each.question is question and not self._closed:
                each.turn.said, each.text = said, spoken({"content": said.content})

    def note_recorded(
        self, turn: Turn, receipt: Any, made: Generation, ids: Sequence[int], template: int, text: str | None
    ) -> None:
        """Note a turn of a record in the place of one that the engine is asked for, as a replay does.

        Args:
            turn: The turn.
            receipt: Its receipt.
            made: Its tokens.
            ids: All ids that the engine was given; of a turn that is in no row they are not needed.
            template: How many of the ids after the turn before, from which it goes on, are the template's.
            text: Its words; None: it is in no row.
        """
        before = next((each for each in self._spoken if each.turn.number == turn.parent), None)
        known = 0 if before is None else len(before.question.ids) + len(before.made.ids)
        new = list(ids[known:])
        question = UserQuestion([], list(ids), [], before, new[:template], new[template:])
        self._outcome.turns.append(turn)
        self._outcome.user_receipts[turn.number] = receipt
        self._spoken.append(_UserTurn(turn, question, made, text))

    def close(self) -> None:
        """Note no more turns: those that come later belong to nobody."""
        self._closed = True

    def finish(self) -> None:
        """Write the rows in front of the assistant's, when the conversation is over.

        Without a token of the assistant's there is nothing to train.
        """
        outcome = self._outcome
        rows: list[Trajectory] = []
        speaks = any(any(row.trajectory.mask) for row in outcome.rows)
        for each in self._spoken:
            turn, question = each.turn, each.question
            if each.text is None:
                continue
            if not speaks:
                turn.place = "invalid"
                continue
            if (before := question.before) is not None and not _is_open(before.turn, rows):
                question.before = turn.parent = None
            if self._begin(each) > self._limits.prompt_length:
                turn.place = "dropped_row"
                continue
            if question.before is None:
                rows.append(Trajectory())
                rows[-1].append_prompt(question.ids)
                turn.place = len(rows) - 1
            else:
                turn.place = question.before.turn.place
                assert isinstance(turn.place, int)
                rows[turn.place].append_context(question.template, Source.TEMPLATE)
                rows[turn.place].append_context(question.added, Source.OBSERVATION)
            row = rows[turn.place]
            turn.start = row.response_length
            row.append_sampled(each.made.ids, each.made.logprobs, each.made.versions)
            turn.end = row.response_length
        for turn in outcome.turns:
            if turn.role != USER and isinstance(turn.place, int):
                turn.place += len(rows)
        for row in rows:
            row.seal(outcome.stop_reason)
        outcome.rows[:0] = [ConversationRow(row, []) for row in rows]
        outcome.user_rows = len(rows)


def _is_open(turn: Turn, rows: Sequence[Trajectory]) -> bool:
    """Return whether another turn can follow a turn where that is, because nothing did yet.

    Questions at the same time may all go on from one turn, or from one whose own question came again meanwhile.
    """
    place = turn.place
    return place == "dropped_row" if isinstance(place, str) else rows[place].response_length == turn.end


_speaking: ContextVar[UserRows | None] = ContextVar("user_rows", default=None)


@asynccontextmanager
async def speaking(rows: UserRows | None) -> AsyncIterator[None]:
    """Let interactions of the running conversation speak as its user, until the block ends.

    Args:
        rows: Where their turns go; None: they are not trained, also where an outer conversation trains them.
    """
    token = _speaking.set(rows)
    try:
        yield
    finally:
        _speaking.reset(token)
        if rows is not None:
            rows.close()


def current_user() -> UserRows | None:
    """Return where the user's turns of the running conversation go; None: they are not trained."""
    return _speaking.get()
