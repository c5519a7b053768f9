"""`sample`: one question to an engine. It serves all who want tokens: conversations, sessions of agents, `PolicyText`.

The first two note the result, since the engine has a receipt for it, and then call `SamplingResult.whole`. The last
one, whose tokens are never trained, needs only a text.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from verl_multiturn.calls.tasks import ended
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Engine, Generation
from verl_multiturn.rollout.trajectory import flaw


@dataclass(frozen=True)
class SamplingResult:
    """The result of an `Ask`, be it sound or not."""

    generation: Generation
    fault: str
    """Why its tokens cannot be trained, whatever end it reports; "" if they can."""
    cancelled: asyncio.CancelledError | None
    """The cancellation that came while the engine sampled; its tokens are there all the same."""

    def whole(self) -> Generation:
        """Return the generation, if it is one that a conversation can go on from.

        Raises:
            CancelledError: The task was cancelled meanwhile.
            EngineError: The tokens cannot be trained, or the engine cut them off.
        """
        if self.cancelled is not None:
            raise self.cancelled
        if self.fault:
            raise EngineError(self.fault)
        if self.generation.finish == "abort":
            raise EngineError("cut off by the engine")
        return self.generation


async def sample(engine: Engine, ask: Ask) -> SamplingResult:
    """Ask an engine, and check its result.

    A cancellation is passed on to the engine, whose end is waited for.

    Raises:
        CancelledError: The task was cancelled, and the engine returned nothing.
        EngineError: The engine failed, or cancelled the generation by itself.
    """
    generating = asyncio.ensure_future(engine.generate(ask))
    cancelled = await ended(generating, pass_on=True)
    if generating.cancelled():
        raise cancelled or EngineError("the engine cancelled the generation")
    if (error := generating.exception()) is not None:
        raise cancelled or error
    generation = generating.result()
    return SamplingResult(generation, _fault(generation, ask.max_new_tokens), cancelled)


def _fault(generation: Generation, budget: int) -> str:
    if not 0 < len(generation.ids) <= budget:
        return f"the engine returned {len(generation.ids)} tokens, where 1 to {budget} were asked for"
    found = flaw(generation.ids, generation.logprobs, generation.versions)
    return f"the engine returned what is not a generation: {found}" if found else ""
