"""The layers below the receipts: a fault here would be in a row and in its receipts alike, unseen.

Each of the three layers passes its request on unchanged, and returns a beginning of its answer: ids, logprobs and
versions of the same tokens.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn import Ask, EngineError, Generation
from verl_multiturn.chat.images import Vision
from verl_multiturn.chat.tir import STOP_PATTERN
from verl_multiturn.rollout.engines.stop_texts import STOP_REGEX, PlaceholderGuard, StopTexts
from verl_multiturn.verl_bridge.servers.verl_engine import VerlEngine

pytestmark = pytest.mark.stack

# Text of each id; the ids are positions in this list.
STOPS = {STOP_REGEX: [STOP_PATTERN]}
TEXTS = ["x", "\n", "```", "out", "put", "```output", "`", "<image>", "<im", "age>", "A\n```outputB", " "]
IMAGE, FILM = 20, 21


class Tokenizer:
    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        return "".join({IMAGE: "<|img|>", FILM: "<|film|>"}.get(i) or TEXTS[i] for i in token_ids)


class Given:
    """An engine that returns given ids with numbers that are all different, and remembers its requests."""

    def __init__(self, ids: Sequence[int], finish: Any = "length") -> None:
        count = len(ids)
        self.generation = Generation(
            list(ids), [-0.5 - i for i in range(count)], [100 + i for i in range(count)], finish, cached=1
        )
        self.asked: list[Ask] = []

    async def generate(self, ask: Ask) -> Generation:
        self.asked.append(ask)
        return self.generation


def check_beginning(made: Generation, whole: Generation, count: int) -> None:
    assert (made.ids, made.logprobs, made.versions) == (
        whole.ids[:count],
        whole.logprobs[:count],
        whole.versions[:count],
    )
    assert made.cached == whole.cached


def first(ids: Sequence[int], condition: Any) -> int | None:
    """Return the fewest tokens for which the condition holds, found by trying all numbers."""
    return next((n for n in range(1, len(ids) + 1) if condition(Tokenizer().decode(ids[:n]))), None)


def marked(text: str) -> bool:
    return text.startswith("```output") or "\n```output" in text


@given(ids=st.lists(st.integers(0, len(TEXTS) - 1), max_size=12), finish=st.sampled_from(["stop", "length", "abort"]))
async def test_the_marker_ends_a_generation_and_changes_nothing_before_it(ids: list[int], finish: str) -> None:
    engine = Given(ids, finish)
    made = await StopTexts(engine, Tokenizer()).generate(Ask("r", [1, 2], STOPS, 7))  # type: ignore[arg-type]
    end = first(ids, marked)
    check_beginning(made, engine.generation, len(ids) if end is None else end)
    assert made.finish == (finish if end is None else "stop")
    assert engine.asked == [Ask("r", [1, 2], STOPS, 7)]


@given(
    ids=st.lists(st.sampled_from([*range(len(TEXTS)), IMAGE, FILM]), max_size=12),
    finish=st.sampled_from(["stop", "length"]),
)
async def test_a_placeholder_ends_a_generation_before_it(ids: list[int], finish: str) -> None:
    engine = Given(ids, finish)
    vision = Vision(IMAGE, [FILM], ["<image>"], Tokenizer().decode)
    tokens = next((n for n, token in enumerate(ids) if token in (IMAGE, FILM)), len(ids))
    spelled = first(ids[:tokens], lambda text: "<image>" in text)
    end = tokens if spelled is None else spelled - 1
    guard = PlaceholderGuard(engine, vision)
    if ids and not end:
        with pytest.raises(EngineError, match="begins with an image placeholder"):
            await guard.generate(Ask("r", [1, 2], {}, 7))
        return
    made = await guard.generate(Ask("r", [1, 2], {"top_p": 0.5}, 7, images=["a"]))
    check_beginning(made, engine.generation, end)
    assert made.finish == (finish if end == len(ids) else "abort")
    assert engine.asked == [Ask("r", [1, 2], {"top_p": 0.5}, 7, ["a"])]


@pytest.mark.parametrize("images", [[], ["a", "b"]])
async def test_images_go_through_both(images: list[str]) -> None:
    engine = Given([0])
    vision = Vision(IMAGE, [FILM], ["<image>"], Tokenizer().decode)
    for layer in (StopTexts(engine, Tokenizer()), PlaceholderGuard(engine, vision)):  # type: ignore[arg-type]
        await layer.generate(Ask("r", [1], {}, 7, images=images))
    assert [ask.images for ask in engine.asked] == [images] * 2


class Client:
    """The part of verl's client that generates."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.asked: list[dict[str, Any]] = []

    async def generate(self, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        return self.output


@given(
    count=st.integers(0, 6),
    reason=st.sampled_from(["stop", "completed", "length", "abort", "aborted", "error", None]),
    versions=st.sampled_from([{}, {"global_steps": 4}, {"min_global_steps": 3, "max_global_steps": 5}]),
)
async def test_verls_tokens_become_a_generation(count: int, reason: str | None, versions: dict[str, int]) -> None:
    ids, logprobs = [10 + i for i in range(count)], [-0.5 - i for i in range(count)]
    client = Client(SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason=reason, extra_fields=versions))
    prompt, sampling = [1, 2, 3], {"temperature": 0.5, "stop_token_ids": [7]}
    made = await VerlEngine(client.generate).generate(Ask("r", prompt, sampling, 9))
    assert (made.ids, made.logprobs) == (ids, logprobs)
    oldest = {0: -1, 1: 4, 2: 3}[len(versions)]
    assert made.versions == ([oldest] * (count - 1) + [{0: -1, 1: 4, 2: 5}[len(versions)]] if count else [])
    assert made.finish == {"stop": "stop", "completed": "stop", "length": "length"}.get(reason or "", "abort")
    (asked,) = client.asked
    assert asked == {
        "request_id": "r",
        "prompt_ids": prompt,
        "sampling_params": {**sampling, "logprobs": True, "max_new_tokens": 9},
    }
    # The lists must be copies: a server in this process may keep or change the lists that it gets.
    assert asked["prompt_ids"] is not prompt
    assert (made.ids is not ids, made.logprobs is not logprobs) == (True, True)
    assert sampling == {"temperature": 0.5, "stop_token_ids": [7]}


async def test_verl_is_given_images_where_there_are_some() -> None:
    client = Client(SimpleNamespace(token_ids=[5], log_probs=[-1.0], stop_reason="stop", extra_fields={}))
    await VerlEngine(client.generate).generate(Ask("r", [1], {}, 9, images=("a", "b")))
    assert client.asked[0]["image_data"] == ["a", "b"]


@pytest.mark.parametrize("logprobs", [[], None, [-1.0], [-1.0, -2.0, -3.0]])
async def test_logprobs_that_are_not_one_for_each_token(logprobs: list[float] | None) -> None:
    client = Client(SimpleNamespace(token_ids=[5, 6], log_probs=logprobs, stop_reason="stop", extra_fields={}))
    with pytest.raises(EngineError, match=f"2 ids came with {len(logprobs or [])} logprobs"):
        await VerlEngine(client.generate).generate(Ask("r", [1], {}, 9))
