r"""A closed box ends an answer in text mode: which box counts, where an engine stops, and which tokens remain."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text_mode import BLOCK, STOPS, Pieces
from verl_multiturn import Ask, EngineError, Generation
from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.boxes import first_box
from verl_multiturn.chat.tir import STOP_PATTERN
from verl_multiturn.rewards.answers import last_boxed
from verl_multiturn.rollout.engines.stop_texts import STOP_REGEX, StopTexts

OPENS, CLOSES = r"\\boxed\{", r"\}"
END = 0
NAMED = {**STOPS, "stop_token_ids": [END]}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (r"So \boxed{5}. Yes", r"So \boxed{5}"),
        (r"\boxed{\frac{1}{2}}$", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{\{1, 2\}} .", r"\boxed{\{1, 2\}}"),
        (r"\boxed{\text{a \} b}}", r"\boxed{\text{a \} b}}"),
        ("\\boxed{\n1\\\\\n2}\n", "\\boxed{\n1\\\\\n2}"),
        (r"\boxed{\boxed{}} \boxed{\boxed{ } } or \boxed{7}!", r"\boxed{\boxed{}} \boxed{\boxed{ } } or \boxed{7}"),
        (r"\boxed{} or \boxed{ } or \boxed{7}!", r"\boxed{} or \boxed{ } or \boxed{7}"),
        (r"x\\boxed{5}", r"x\\boxed{5}"),
        (r"} \boxed{5}}", r"} \boxed{5}"),
        (r"\boxed{\boxed{5}} x", r"\boxed{\boxed{5}}"),
        ("\\boxed{6\nso \\boxed{5}, no", "\\boxed{6\nso \\boxed{5}"),
        ("<think>\\boxed{5}</think>", "<think>\\boxed{5}"),
        ("```latex\n\\boxed{5}\n```", "```latex\n\\boxed{5}"),
        ("```python\nprint('\\boxed{5}')\n```\n\\boxed{6}.", "```python\nprint('\\boxed{5}')\n```\n\\boxed{6}"),
        ("\\boxed{a\n```python\n}\n```\nb}c", "\\boxed{a\n```python\n}\n```\nb}"),
        ("```python \n}\n``` \n\\boxed{1}2", "```python \n}\n``` \n\\boxed{1}"),
        ("a ```python\n\\boxed{1}2", "a ```python\n\\boxed{1}"),
        (r"\boxed 5", None),
        (r"\boxed {5}", None),
        (r"\fbox{5}", None),
        (r"\boxed{5", None),
        (r"\boxed{5\}", None),
        (r"\boxed{6 \boxed{5}", None),
        ("```python\nx = '\\boxed{5}'\n", None),
        ("```python\n```output \\boxed{5}", None),
        ("", None),
    ],
)
def test_where_the_first_box_ends(text: str, kept: str | None) -> None:
    found = first_box(text)
    assert (None if found.end is None else text[: found.end]) == kept
    assert all(first_box(text[:n]).end is None for n in range(0 if kept is None else len(kept)))


PIECES = ["\\boxed{", "\\boxed", "{", "}", "\\", "5", " ", "\n", "```python\n", "```\n", "```python", "```", "\\{", "x"]


@given(parts=st.lists(st.sampled_from(PIECES), max_size=14), more=st.lists(st.sampled_from(PIECES), max_size=6))
def test_a_text_that_goes_on_keeps_its_box_and_the_reward_reads_it(parts: list[str], more: list[str]) -> None:
    text = "".join(parts)
    found = first_box(text)
    if found.end is None:
        return
    assert first_box(text + "".join(more)) == found
    assert first_box(text[: found.end]) == found
    if "```" not in text:  # the reward reads code, too
        assert last_boxed(text[: found.end])


class Stopping:
    """An engine that writes one text, and stops as SGLang does: at an end token, or at a pattern in its new text."""

    def __init__(self, said: Sequence[int], tokenizer: Pieces, start: int = 1) -> None:
        self.said, self.tokenizer, self.start = list(said), tokenizer, start
        self.asked: list[Ask] = []

    async def generate(self, ask: Ask) -> Generation:
        self.asked.append(ask)
        at, ids = len(ask.ids) - self.start, list[int]()
        finish: Any = "length"
        while len(ids) < ask.max_new_tokens and at + len(ids) < len(self.said):
            ids.append(self.said[at + len(ids)])
            text = self.tokenizer.decode(ids)
            if ids[-1] == END or any(re.search(each, text) for each in ask.sampling[STOP_REGEX]):
                finish = "stop"
                break
        places = range(at, at + len(ids))
        return Generation(ids, [-0.25 * n for n in places], [*places], finish, cached=len(ask.ids), held_s=1.0)


def hints(engine: Stopping) -> list[str]:
    """Return the pattern beside the output marker's in each question."""
    assert all(ask.sampling[STOP_REGEX][0] == STOP_PATTERN for ask in engine.asked)
    return ["".join(ask.sampling[STOP_REGEX][1:]) for ask in engine.asked]


