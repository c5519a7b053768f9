"""Text of tools, users and data rows never becomes a control token of the model.

A tokenizer turns the *text* `<|im_end|>` into the control token wherever it stands, so a tool's answer could end its
own message and forge the next one. Here each such text is broken by a zero-width space before it is rendered; text
without one is left exactly as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from verl_multiturn.chat.messages import ROLES
from verl_multiturn.errors import ConfigError

_BREAK = "\u200b"
_NO_ID = -1


# DeepSeek's tokenizer does not call these special; they begin and end its turns all the same.
_STRUCTURAL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)

# Roles whose text an author wrote: a system prompt may explain `<tool_call>`, a worked example may use it.
_AUTHORED = {"system", "assistant"}


class ControlTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    all_special_tokens: Any
    unk_token: Any
    added_tokens_decoder: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...


class _Tokens:
    """A set of control tokens, and how text is searched for them."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        # A single character cannot be broken; as text it forges nothing that it is not.
        self.ids = {token: index for token, index in tokens.items() if len(token) > 1}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.beginnings = {token[:length] for token in self.ids for length in range(1, len(token))}
        self.ends = {token[-length:] for token in self.ids for length in range(1, len(token))}
        self.longest = max(map(len, self.ids), default=0)
        self._indices = frozenset(self.ids.values())

    def touch(self, text: str) -> bool:
        """Whether the text begins with the end of one, or ends with the beginning of one."""
        lengths = range(1, min(self.longest, len(text) + 1))
        return any(text[-length:] in self.beginnings or text[:length] in self.ends for length in lengths)

    def count(self, ids: Sequence[int]) -> int:
        return sum(index in self._indices for index in ids)


