"""Engines that cut the sample of another one: at a text or box (`StopTexts`), before an image (`PlaceholderGuard`)."""

from __future__ import annotations

import asyncio
import itertools
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from verl_multiturn.chat.boxes import BOX_CLOSES, BOX_OPENS, first_box
from verl_multiturn.chat.images import Vision
from verl_multiturn.chat.parsing.turns import ParserTokenizer
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Engine, Generation, cut

STOP_REGEX = "stop_regex"
"""The engine's name for a list of regular expressions at which it stops."""


_MOST_STOPS = 16
"""Stops within a turn, after which the engine stops at braces no more."""


class StopTexts:
    r"""An `Engine` that ends another engine's generation at the first match of the sampling parameter `stop_regex`.

    The engine looks for it, too, and most often it stops there. It may go on all the same: an engine that resumes an
    interrupted generation looks at the new tokens only, and speculative decoding accepts several tokens at once. The
    beginning of a sample is itself a sample, with the same probability, so the tokens after the match can be omitted.
    This class is below the receipts: the tokens that it cuts off were never part of the conversation.

    With `boxes` a generation also ends where its first box is closed (`chat/boxes.py`). No regular expression knows
    balanced braces, or code. So the engine stops where a box begins, and then at each closing brace. Unless the box is
    closed there, it goes on behind the tokens that it has sampled:

        … is \boxed{ | \frac{1} | {2} | }          it goes on three times, and nothing is sampled in vain

    Args:
        engine: Samples the tokens.
        tokenizer: Decodes them.
        boxes: Whether a closed box ends a generation.
    """

    def __init__(self, engine: Engine, tokenizer: ParserTokenizer, boxes: bool = False) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._boxes = boxes

    async def generate(self, ask: Ask) -> Generation:
        """Sample tokens as `Engine.generate` does, up to the first match.

        With a match in the sample, the finish is `stop`, whatever else ended the generation.
        """
        patterns = list(ask.sampling.get(STOP_REGEX) or ())
        if not patterns and not self._boxes:
            return await self._engine.generate(ask)
        stop = re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None
        made: Generation | None = None
        for stops in itertools.count():
            hints = [self._brace(made)] if self._boxes and stops < _MOST_STOPS else []
            asked = _behind(ask, made, [*patterns, *hints])
            try:
                part = await self._engine.generate(asked)
            except asyncio.CancelledError:
                if made is None:
                    raise
                return replace(made, finish="abort")
            try:
                made = part if made is None else _joined(made, part)
                if (end := self._end(made.ids, stop)) is not None:
                    return cut(made, end, "stop")
                if not self._boxes or not self._stopped_early(asked, part):
                    return made
                if len(part.ids) >= asked.max_new_tokens:
                    return replace(made, finish="length")
            except (TypeError, ValueError, OverflowError) as error:
                raise EngineError(f"the engine returned what is not a generation: {error}") from error
        raise AssertionError("the loop has no end of its own")

    def _brace(self, made: Generation | None) -> str:
        """Return the regular expression of the brace at which the box of a turn may begin, or end."""
        is_open = made is not None and first_box(self._tokenizer.decode(list(made.ids))).is_open
        return BOX_CLOSES if is_open else BOX_OPENS

    def _stopped_early(self, asked: Ask, part: Generation) -> bool:
        """Return whether the engine ended a part at a pattern, which the whole turn has no match for, not with it."""
        if part.finish != "stop" or not part.ids or part.ids[-1] in (asked.sampling.get("stop_token_ids") or ()):
            return False
        text = self._tokenizer.decode(list(part.ids))
        return any(re.search(pattern, text) for pattern in asked.sampling.get(STOP_REGEX) or ())

    def _end(self, ids: Sequence[int], stop: re.Pattern[str] | None) -> int | None:
        """Return the number of tokens up to the one that completes the first match; None without a match."""

        def matches(length: int) -> bool:
            text = self._tokenizer.decode(list(ids[:length]))
            is_boxed = self._boxes and first_box(text).end is not None
            return is_boxed or (stop is not None and stop.search(text) is not None)

        if not matches(len(ids)):
            return None
        if not matches(len(ids) - 1):
            return len(ids)
        return bisect_left(range(len(ids)), True, key=matches)


def _behind(ask: Ask, made: Generation | None, patterns: Sequence[str]) -> Ask:
    """Return the question for the tokens behind those of a turn that are sampled already."""
    sampling = {**ask.sampling, STOP_REGEX: list(patterns)} if patterns else ask.sampling
    if made is None:
        return replace(ask, sampling=sampling)
    return replace(ask, ids=[*ask.ids, *made.ids], sampling=sampling, max_new_tokens=ask.max_new_tokens - len(made.ids))


def _joined(made: Generation, part: Generation) -> Generation:
    """Return the parts of a turn as one generation."""
    return replace(
        part,
        ids=[*made.ids, *part.ids],
        logprobs=[*made.logprobs, *part.logprobs],
        versions=[*made.versions, *part.versions],
        cached=made.cached,  # the tokens before the turn, as for a turn in one part
        held_s=made.held_s + part.held_s,
        led_s=made.led_s + part.led_s,
    )


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
