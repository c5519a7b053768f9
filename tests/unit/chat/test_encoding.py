"""Texts to ids, piece by piece: the ids are those of the whole text."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_multiturn.chat import encoding
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.encoding import SeamEncoder, encoder, is_wrapper

PROMPT = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def tokenizer(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast) -> Any:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(f"<|im_{name}|>", normalized=False) for name in ("start", "end")])
    return kind(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")


class Odd(PreTrainedTokenizerFast):
    """A tokenizer that does more than call its library."""

    def _encode_plus(self, text: Any, **named: Any) -> Any:
        return super()._encode_plus(f"{text}!", **named)


class Counted:
    """Counts the texts that are encoded."""

    def __init__(self, seams: SeamEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        encode = seams.encode
        monkeypatch.setattr(seams, "encode", lambda text: (self.texts.append(text), encode(text))[1])


def test_a_beginning_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokenizer()
    seams = SeamEncoder(plain)
    counted = Counted(seams, monkeypatch)
    whole = f"{PROMPT}said<|im_end|>\n"
    head, header = PROMPT.removesuffix("<|im_start|>assistant\n"), "<|im_start|>assistant\n"
    for _ in range(2):
        assert seams.prompt(PROMPT) == plain.encode(PROMPT)
        assert seams.from_seam(whole, whole.find(header)) == plain.encode(whole)
    assert counted.texts == [head, header, f"{header}said<|im_end|>\n", header, f"{header}said<|im_end|>\n"]


def test_without_a_seam_a_text_is_encoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokenizer()
    seams = SeamEncoder(plain)
    counted = Counted(seams, monkeypatch)
    long = "<|im_start|>" + "x" * 500
    for text, place in ((PROMPT, 3), (PROMPT, 0), (PROMPT, -1), (PROMPT, len(PROMPT)), (long, 200), ("", 0)):
        assert seams.from_seam(text, place) == plain.encode(text)
        assert seams.prompt(long) == plain.encode(long)
    assert set(counted.texts) == {PROMPT, long, ""}


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MOST_CHARACTERS", 100)
    plain = tokenizer()
    seams = SeamEncoder(plain)
    texts = [f"<|im_start|>{letter * 20}<|im_end|>" for letter in "abcdefab"] + [
        "<|im_start|>" + "long" * 50 + "<|im_end|>"
    ]
    for text in texts:
        assert seams.from_seam(text, text.find("<|im_end|>")) == plain.encode(text)
    assert list(seams._known) == [f"<|im_start|>{letter * 20}" for letter in "fab"]
    assert seams._characters == 3 * 32


def test_a_word_joins_the_single_word_before_it() -> None:
    plain = tokenizer()
    plain.backend_tokenizer.add_tokens([AddedToken("foo", single_word=True, normalized=False)])
    plain.backend_tokenizer.add_tokens([AddedToken("Human:", normalized=False)])
    seams, text = SeamEncoder(plain), "say fooHuman: hi"
    assert seams.from_seam(text, text.find("Human:")) == plain.encode(text)


def test_a_tokenizer_that_does_more_is_asked_itself() -> None:
    own = tokenizer()
    own.encode = lambda text, **_: [1, 2, 3]
    assert encoder(own)("ab") == [1, 2, 3]
    odd = tokenizer(Odd)
    assert is_wrapper(tokenizer())
    assert not is_wrapper(odd)
    assert encoder(odd)("a") == odd.encode("a") != encoder(tokenizer())("a")
    assert not SeamEncoder(odd).is_seam(PROMPT, PROMPT.find("<|im_end|>"))
    split = tokenizer()
    split.split_special_tokens = True
    assert encoder(split)("<|im_end|>") == split.encode("<|im_end|>")
    assert len(encoder(split)("<|im_end|>")) == 10
    assert not SeamEncoder(split).is_seam(PROMPT, PROMPT.find("<|im_end|>"))


@pytest.mark.parametrize(
    "setting",
    [
        {"truncation": True, "max_length": 2},
        {"padding": "max_length", "max_length": 99},
        {"split_special_tokens": True},
    ],
)
def test_settings_of_another_caller_do_not_stay(setting: dict[str, Any]) -> None:
    """The wrapper leaves a caller's settings in the library: texts would be cut there, and control tokens split."""
    plain = tokenizer()
    encode, firewall = encoder(plain), Firewall(plain)
    right = encode("words <|im_end|>")
    plain("words of somebody else", **setting)
    assert encode("words <|im_end|>") == right == plain.encode("words <|im_end|>")
    plain("words of somebody else", **setting)
    assert firewall.clean("words <|im_end|>") != "words <|im_end|>"
