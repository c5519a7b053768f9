"""`PolicyText`: the model that is being trained, as an interaction may use it; its text is never trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.turns import HEADER, CallParser
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Engine
from verl_multiturn.rollout.engines.sample import sample


class PolicyText:
    """A writer of single turns. It is a `PolicyModel` of the interactions.

    Args:
        engine: Samples the tokens. It must keep no receipts, since these tokens belong to no row.
        codec: Renders messages to token ids.
        parser: Reads the turn, so that reasoning is omitted where the format knows it.
        stop_ids: Token ids that end a turn.
    """

    def __init__(self, engine: Engine, codec: ChatCodec, parser: CallParser, stop_ids: Sequence[int]) -> None:
        self._engine = engine
        self._codec = codec
        self._parser = parser
        self._stop_ids = list(stop_ids)

    async def write(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, sampling: Mapping[str, Any]) -> str:
        """Return the model's next turn as text, as `PolicyModel.write` describes."""
        codec = self._codec
        trusted = await codec.render(codec.trusted, [dict(message) for message in messages])
        ids = await codec.render(codec.initial, trusted, [])
        asked = {**sampling, "stop_token_ids": self._stop_ids}
        sampled = await sample(self._engine, Ask(uuid4().hex, ids, asked, max_tokens, messages=trusted))
        if sampled.cancelled is not None:
            raise sampled.cancelled
        generation = sampled.generation  # it is never trained, so its log-probabilities may be anything
        if not generation.ids or generation.finish == "abort":
            raise EngineError("the engine returned no turn")
        turn = await self._parser.parse(generation.ids, [], 0, ids[-HEADER:])
        return turn.content
