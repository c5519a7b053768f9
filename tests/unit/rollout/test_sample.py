"""One request to an engine: its answer, why it cannot be trained, and which error goes first."""

import asyncio
import contextlib
from typing import Any

import pytest

from verl_multiturn import Ask, EngineError, Generation
from verl_multiturn.rollout.engines.sample import sample

ASK = Ask("r", [1, 2], {}, 3)


class Engine:
    """An engine that returns a generation, at once or when it is cancelled; or raises."""

    def __init__(self, returned: Generation | BaseException, waits: bool = False) -> None:
        self.returned, self.waits = returned, waits
        self.started = asyncio.Event()

    async def generate(self, ask: Ask) -> Generation:
        assert ask is ASK
        self.started.set()
        if self.waits:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        if isinstance(self.returned, BaseException):
            raise self.returned
        return self.returned


def made(**changes: Any) -> Generation:
    return Generation(**{"ids": [5, 6], "logprobs": [-0.5, -1.0], "versions": [0, 0], "finish": "stop", **changes})


async def test_a_sound_generation_is_returned_as_it_came() -> None:
    sampled = await sample(Engine(made()), ASK)
    assert (sampled.fault, sampled.cancelled) == ("", None)
    assert sampled.whole() is sampled.generation


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"ids": [], "logprobs": [], "versions": []}, "returned 0 tokens, where 1 to 3 were asked for"),
        ({"ids": [5] * 4}, "returned 4 tokens, where 1 to 3 were asked for"),
        ({"versions": [0]}, "what is not a generation: one logprob and one version per sampled token"),
        ({"logprobs": [-0.5, 0.5]}, "what is not a generation: logprob 0.5 of sampled token 1 is no log-probability"),
        ({"logprobs": [-1e39, -0.5]}, "logprob -1e[+]39 of sampled token 0"),
    ],
)
async def test_what_cannot_be_trained_is_returned_with_its_fault(changes: dict[str, Any], fault: str) -> None:
    sampled = await sample(Engine(made(**changes, finish="abort")), ASK)
    with pytest.raises(EngineError, match=fault):
        sampled.whole()
    assert sampled.generation.ids == made(**changes).ids


async def test_tokens_that_were_cut_off_are_there_all_the_same() -> None:
    sampled = await sample(Engine(made(finish="abort")), ASK)
    assert (sampled.fault, sampled.generation.ids) == ("", [5, 6])
    with pytest.raises(EngineError, match="cut off by the engine"):
        sampled.whole()


@pytest.mark.parametrize("returned", [made(), made(finish="abort"), made(ids=[])])
async def test_a_cancellation_goes_before_what_is_wrong_with_the_tokens(returned: Generation) -> None:
    engine = Engine(returned, waits=True)
    asking = asyncio.ensure_future(sample(engine, ASK))
    await engine.started.wait()
    asking.cancel()
    sampled = await asking
    assert sampled.generation is returned
    with pytest.raises(asyncio.CancelledError):
        sampled.whole()


async def test_a_cancelled_engine_that_fails_leaves_the_cancellation() -> None:
    engine = Engine(EngineError("gone"), waits=True)
    asking = asyncio.ensure_future(sample(engine, ASK))
    await engine.started.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize(
    ("raised", "said"), [(EngineError("gone"), "gone"), (asyncio.CancelledError(), "the engine cancelled")]
)
async def test_an_engine_that_fails_or_cancels_itself(raised: BaseException, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        await sample(Engine(raised), ASK)
