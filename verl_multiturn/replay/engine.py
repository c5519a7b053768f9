"""`ReplayEngine`: engine, tools and users of replayed conversations, whose answers are those of the records.

    Conversation ─→ ReceiptingEngine ─→ Stage ─→ the next recorded generation
         │                                └─ other ids or another budget: DivergedError, the end of its replay
         └─→ RecordedToolSession, RecordedInteractionSession ─→ the recorded answers

It reads records as plain dictionaries (`records/schema.py`).

Invariants:
- a generation is given out at most once, and in the recorded order;
- nothing waits: where the clock of a recorded conversation ran out, it runs out at once (`clock.run_out`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from verl_multiturn.config import USER
from verl_multiturn.errors import EngineError
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession
from verl_multiturn.replay.calls import DivergedError, Recording, ReplayDifference
from verl_multiturn.replay.interactions import RecordedInteractionSession
from verl_multiturn.replay.tools import RecordedToolSession
from verl_multiturn.rollout.engines.protocol import Ask, Generation, cut
from verl_multiturn.rollout.life import expire, run_out
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.trajectory import Source
from verl_multiturn.tools.running.session import ToolSession


@dataclass(frozen=True)
class RecordedGeneration:
    """A generation, and the request that it answered."""

    number: int
    made: Generation
    prompt_tokens: int
    prompt_digest: str
    max_tokens: int
    prompt: Sequence[int] | None
    """The ids that the engine was given; None where no row begins with them."""
    was_read: bool
    """Whether the conversation read it; else it was cut off, or not delivered."""

    def difference(self, ask: Ask) -> ReplayDifference | None:
        """Return how a question differs from the recorded one: in its ids, else in its budget; None: it is the same."""
        ids, n = ask.ids, self.number
        if self.prompt is not None:
            if len(ids) != len(self.prompt) or list(ids) != self.prompt:
                at = first_difference(self.prompt, ids)
                old, new = (each[at] if at < len(each) else None for each in (self.prompt, ids))
                return ReplayDifference(n, "generations.prompt", at, old, new)
        elif len(ids) != self.prompt_tokens:
            return ReplayDifference(
                n, "generations.prompt_tokens", min(len(ids), self.prompt_tokens), self.prompt_tokens, len(ids)
            )
        elif (digest := digest_of(ids)) != self.prompt_digest:
            return ReplayDifference(n, "generations.prompt_digest", None, self.prompt_digest, digest)
        if ask.max_new_tokens != self.max_tokens:
            return ReplayDifference(n, "generations.max_tokens", None, self.max_tokens, ask.max_new_tokens)
        return None


def digest_of(ids: Sequence[int]) -> str:
    """Return the digest of ids as a receipt has it."""
    return hashlib.blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=16).hexdigest()


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first position at which two sequences differ; where one begins the other, its length."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def generations_of(record: Mapping[str, Any]) -> list[RecordedGeneration]:
    """Return the generations of a record, in order."""
    rows = [_Columns(row) for row in record["rows"]]
    return [_generation(number, each, rows) for number, each in enumerate(record["generations"])]


class _Columns:
    """The columns of a recorded row that a generation is taken from."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.ids: list[int] = row["ids"]
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        given = iter(row["logprobs"])
        for count, _, version, _, source in row["runs"]:
            self.versions += [version] * count
            self.logprobs += [float(next(given)) if source == Source.SAMPLED else 0.0 for _ in range(count)]


def _generation(number: int, raw: Mapping[str, Any], rows: Sequence[_Columns]) -> RecordedGeneration:
    row, start = raw.get("row"), raw.get("start")
    prompt = None
    if row is not None and start is not None:
        prompt = rows[row].ids[:start]
        prompt = prompt if len(prompt) == raw["prompt_tokens"] else None
    if raw.get("ids") is not None:
        ids = list(raw["ids"])
        logprobs = [float(each) for each in raw.get("logprobs") or ()]
        versions = [version for count, version in raw.get("versions") or () for _ in range(count)]
    else:
        assert row is not None
        assert start is not None
        part = slice(start, start + raw["tokens"])
        held = rows[row]
        ids, logprobs, versions = held.ids[part], held.logprobs[part], held.versions[part]
    made = Generation(ids, logprobs, versions, raw["finish"] or "stop", raw.get("cached_tokens"))
    return RecordedGeneration(
        number,
        made,
        raw["prompt_tokens"],
        raw["prompt_digest"],
        raw["max_tokens"],
        prompt,
        raw.get("text") is not None,
    )


class RecordedEngine(Protocol):
    """The engine's generations in one conversation or session."""

    async def answer(self, ask: Ask) -> Generation:
        """Return the generation that answers a question.

        Raises:
            DivergedError: The record holds none that answers this.
            EngineError: The engine failed there.
        """
        ...


