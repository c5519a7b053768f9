"""Characters that are not drawn, or hide or turn others, are shown by their code; ordinary text stays."""

import pytest

from verl_multiturn.describe import one_line, printable

HIDDEN = [
    *"\x00\x1b\x7f\x85\x9b\u00ad\u034f\u061c\u115f\u1160\u17b4\u180b\u180e\u200b\u200d\u200e\u2028\u2029\u202e\u2060",
    *"\u2066\u206f\u2800\u3164\ufe00\ufeff\uffa0\ufff9\ue000\U0001d173\U000e0001\U000e0041\U000e0100\U000f0000\ud83d",
]


@pytest.mark.parametrize("letter", HIDDEN, ids=lambda letter: f"{ord(letter):x}")
def test_what_is_hidden_is_shown(letter: str) -> None:
    shown = printable(f"a{letter}b")
    assert f"{ord(letter):x}" in shown
    assert letter not in shown


@pytest.mark.parametrize("text", ["naïve Ünïcode\t中文 עברית हिन्दी\n", "❤️ ☎︎ 😀", "\u3000\xa0"])
def test_what_people_write_stays(text: str) -> None:
    assert printable(text) == text


def test_selectors_carry_no_text() -> None:
    assert printable("❤️️a️") == "❤️\\ufe0fa\\ufe0f"


def test_one_line() -> None:
    assert one_line("a\nb\tc\x1b") == "a\\nb\\tc\\x1b"