async def said(*pieces: str, budget: int = 99) -> tuple[str, Generation, Stopping]:
    """Return the kept part of a text that an engine writes piece by piece, with its end token."""
    tokenizer = Pieces()
    engine = Stopping([*tokenizer.ids(*pieces), END], tokenizer)
    made = await StopTexts(engine, tokenizer, boxes=True).generate(Ask("r", [1], NAMED, budget))
    count = len(made.ids)
    assert made.ids == engine.said[:count]
    assert (made.logprobs, made.versions) == ([-0.25 * n for n in range(count)], [*range(count)])
    assert (made.cached, made.held_s) == (1, len(engine.asked))
    assert [ask.ids[0] for ask in engine.asked] == [1] * len(engine.asked)
    assert all(ask.max_new_tokens + len(ask.ids) - 1 == budget for ask in engine.asked)
    return tokenizer.decode(made.ids), made, engine


@pytest.mark.parametrize(
    ("pieces", "kept", "asked"),
    [
        (["So ", "\\boxed", "{", "5", "}", ".", " More"], "So \\boxed{5}", [OPENS, CLOSES]),
        (["\\boxed{", "\\frac{", "1}", "{2", "}", "}", "x"], "\\boxed{\\frac{1}{2}}", [OPENS, CLOSES, CLOSES, CLOSES]),
        (["\\boxed{5}", "x"], "\\boxed{5}", [OPENS]),
        (["\\boxed{5}. Yes", "x"], "\\boxed{5}. Yes", [OPENS]),
        (["\\bo", "xed{", "5}$", "x"], "\\boxed{5}$", [OPENS, CLOSES]),
        (["\\boxed{", "}", "\\boxed{", "7", "}", "x"], "\\boxed{}\\boxed{7}", [OPENS, CLOSES, OPENS, CLOSES]),
        (["No box", ".", "x"], "No box.x<end>", [OPENS]),
        (["\\boxed{", "5", "x"], "\\boxed{5x<end>", [OPENS, CLOSES]),
        (["\\boxed{5", "\n```output", "x"], "\\boxed{5\n```output", [OPENS, CLOSES]),
        ([BLOCK, "```output", "\\boxed{5}"], f"{BLOCK}```output", [OPENS]),
        (["```python\n", "'\\boxed{", "'\n", "```output", "x"], "```python\n'\\boxed{'\n```output", [OPENS, OPENS]),
    ],
)
async def test_an_answer_ends_with_its_box(pieces: list[str], kept: str, asked: list[str]) -> None:
    text, made, engine = await said(*pieces)
    assert (text, made.finish, hints(engine)) == (kept, "stop", asked)


async def test_a_marker_within_a_later_part_is_none_unless_it_begins_a_line() -> None:
    """The pattern's beginning of a text is that of the turn, and the engine sees that of the part."""
    text, made, engine = await said("\\boxed{", "```output", "5", "}", "x")
    assert (text, made.finish, hints(engine)) == ("\\boxed{```output5}", "stop", [OPENS, CLOSES, CLOSES])


async def test_the_budget_is_one_for_all_parts() -> None:
    text, made, engine = await said("a", "\\boxed{", "5", "6", "}", budget=3)
    assert (text, made.finish, len(engine.asked)) == ("a\\boxed{5", "length", 2)
    text, made, engine = await said("a", "\\boxed{", "5", "}", budget=2)
    assert (text, made.finish, len(engine.asked)) == ("a\\boxed{", "length", 1)


