"""Texts to token ids, many times a turn: a Hugging Face tokenizer's library without the wrapper around it.

Invariants:
- the ids are those that the tokenizer's own `encode` gives, without special tokens at the ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Encode = Callable[[str], list[int]]
"""A function that returns the ids of a text, without special tokens at its ends. The text of an added token becomes it.
"""

# The modules in which a tokenizer's methods are those of transformers, and do no more than call the library.
_BASE, _FAST = "transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"
_WRAPPER = {"apply_chat_template": _BASE, "__call__": _BASE, "encode": _BASE, "_encode_plus": _FAST}


def is_wrapper(tokenizer: Any) -> bool:
    """Tell whether a tokenizer does no more with a text than hand it to the library `tokenizers`.

    Args:
        tokenizer: A tokenizer of any kind.
    """
    family = type(tokenizer)
    return all(getattr(getattr(family, name, None), "__module__", None) == home for name, home in _WRAPPER.items())


def encoder(tokenizer: Any) -> Encode:
    """Return the function that encodes texts for the codec and the firewall of a run.

    The wrapper takes half as long again as the library. A tokenizer that is more than a wrapper is asked itself.

    Args:
        tokenizer: A tokenizer with the `encode` of Hugging Face's.
    """

    def wrapped(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def plain(text: str) -> list[int]:
        library = tokenizer.backend_tokenizer
        # What the wrapper set for another caller stays set in the library: a text could be cut, or its control tokens
        # be split. The wrapper then sets it back.
        if library.encode_special_tokens or library.truncation is not None or library.padding is not None:
            return wrapped(text)
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    return plain if is_wrapper(tokenizer) and not tokenizer.split_special_tokens else wrapped
