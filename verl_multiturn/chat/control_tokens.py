"""The firewall: text of tools, users and data rows never becomes a control token of the model.

A tokenizer turns the *text* `<|im_end|>` into the control token wherever the text is. A tool response could thus
end its own message and forge the next one. The firewall puts a zero-width space into each such text before it is
rendered. Text without a control token stays exactly as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from verl_multiturn.chat.encoding import encoder
from verl_multiturn.chat.messages import ROLES
from verl_multiturn.errors import ConfigError

_BREAK = "\u200b"
_NO_ID = -1
# The cleaned forms of texts of at most so many characters are remembered, and so many of them: names of tools and ids
# of calls come again in every conversation, and each would be tokenized to see whether it forges a control token.
_SHORT = 64
_MOST_SHORT = 4096

# Tokens of this form begin and end DeepSeek's turns, though its tokenizer does not call them special.
_STRUCTURAL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)

# Roles whose text the author of the data wrote. A system prompt may explain `<tool_call>`; a worked example may use it.
_AUTHORED = {"system", "assistant"}


class ControlTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the firewall uses."""

    all_special_tokens: Any
    unk_token: Any
    added_tokens_decoder: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or the ids of a list of tokens."""
        ...


class _Tokens:
    """A set of control tokens, with the tables that find them in text and in ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        # A single character cannot be broken. As text it forges nothing.
        self.ids = {token: index for token, index in tokens.items() if len(token) > 1}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.beginnings = {token[:length] for token in self.ids for length in range(1, len(token))}
        self.ends = {token[-length:] for token in self.ids for length in range(1, len(token))}
        self.longest = max(map(len, self.ids), default=0)
        self._indices = frozenset(self.ids.values())

    def touch(self, text: str) -> bool:
        """Return whether the text begins with the end of a control token, or ends with the beginning of one."""
        lengths = range(1, min(self.longest, len(text) + 1))
        return any(text[-length:] in self.beginnings or text[:length] in self.ends for length in lengths)

    def count(self, ids: Sequence[int]) -> int:
        """Count the control tokens among ids."""
        return sum(index in self._indices for index in ids)


def _special(tokenizer: ControlTokenizer) -> dict[str, int]:
    """Return the tokens that structure a conversation, with their ids.

    Example for Qwen2.5: `{"<|im_start|>": 151644, "<|im_end|>": 151645, "<|endoftext|>": 151643, …}`, but not
    `<tool_call>`, which is an added token that is not special.
    """
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    special |= {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special or _STRUCTURAL.fullmatch(token.content)
    }
    if tokenizer.unk_token in special:
        # The unknown token replaces a character that the tokenizer does not know. It structures nothing, unless it
        # has another task as well.
        structural = {getattr(tokenizer, name, None) for name in ("eos_token", "bos_token", "pad_token")}
        if tokenizer.unk_token not in structural:
            special[tokenizer.unk_token] = _NO_ID  # found in text only, never among ids
    return special


def _marks(tokenizer: ControlTokenizer, special: Mapping[str, int]) -> dict[str, int]:
    """Return the added tokens that hold a punctuation mark, such as `<tool_call>`, with their ids."""
    marks = {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if re.search(r"[^\w\s]", token.content)
    }
    return {token: index for token, index in marks.items() if token != tokenizer.unk_token or token in special}


