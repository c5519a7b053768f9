"""Text of tools, users and data rows never becomes a control token of the model.

A tokenizer turns the *text* `<|im_end|>` into the control token wherever it stands, so a tool's answer could end its
own message and forge the next one. Here each such text is broken by a zero-width space before it is rendered; text
without one is left exactly as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verl_multiturn.errors import ConfigError

_BREAK = "\u200b"


class ControlTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    all_special_tokens: Any

    def get_added_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...


class Firewall:
    """Breaks control tokens in untrusted text.

    A control token is every special token of the tokenizer, and every added token with a punctuation mark in it
    (`<tool_call>`, `<think>`), as against added words or runs of white space.
    """

    def __init__(self, tokenizer: ControlTokenizer) -> None:
        added = {token: index for token, index in tokenizer.get_added_vocab().items() if re.search(r"[^\w\s]", token)}
        special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
        self._tokens = {**added, **special}
        self._ids = frozenset(self._tokens.values())
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {token[:length] for token in self._tokens for length in range(1, len(token))}
        self._ends = {token[-length:] for token in self._tokens for length in range(1, len(token))}
        self._longest = max(map(len, self._tokens), default=0)
        self._tokenizer = tokenizer

    def count(self, ids: Sequence[int]) -> int:
        """How many control tokens are among `ids`."""
        return sum(index in self._ids for index in ids)

    def clean(self, text: str) -> str:
        """The text with every control token in it broken; the same object when there is none.

        Raises:
            ConfigError: the tokenizer makes control tokens of text in a way that cannot be broken.
        """
        broken = text
        # Breaking one may leave another that was hidden inside it, so until none is left.
        while (again := self._pattern.sub(lambda found: found[0][0] + _BREAK + found[0][1:], broken)) != broken:
            broken = again
        if not self._forged(broken):
            return broken
        # A tokenizer that normalizes text first (full-width letters, say) sees tokens where the text has none.
        spaced = _BREAK.join(text)
        if self._forged(spaced):
            raise ConfigError(f"the tokenizer makes a control token of {text!r:.200}, which cannot be prevented")
        return spaced

    def clean_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with all its text cleaned; its role is not text."""
        return {key: value if key == "role" else self._clean_value(value) for key, value in message.items()}

    def may_join(self, text: str) -> bool:
        """Whether the text begins with the end of a control token, or ends with the beginning of one."""
        return any(
            text[-length:] in self._beginnings or text[:length] in self._ends
            for length in range(1, min(self._longest, len(text) + 1))
        )

    def seal_ends(self, text: str) -> str:
        """The text, parted from what a template may put beside it, for when both together would form a token."""
        return f"{_BREAK}{text}{_BREAK}"

    def _clean_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, Mapping):
            return {key: self._clean_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean_value(item) for item in value]
        return value

    def _forged(self, text: str) -> bool:
        return bool(text) and self.count(self._tokenizer.encode(text, add_special_tokens=False)) > 0
