"""Engines that cut the sample of another one: at a text (`StopTexts`), or before an image (`PlaceholderGuard`)."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from verl_multiturn.chat.images import Vision
from verl_multiturn.chat.parsing.turns import ParserTokenizer
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Engine, Generation, cut

STOP_REGEX = "stop_regex"
"""The engine's name for a list of regular expressions at which it stops."""


class StopTexts:
    """An `Engine` that ends another engine's generation at the first match of the sampling parameter `stop_regex`.

    The engine looks for it, too, and most often it stops there. It may go on all the same: an engine that resumes an
    interrupted generation looks at the new tokens only, and speculative decoding accepts several tokens at once. The
    beginning of a sample is itself a sample, with the same probability, so the tokens after the match can be omitted.
    This class is below the receipts: the tokens that it cuts off were never part of the conversation.

    Args:
        engine: Samples the tokens.
        tokenizer: Decodes them.
    """

    def __init__(self, engine: Engine, tokenizer: ParserTokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def generate(self, ask: Ask) -> Generation:
        """Sample tokens as `Engine.generate` does, up to the first match.

        With a match in the sample, the finish is `stop`, whatever else ended the generation.
        """
        generation = await self._engine.generate(ask)
        patterns = ask.sampling.get(STOP_REGEX)
        if not patterns:
            return generation
        stop = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        try:
            end = self._end(generation.ids, stop)
        except (TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"the engine returned what is not a generation: {error}") from error
        if end is None:
            return generation
        return cut(generation, end, "stop")

    def _end(self, ids: Sequence[int], stop: re.Pattern[str]) -> int | None:
        """Return the number of tokens up to the one that completes the first match; None without a match."""

        def matches(length: int) -> bool:
            return stop.search(self._tokenizer.decode(list(ids[:length]))) is not None

        if not matches(len(ids)):
            return None
        if not matches(len(ids) - 1):
            return len(ids)
        return bisect_left(range(len(ids)), True, key=matches)


class PlaceholderGuard:
    """An `Engine` that ends another engine's turn before the first image placeholder that the model writes.

    This class is below the receipts: the tokens that it cuts off were never part of the conversation.

    Args:
        engine: Samples the tokens.
        vision: The model's placeholder tokens.
    """

    def __init__(self, engine: Engine, vision: Vision) -> None:
        self._engine = engine
        self._vision = vision

    async def generate(self, ask: Ask) -> Generation:
        """Sample tokens as `Engine.generate` does. A turn that was cut has the finish `abort`.

        Raises:
            EngineError: The turn begins with a placeholder, or the engine cannot return a generation.
        """
        generation = await self._engine.generate(ask)
        end = self._vision.usable(generation.ids)
        if end == len(generation.ids):
            return generation
        if not end:
            raise EngineError("the model's turn begins with an image placeholder")
        return cut(generation, end, "abort")