async def test_a_turn_of_many_braces_is_cut_once_it_is_over() -> None:
    """After 16 stops it is sampled to its end: braces cannot make a turn slow. The cut is the same."""
    braces = ["\\boxed{", *["{1}"] * 30, "}", "beyond"]
    text, made, engine = await said(*braces)
    assert (text, made.finish) == ("\\boxed{" + "{1}" * 30 + "}", "stop")
    assert hints(engine) == [OPENS, *[CLOSES] * 15, ""]  # the last part has the rest


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
async def test_an_engine_that_knows_no_patterns_is_cut_all_the_same(finish: Any) -> None:
    class GoesOn:
        async def generate(self, ask: Ask) -> Generation:
            return Generation(ids, [-0.5] * len(ids), [3] * len(ids), finish)

    tokenizer = Pieces()
    ids = tokenizer.ids("a", "\\boxed{", "5", "}", "b", "\\boxed{6}", "\n```output")
    receipting = ReceiptingEngine(StopTexts(GoesOn(), tokenizer, boxes=True))
    made = await receipting.generate(Ask("r", [1], NAMED, 99))
    assert (tokenizer.decode(made.ids), made.finish) == ("a\\boxed{5}", "stop")
    (receipt,) = receipting.take("r")
    assert receipt.ids.tolist() == made.ids == ids[:4]
    assert [len(receipt.logprobs), len(receipt.versions)] == [4, 4]


async def test_the_receipt_of_a_turn_in_parts_is_one() -> None:
    tokenizer = Pieces()
    engine = Stopping(tokenizer.ids("\\boxed{", "5", "}", "x"), tokenizer)
    receipting = ReceiptingEngine(StopTexts(engine, tokenizer, boxes=True))
    made = await receipting.generate(Ask("r", [1], NAMED, 99))
    (receipt,) = receipting.take("r")
    assert len(engine.asked) == 2
    assert receipt.ids.tolist() == made.ids == engine.said[:3]
    assert receipt.versions.tolist() == [0, 1, 2]


async def test_a_cancellation_keeps_the_tokens_of_the_parts_before() -> None:
    tokenizer = Pieces()
    engine = Stopping(tokenizer.ids("a", "\\boxed{", "5"), tokenizer)

    class Slow:
        async def generate(self, ask: Ask) -> Generation:
            if len(ask.ids) > 1 or not engine.said:
                waiting.set()
                await asyncio.sleep(3600)
            return await engine.generate(ask)

    waiting = asyncio.Event()
    stopping = StopTexts(Slow(), tokenizer, boxes=True)
    task = asyncio.create_task(stopping.generate(Ask("r", [1], NAMED, 99)))
    await waiting.wait()
    task.cancel()
    made = await task
    assert (tokenizer.decode(made.ids), made.finish) == ("a\\boxed{", "abort")
    engine.said, waiting = [], asyncio.Event()
    task = asyncio.create_task(stopping.generate(Ask("r", [1], NAMED, 99)))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_the_setting_a_box_is_text() -> None:
    tokenizer = Pieces()
    engine = Stopping([*tokenizer.ids("\\boxed{", "5", "}", "x"), END], tokenizer)
    made = await StopTexts(engine, tokenizer).generate(Ask("r", [1], NAMED, 99))
    assert (tokenizer.decode(made.ids), hints(engine)) == ("\\boxed{5}x<end>", [""])


async def test_parts_that_are_no_generation_end_one_request() -> None:
    tokenizer = Pieces()
    (box,) = tokenizer.ids("\\boxed{")

    class Broken:
        async def generate(self, ask: Ask) -> Generation:
            ids: Any = [box] if len(ask.ids) == 1 else None
            return Generation(ids, [-0.5], [0], "stop")

    with pytest.raises(EngineError, match="not a generation"):
        await StopTexts(Broken(), tokenizer, boxes=True).generate(Ask("r", [1], NAMED, 99))


PARTS = [
    "\\boxed{",
    "\\bo",
    "xed{",
    "5",
    "{",
    "}",
    "}.",
    "\\",
    " ",
    "\n",
    "```python\n",
    "```\n",
    "```output",
    "x",
    "{}",
]


@given(pieces=st.lists(st.sampled_from(PARTS), max_size=16), budget=st.integers(1, 20))
async def test_an_engine_that_stops_and_one_that_goes_on_give_the_same(pieces: list[str], budget: int) -> None:
    class GoesOn(Stopping):
        async def generate(self, ask: Ask) -> Generation:
            return await super().generate(Ask("r", ask.ids, {STOP_REGEX: []}, ask.max_new_tokens))

    tokenizer = Pieces()
    ids = [*tokenizer.ids(*pieces), END]
    asked = Ask("r", [1], NAMED, budget)
    one = await StopTexts(Stopping(ids, tokenizer), tokenizer, boxes=True).generate(asked)
    other = await StopTexts(GoesOn(ids, tokenizer), tokenizer, boxes=True).generate(asked)
    assert (one.ids, one.logprobs, one.versions) == (other.ids, other.logprobs, other.versions)
    assert one.finish == other.finish
