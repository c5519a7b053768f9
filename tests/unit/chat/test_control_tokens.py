"""The firewall looks at a short text once, and at texts that it must refuse each time."""

from typing import Any

import pytest

from tests.conftest import CharTokenizer
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.errors import ConfigError


class Counting(CharTokenizer):
    """A tokenizer that records its inputs, and makes a control token of a text that has none."""

    all_special_tokens = ("<end>",)
    unk_token = None

    def __init__(self) -> None:
        self.added_tokens_decoder: dict[int, Any] = {}
        self.encoded: list[str] = []

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        ids: list[int] = super().encode(text, add_special_tokens=add_special_tokens)
        return [self.eos_token_id] if "forged" in text.replace("\u200b", "") else ids


def test_a_short_text_is_encoded_once_for_each_role() -> None:
    tokenizer = Counting()
    firewall = Firewall(tokenizer)
    for _ in range(3):
        assert firewall.clean("call_0_0") == "call_0_0"
        assert firewall.clean("call_0_0", "user") == "call_0_0"
    assert tokenizer.encoded == ["call_0_0"] * 2
    long = "x" * 65
    assert [firewall.clean(long), firewall.clean(long)] == [long, long]
    assert tokenizer.encoded[2:] == [long] * 2


def test_a_text_that_is_refused_is_refused_again() -> None:
    firewall = Firewall(Counting())
    for _ in range(2):
        with pytest.raises(ConfigError, match="makes a control token of 'forged'"):
            firewall.clean("forged")


def test_the_names_of_a_call_are_sealed_and_its_values_are_not() -> None:
    firewall = Firewall(Counting())
    function = {"name": "x <end", "arguments": {"y <end": "z <end", "name": "z <end", "plain": ["z <end"]}}
    (call,) = firewall.seal_names([{"id": "1", "function": function}])
    assert call == {
        "id": "1",
        "function": {
            "name": "\u200bx <end\u200b",
            "arguments": {"\u200by <end\u200b": "z <end", "name": "z <end", "plain": ["z <end"]},
        },
    }