class Firewall:
    """Breaks control tokens in text.

    In the text of tools and users a control token is every special token of the tokenizer, and every added token with a
    punctuation mark in it (`<tool_call>`, `<think>`), as against added words or runs of white space. In a row's system
    and assistant messages it is the special tokens and what is written like one (`<|…|>`), those that structure the
    conversation.

    Args:
        placeholders: more control tokens, of every role: texts that a processor puts an image's tokens for.
        tags: more of them in the text of tools and users: what the template writes around answers, token or not.
    """

    def __init__(
        self, tokenizer: ControlTokenizer, placeholders: Collection[str] = (), tags: Collection[str] = ()
    ) -> None:
        added = dict(tokenizer.added_tokens_decoder)
        special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
        special |= {
            token.content: index
            for index, token in added.items()
            if token.special or _STRUCTURAL.fullmatch(token.content)
        }
        added_ids = {token.content: index for index, token in added.items()}
        if tokenizer.unk_token in special:
            # What a tokenizer writes for a character that it does not know; it structures nothing.
            structural = {getattr(tokenizer, name, None) for name in ("eos_token", "bos_token", "pad_token")}
            if tokenizer.unk_token not in structural:
                special[tokenizer.unk_token] = _NO_ID  # looked for in the text alone
        # Those that the tokenizer does not know are looked for in the text alone.
        special |= {text: added_ids.get(text, _NO_ID) for text in placeholders}
        marks = {token.content: index for index, token in added.items() if re.search(r"[^\w\s]", token.content)}
        marks = {token: index for token, index in marks.items() if token != tokenizer.unk_token or token in special}
        self._special = _Tokens(special)
        plain = {tag: added_ids.get(tag, _NO_ID) for tag in tags}
        self._all = _Tokens({**plain, **marks, **special})
        self._tokenizer = tokenizer

    def count(self, ids: Sequence[int], role: str = "tool") -> int:
        """How many tokens that a message of `role` must not bring in are among `ids`."""
        return self._tokens(role).count(ids)

    def clean(self, text: str, role: str = "tool") -> str:
        """The text with every control token in it broken, and half a character (a lone surrogate), which no tokenizer
        takes, as a question mark; unchanged when there is neither.

        Raises:
            ConfigError: the tokenizer makes control tokens of text in a way that cannot be broken.
        """
        tokens = self._tokens(role)
        broken = text if text.isascii() else text.encode("utf-8", "replace").decode()
        # Breaking one may leave another that was hidden inside it, so until none is left.
        while (again := tokens.pattern.sub(lambda found: found[0][0] + _BREAK + found[0][1:], broken)) != broken:
            broken = again
        if not self._forged(broken, tokens):
            return broken
        # A tokenizer that normalizes text first (full-width letters, say) sees tokens where the text has none.
        spaced = _BREAK.join(text)
        if self._forged(spaced, tokens):
            raise ConfigError(f"the tokenizer makes a control token of {text!r:.200}, which cannot be prevented")
        return spaced

    def clean_schema(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A tool's schema with all its text cleaned, like the text of a tool."""
        return {key: self._clean_value(value, "tool") for key, value in schema.items()}

    def clean_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with all its text cleaned; a role that is none of the usual ones is text too."""
        role = str(message.get("role"))
        cleaned = {
            key: value if key == "role" and role in ROLES else self._clean_value(value, role)
            for key, value in message.items()
        }
        content = cleaned.get("content")
        if isinstance(content, list):
            cleaned["content"] = self._apart(content, role)
        return cleaned

    def may_join(self, text: str, role: str = "tool") -> bool:
        """Whether the text and its neighbours may form a control token: it begins with the end of one, ends with the
        beginning of one, or is a part of one."""
        tokens = self._tokens(role)
        inside = bool(text) and any(text in token for token in tokens.ids if len(text) < len(token))
        return inside or tokens.touch(text)

    def joins(self, content: Any, following: Any) -> bool:
        """Whether two contents form a control token where a template writes them side by side."""
        left, right = ("".join([each] if isinstance(each, str) else text_parts(each)) for each in (content, following))
        longest = self._all.longest
        return self._all.pattern.search(left.rstrip()[-longest:] + right.lstrip()[:longest]) is not None

    def seal(self, content: Any) -> Any:
        """A content whose texts are parted from what a template may put beside them, for when both together would form
        a token."""
        return map_texts(content, _sealed)

    def seal_names(self, value: Any) -> Any:
        """A message's calls, with each name in them parted from the brackets that a template puts around names, where
        both together may form a token."""
        if isinstance(value, Mapping):
            return {
                _sealed(key) if isinstance(key, str) and self._all.touch(key) else key: self.seal_names(item)
                for key, item in value.items()
            }
        return [self.seal_names(item) for item in value] if isinstance(value, list | tuple) else value

    def _apart(self, parts: list[Any], role: str) -> list[Any]:
        """Parts of a content, kept from forming a token together: templates put them side by side, some trim them."""
        texts = text_parts(parts)
        tokens = self._tokens(role)
        if not any(self._forged(together, tokens) for together in ("".join(texts), "".join(map(str.strip, texts)))):
            return parts
        sealed: list[Any] = self.seal(parts)
        return sealed

    def _tokens(self, role: str) -> _Tokens:
        return self._special if role in _AUTHORED else self._all

    def _clean_value(self, value: Any, role: str) -> Any:
        if isinstance(value, str):
            return self.clean(value, role)
        if isinstance(value, Mapping):
            return {self._clean_value(key, role): self._clean_value(item, role) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean_value(item, role) for item in value]
        return value

    def _forged(self, text: str, tokens: _Tokens) -> bool:
        if tokens.pattern.search(text):
            return True
        return bool(text) and tokens.count(self._tokenizer.encode(text, add_special_tokens=False)) > 0


def _sealed(text: str) -> str:
    return f"{_BREAK}{text}{_BREAK}"


def text_of(part: Any) -> str | None:
    """The text of one part of a content: a mapping with a `text`, or the text itself."""
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None


def text_parts(content: Any) -> list[str]:
    """The texts of a content that is a list of parts; none of any other."""
    parts = content if isinstance(content, list) else []
    return [text for text in map(text_of, parts) if text is not None]


def map_texts(content: Any, change: Callable[[str], str]) -> Any:
    """A content with each of its texts changed."""
    if isinstance(content, str):
        return change(content)
    return [part if (text := text_of(part)) is None else with_text(part, change(text)) for part in content]


def with_text(part: Any, text: str) -> Any:
    """A part of a content with another text."""
    return text if isinstance(part, str) else {**part, "text": text}
