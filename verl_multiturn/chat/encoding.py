"""Texts to token ids, many times a turn: without the wrapper around a tokenizer's library, and piece by piece.

Invariants:
- the ids are those that the tokenizer's own `encode` gives of the whole text, without special tokens at its ends.

A tokenizer first cuts a text at its added tokens, and then treats each piece by itself. So nothing merges across a
place where an added token always begins, which is here called a seam:
- the added token there is found in the text as it is (`normalized` is false, or the tokenizer normalizes nothing), and
  needs nothing of the text before it (`lstrip` and `single_word` are false);
- no added token can begin before that place and end behind it.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

Encode = Callable[[str], list[int]]
"""A function that returns the ids of a text, without special tokens at its ends. The text of an added token becomes it.
"""

# The modules in which a tokenizer's methods are those of transformers, and do no more than call the library.
_BASE, _FAST = "transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"
_WRAPPER = {"apply_chat_template": _BASE, "__call__": _BASE, "encode": _BASE, "_encode_plus": _FAST}
_WORD = re.compile(r"\w")
# How the library shows a normalizer that leaves every text as it is.
_NO_NORMALIZER = ("None", "Sequence(normalizers=[])")
# The most characters of beginnings that are remembered, some 10 MB with their ids. In a run that is the prompts of the
# conversations that are under way, and one is looked up as often as its group has siblings, and again at their ends.
_MOST_CHARACTERS = 4_000_000
# How far before the end of a prompt its last seam is looked for: the header of the assistant's turn is shorter.
_HEADER = 128


def is_wrapper(tokenizer: Any) -> bool:
    """Return whether a tokenizer does no more with a text than hand it to the library `tokenizers`.

    Args:
        tokenizer: A tokenizer of any kind.
    """
    places = ((getattr(tokenizer, name, None), home) for name, home in _WRAPPER.items())
    return all(getattr(method, "__module__", None) == home for method, home in places)


def encoder(tokenizer: Any) -> Encode:
    """Return the function that encodes texts for the codec and the firewall of a run.

    The wrapper takes half as long again as the library. A tokenizer that is more than a wrapper is called itself.

    Args:
        tokenizer: A tokenizer with the `encode` of Hugging Face's.
    """

    def wrapped(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def plain(text: str) -> list[int]:
        library = tokenizer.backend_tokenizer
        # Settings that the wrapper made for another caller stay set in the library: a text could be cut, or its control
        # tokens be split. The wrapper then sets it back.
        if library.encode_special_tokens or library.truncation is not None or library.padding is not None:
            return wrapped(text)
        # The fast form omits each token's place in the text, which saves a quarter of the time.
        ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return plain if is_wrapper(tokenizer) and not tokenizer.split_special_tokens else wrapped


class SeamEncoder:
    """An encoder that cuts a text at a seam, and remembers the ids of the beginning.

    One for a model is made at the start of a run: the prompts of a group are one, and each is again part of the text of
    its conversation as a whole.

    Args:
        tokenizer: A tokenizer with the `encode` of Hugging Face's. If it is more than a wrapper, texts have no seams.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.encode: Encode = encoder(tokenizer)
        self._tokenizer = tokenizer
        self._plain = is_wrapper(tokenizer) and not tokenizer.split_special_tokens
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0

    def is_seam(self, text: str, place: int) -> bool:
        """Return whether the text before a place and the text from there on have together the ids of the whole.

        Args:
            text: The whole text.
            place: An index of it.
        """
        if not self._plain or not self._openings.match(text, place):
            return False
        return all(text[max(place - size, 0) : place] not in self._heads for size in self._head_sizes)

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, which ends with the header of the assistant's turn."""
        places = range(len(text) - 1, max(len(text) - _HEADER, 0), -1)
        return self.from_seam(text, next((place for place in places if self.is_seam(text, place)), 0))

    def from_seam(self, text: str, place: int) -> list[int]:
        """Return the ids of a text whose beginning may be known.

        Args:
            text: The text.
            place: Where the beginning ends; the text is encoded as a whole if there is no seam.
        """
        if place <= 0 or not self.is_seam(text, place):
            return self.encode(text)
        return [*self._beginning(text[:place]), *self.encode(text[place:])]

    def _beginning(self, text: str) -> array[int]:
        ids = self._known.get(text)
        if ids is not None:
            self._known.move_to_end(text)
            return ids
        ids = array("q", self.encode(text))
        if len(text) > _MOST_CHARACTERS:
            return ids
        self._known[text] = ids
        self._characters += len(text)
        while self._characters > _MOST_CHARACTERS:
            oldest, _ = self._known.popitem(last=False)
            self._characters -= len(oldest)
        return ids

    @cached_property
    def _openings(self) -> re.Pattern[str]:
        """The added tokens that are found at any place, whatever is before and behind them."""
        added = list(self._tokenizer.added_tokens_decoder.values())
        firm = {each.content for each in added if self._is_firm(each)}
        others = [each.content for each in added if each.content not in firm]
        # A longer token that is not always found must not begin where the shorter one does.
        sure = [token for token in firm if not any(other.startswith(token) for other in others)]
        return re.compile("|".join(map(re.escape, sorted(sure, key=len, reverse=True))) or r"(?!)")

    def _is_firm(self, added: Any) -> bool:
        if added.lstrip or added.single_word or not added.content:
            return False
        text, others = added.content, self._tokenizer.added_tokens_decoder.values()
        if _WORD.match(text) and any(each.single_word for each in others):  # which it keeps from being a single word
            return False
        if not added.normalized:
            return True
        # It is looked for in the normalized text, and after those that are not normalized.
        shared = any(text[at:] in self._heads for at in range(1, len(text)))
        shared = shared or any(each.content in text for each in others if each.content != text)
        return not shared and repr(self._tokenizer.backend_tokenizer.normalizer) in _NO_NORMALIZER

    @cached_property
    def _heads(self) -> frozenset[str]:
        """The beginnings of all added tokens, without the whole tokens."""
        added = [each.content for each in self._tokenizer.added_tokens_decoder.values()]
        return frozenset(token[:size] for token in added for size in range(1, len(token)))

    @cached_property
    def _head_sizes(self) -> range:
        return range(1, max(map(len, self._heads), default=0) + 1)
