"""`PolicyText`: the model that is being trained, as an interaction may use it.

Its text is trained where the interaction speaks as the user, and the run trains that role (`rollout.user_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.turns import HEADER, CallParser
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Engine
from verl_multiturn.rollout.engines.sample import sample
from verl_multiturn.rollout.user_rows import ReceiptKeeper, UserRows, current_user


class PolicyText:
    """A writer of single turns. It is a `PolicyModel` of the interactions.

    Args:
        engine: Samples tokens that belong to no row. It must keep no receipts.
        codec: Renders messages to token ids.
        parser: Reads the turn, so that reasoning is omitted where the format knows it.
        stop_ids: Token ids that end a turn.
        trained: Samples the user's tokens that are trained, and keeps their receipts; None: none are trained.
        run_sampling: Sampling parameters of the run's training, for these tokens.
    """

    def __init__(
        self,
        engine: Engine,
        codec: ChatCodec,
        parser: CallParser,
        stop_ids: Sequence[int],
        trained: ReceiptKeeper | None = None,
        run_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._parser = parser
        self._stop_ids = list(stop_ids)
        self._trained = trained
        self._run_sampling = run_sampling or {}

    async def write(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, sampling: Mapping[str, Any]) -> str:
        """Return the model's next turn as text, as `PolicyModel.write` describes."""
        rows = current_user()
        if rows is not None and self._trained is not None:
            return await self._write_trained(self._trained, rows, messages, max_tokens, sampling)
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

    async def _write_trained(
        self,
        engine: ReceiptKeeper,
        rows: UserRows,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        sampling: Mapping[str, Any],
    ) -> str:
        """Return the next turn of the user of a conversation, which is trained.

        Raises:
            ConfigError: It would be sampled in another way than the run's training expects.
            EngineError: The engine failed.
        """
        for name, value in sampling.items():
            if name not in self._run_sampling or value != self._run_sampling[name]:
                known = ", ".join(f"{each}={show(own)}" for each, own in self._run_sampling.items())
                raise ConfigError(
                    f"the user is trained, and samples as the assistant does ({known}), and an interaction asks for "
                    f"{name}={show(value)}; set it to the run's, or leave it out"
                )
        question = await rows.question([dict(message) for message in messages], self._codec)
        budget = max(1, min(max_tokens, question.room))
        made = await rows.ask(engine, question, budget, self._stop_ids)
        said = await self._parser.parse(made.ids, [], 0, question.ids[-HEADER:])
        rows.read(question, said)
        return said.content
