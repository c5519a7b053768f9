"""`PlaceholderGuard`: no sampled token stands for an image."""

from __future__ import annotations

from verl_multiturn.chat.images import Vision
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engine import Ask, Engine, Generation, cut


class PlaceholderGuard:
    """An `Engine` that ends another engine's turn before the first image placeholder that the model writes.

    This class stands below the receipts: the tokens that it cuts off were never part of the conversation.

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