class RecordedTurns:
    """The engine's generations in one conversation, turn after turn.

    Args:
        record: The record.
        is_changed: Whether the replay has other settings than the run had. Then another budget is a difference only
            where it would have changed the turn.
    """

    def __init__(self, record: Mapping[str, Any], is_changed: bool = False) -> None:
        self._generations = generations_of(record)
        self._record = record
        self._is_changed = is_changed
        self.asked = 0
        """Generations that were given out."""

    @property
    def left(self) -> int:
        """Return the number of generations that were not requested."""
        return len(self._generations) - self.asked

    def user_turns(self) -> Sequence[int]:
        """Return the numbers of the generations that come next and are a trained user's, and pass over them."""
        first, recorded = self.asked, self._record["generations"]
        while self._record.get("trained") and self.left and recorded[self.asked]["role"] == USER:
            self.asked += 1
        return range(first, self.asked)

    async def answer(self, ask: Ask) -> Generation:
        """Return the next generation.

        Raises:
            DivergedError: The record holds none that answers this.
            EngineError: The engine failed there.
        """
        record, number = self._record, self.asked
        is_late = record.get("time_up") == "generate"
        if number == len(self._generations):
            if record["stop_reason"] == StopReason.ENGINE_ERROR:  # the time may have been up later, while it ended
                raise EngineError(record["error"])
            if record.get("time_up") is not None:
                await run_out()
            raise DivergedError(
                ReplayDifference(number, "generations", None, f"{number} turns", "one more is asked for")
            )
        recorded = self._generations[number]
        difference = recorded.difference(ask)
        if difference is not None and not (self._is_changed and difference.field == "generations.max_tokens"):
            raise DivergedError(difference)
        self.asked += 1
        made = recorded.made
        if difference is not None:
            made = within(made, ask, difference)
        if is_late and self.left == 0 and not recorded.was_read:
            try:
                await run_out()
            except asyncio.CancelledError:
                return made  # the tokens that the engine had sampled by then
        return made


def within(made: Generation, ask: Ask, difference: ReplayDifference) -> Generation:
    """Return a generation under another budget than its own.

    Raises:
        DivergedError: It would have been another one.
    """
    if len(made.ids) > ask.max_new_tokens:
        raise DivergedError(difference._replace(now=f"{ask.max_new_tokens}, where the turn has {len(made.ids)}"))
    if made.finish == "length":
        raise DivergedError(difference)
    return cut(made, len(made.ids), made.finish)


@dataclass
class _ReplayState:
    """A conversation that is being replayed."""

    record: Mapping[str, Any]
    outcome: Outcome
    script: RecordedEngine


class ReplayEngine:
    """The engine, the tools and the interactions of conversations that are replayed, each by its request id.

    It is an `Engine`, and `make_tools` and `make_user` are those of a `Conversation`.

    Args:
        is_live: Whether tools and interactions run again, and the engine alone is the record's.
    """

    def __init__(self, is_live: bool = False) -> None:
        self._played: dict[str, _ReplayState] = {}
        self.is_live = is_live

    def begin(self, record: Mapping[str, Any], outcome: Outcome, script: RecordedEngine) -> None:
        """Begin a conversation, before its first question.

        Args:
            record: Its record.
            outcome: Its result.
            script: The engine's generations in it.
        """
        self._played[outcome.request_id] = _ReplayState(record, outcome, script)

    def end(self, request_id: str) -> None:
        """Forget a conversation."""
        self._played.pop(request_id, None)

    async def generate(self, ask: Ask) -> Generation:
        """Return the engine's generation from the script; a session's lanes are called `<id>.<number>`."""
        played = self._played.get(ask.request_id) or self._played[ask.request_id.rpartition(".")[0]]
        return await played.script.answer(ask)

    def make_tools(self, instance_id: str, *args: Any, **kwargs: Any) -> ToolSession:
        """Make the tools' session of a conversation."""
        if self.is_live:
            return ToolSession(instance_id, *args, **kwargs)
        return RecordedToolSession(self._recording(instance_id), instance_id, *args, **kwargs)

    def make_user(self, gate: InteractionGate, instance_id: str, *args: Any, **kwargs: Any) -> InteractionSession:
        """Make the interaction's session of a conversation."""
        if self.is_live:
            return InteractionSession(gate, instance_id, *args, **kwargs)
        return RecordedInteractionSession(self._recording(instance_id), gate, instance_id, *args, **kwargs)

    def _recording(self, instance_id: str) -> Recording:
        played = self._played[instance_id]

        def progress() -> tuple[int, int]:
            outcome = played.outcome
            return len(outcome.turns), sum(len(row.trajectory) for row in outcome.rows)

        script = played.script
        user_turns = script.user_turns if isinstance(script, RecordedTurns) else tuple
        return Recording(played.record, progress, expire, run_out, image_of, user_turns)


def image_of(raw: Mapping[str, Any]) -> Any:
    """Return the replacement of a record's image: one of its size and of one color, which its digest draws."""
    from PIL import Image

    return Image.new("RGB", tuple(raw["size"]), tuple(bytes.fromhex(raw["digest"])[:3]))


def with_images(value: Any) -> Any:
    """Return a message or a part of one with images in the place of their digests."""
    if isinstance(value, Mapping):
        if value.keys() == {"digest", "size"}:
            return image_of(value)
        return {key: with_images(item) for key, item in value.items()}
    return [with_images(item) for item in value] if isinstance(value, list) else value
