"""Cutting to tokens: within the budget, from the right side, never through a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT, CharTokenizer
from verl_multiturn.chat.clipping import Side, clip

SIDES = ("left", "middle", "right")


class Bytes:
    """A tokenizer that splits characters into bytes, and does not know where its tokens lie in the text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def real():  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")


def test_a_short_text_is_left_alone() -> None:
    assert clip("abc", 3, "middle", CharTokenizer()) == "abc"
    assert clip("", 1, "middle", CharTokenizer()) == ""


def test_no_room_for_the_mark() -> None:
    assert clip("abcdefgh", 3, "middle", CharTokenizer()) == "abc"


def test_a_character_is_kept_whole_or_not_at_all() -> None:
    assert clip("ééé", 3, "right", Bytes()) == "é"


@given(text=st.text(max_size=400), tokens=st.integers(1, 60), side=st.sampled_from(SIDES))
def test_within_the_budget_and_of_the_text(text: str, tokens: int, side: Side) -> None:
    tokenizer = Bytes()
    clipped = clip(text, tokens, side, tokenizer)
    assert len(tokenizer.encode(clipped)) <= tokens
    if clipped != text:
        head, mark, tail = clipped.partition("...(truncated)...")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(tokenizer.encode(text)) > tokens
        assert mark or tokens < 17 + 4
        assert {"left": not head or not mark, "right": not tail, "middle": True}[side]


@given(text=st.text(max_size=300), tokens=st.integers(20, 60), side=st.sampled_from(SIDES))
def test_with_a_real_tokenizer(real, text: str, tokens: int, side: Side) -> None:  # type: ignore[no-untyped-def]
    clipped = clip(text, tokens, side, real)
    assert len(real.encode(clipped, add_special_tokens=False)) <= tokens
    if clipped != text:
        head, mark, tail = clipped.partition("...(truncated)...")
        assert mark
        assert text.startswith(head)
        assert text.endswith(tail)
        # The result loses little more than it has to.
        assert len(real.encode(clipped, add_special_tokens=False)) >= tokens - 8


def test_a_huge_text_costs_what_is_kept_of_it(real) -> None:  # type: ignore[no-untyped-def]
    class Counting:
        is_fast = True
        characters = 0

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            self.characters += len(text)
            return real.encode(text, add_special_tokens=add_special_tokens)

        def __call__(self, text: str, **kwargs: object) -> object:
            return real(text, **kwargs)

    counting = Counting()
    clip("word 12 " * 1_000_000, 100, "middle", counting)
    assert counting.characters < 50_000