class Firewall:
    """A firewall that breaks the control tokens in text.

    Which texts are control tokens depends on the role of the message:
    - In a row's system and assistant messages: every special token of the tokenizer, and every added token of the form
      `<|…|>`. These structure the conversation. Other tags are allowed there, since a system prompt may explain
      `<tool_call>`.
    - In all other messages and in schemas: the same, and every added token that holds a punctuation mark
      (`<tool_call>`, `<think>`). Added words and runs of white space are not control tokens.

    Args:
        tokenizer: The model's tokenizer.
        placeholders: Texts that a processor replaces by an image's tokens. They are control tokens for every role.
        tags: Tags that the template writes around tool responses. They are control tokens for every role but system and
            assistant, whether the tokenizer has a token for them or not.
    """

    def __init__(
        self, tokenizer: ControlTokenizer, placeholders: Collection[str] = (), tags: Collection[str] = ()
    ) -> None:
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        # Placeholders and tags that are not tokens of the tokenizer are found in text only.
        special = _special(tokenizer) | {text: added.get(text, _NO_ID) for text in placeholders}
        tags_ids = {tag: added.get(tag, _NO_ID) for tag in tags}
        self._special = _Tokens(special)
        self._all = _Tokens({**tags_ids, **_marks(tokenizer, special), **special})
        self._encode = encoder(tokenizer)
        self._clean_short = functools.lru_cache(_MOST_SHORT)(self._clean)

    def count(self, ids: Sequence[int], role: str = "tool") -> int:
        """Count the ids that are control tokens for a role."""
        return self._tokens(role).count(ids)

    def clean(self, text: str, role: str = "tool") -> str:
        """Return the text with every control token in it broken.

        Half a character (a lone surrogate), which no tokenizer accepts, becomes a question mark. A text with neither is
        returned unchanged.

        Args:
            text: Text of a row, a tool or a user.
            role: Role of the message that holds the text.

        Raises:
            ConfigError: The tokenizer makes a control token of the text in a way that the firewall cannot prevent.
        """
        return self._clean_short(text, role) if len(text) <= _SHORT else self._clean(text, role)

    def _clean(self, text: str, role: str) -> str:
        tokens = self._tokens(role)
        broken = text if text.isascii() else text.encode("utf-8", "replace").decode()
        # Breaking a control token may leave another one that was hidden inside it. Repeat until none remains.
        while (again := tokens.pattern.sub(lambda found: found[0][0] + _BREAK + found[0][1:], broken)) != broken:
            broken = again
        if not self._forged(broken, tokens):
            return broken
        # A tokenizer that normalizes text first (for example full-width letters) sees tokens that the text has not.
        spaced = _BREAK.join(text)
        if self._forged(spaced, tokens):
            raise ConfigError(
                f"the tokenizer makes a control token of {text!r:.200}, which cannot be prevented; leave that text "
                "out, or use another tokenizer"
            )
        return spaced

    def clean_schema(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a tool's schema with all its text cleaned like the text of a tool."""
        return {key: self._clean_value(value, "tool") for key, value in schema.items()}

    def clean_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with all its text cleaned.

        A role that is not one of `ROLES` is cleaned, too. Texts of one content that would form a control token side by
        side are sealed.
        """
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
        """Return whether a text and its neighbours may form a control token together.

        That is so when the text begins with the end of a control token, ends with the beginning of one, or is a part of
        one.
        """
        tokens = self._tokens(role)
        inside = bool(text) and any(text in token for token in tokens.ids if len(text) < len(token))
        return inside or tokens.touch(text)

    def joins(self, content: Any, following: Any) -> bool:
        """Return whether two contents form a control token where a template writes them side by side.

        White space at the junction is omitted, since some templates trim the contents.

        Args:
            content: A message's content: text, or a list of blocks.
            following: Content of the next message.
        """
        left, right = ("".join([each] if isinstance(each, str) else text_parts(each)) for each in (content, following))
        longest = self._all.longest
        left, right = left.rstrip()[-longest:], right.lstrip()[:longest]
        found = (self._all.pattern.match(left + right, start) for start in range(len(left)))
        return any(token is not None and token.end() > len(left) for token in found)

    def seal(self, content: Any) -> Any:
        """Put a zero-width space before and after each text of a content.

        The text then forms no control token together with the template's text beside it.
        """
        return map_texts(content, _sealed)

    def seal_names(self, value: Any) -> Any:
        """Return a message's calls with a zero-width space before and after each name that may form a control token.

        Names are those of functions, and the keys of the calls and of their arguments. Templates write names between
        brackets or tags of their own, and both together may form a control token.

        Args:
            value: The calls, or a part of them.
        """
        if isinstance(value, Mapping):
            is_function = "arguments" in value
            return {
                self._seal_name(key): self._seal_name(item) if is_function and key == "name" else self.seal_names(item)
                for key, item in value.items()
            }
        return [self.seal_names(item) for item in value] if isinstance(value, list | tuple) else value

    def _seal_name(self, name: Any) -> Any:
        return _sealed(name) if isinstance(name, str) and self._all.touch(name) else name

    def _apart(self, parts: list[Any], role: str) -> list[Any]:
        """Seal the texts of a content's blocks if they form a control token side by side; some templates trim them."""
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
        return bool(text) and tokens.count(self._encode(text)) > 0


def _sealed(text: str) -> str:
    return f"{_BREAK}{text}{_BREAK}"


def text_of(part: Any) -> str | None:
    """Return the text of one block of a content; None for a block that is not text.

    A block is a mapping with a `text`, or the text itself.
    """
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None


def text_parts(content: Any) -> list[str]:
    """Return the texts of a content that is a list of blocks; an empty list for any other content."""
    parts = content if isinstance(content, list) else []
    return [text for text in map(text_of, parts) if text is not None]


def map_texts(content: Any, change: Callable[[str], str]) -> Any:
    """Return a content with each of its texts replaced by `change(text)`."""
    if isinstance(content, str):
        return change(content)
    return [part if (text := text_of(part)) is None else with_text(part, change(text)) for part in content]


def with_text(part: Any, text: str) -> Any:
    """Return a block of a content with another text."""
    return text if isinstance(part, str) else {**part, "text": text}
