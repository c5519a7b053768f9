"""The data that a run does not write: entries by their name, and parts of texts by a regular expression.

`Redaction` hides texts. Token ids stay, and decode to the text that the model read and wrote. So a gateway keeps no
record of a session whose ids show what a rule hides (`Redaction.is_seen`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from verl_multiturn.errors import ConfigError

HIDDEN = "***"
_REGEX = "re:"
_WHOLE = ("sample", "sampling", "messages", "calls", "replies", "session", "error", "differences", "why")
"""Entries of a record or a line that are looked through; of generations, `text` alone."""
_FREE = frozenset(
    ("index", "ground_truth", "extra_info", "messages", "tools", "tools_kwargs", "interaction_kwargs", "sampling",
     "arguments", "metrics", "wishes")
)  # fmt: skip
"""Entries whose contents have no form of ours: numbers in them are hidden, too."""
_WORDS = frozenset(("nan", "inf", "-inf"))
"""Texts that represent numbers."""
_LEFT = frozenset(("events",))
"""Entries of ours that hold words of a fixed list."""

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the text of token ids, with that of control tokens."""


class Redaction:
    """Hides the rules' matches in records and lines, as `json_text.plain` returns them.

    The redacted data still fits the schema: numbers of our own entries, such as a call's `turn`, stay.

    Args:
        rules: Names of entries, whose texts become `***` wherever they are in the record's texts, and whose numbers
            do where the contents are free; and regular expressions after `re:`, whose matches in texts become `***`.

    Raises:
        ConfigError: A rule is not a regular expression.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        self.names = frozenset(rule for rule in rules if not rule.startswith(_REGEX))
        """Names of entries."""
        self._patterns = [_compiled(rule) for rule in rules if rule.startswith(_REGEX)]

    def __call__(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Return a record or a line in which the matches are hidden."""
        if not self.names and not self._patterns:
            return entries
        hidden = {key: self._below(key, value, False, False) for key, value in entries.items() if key in _WHOLE}
        if "generations" in entries:
            turns = entries["generations"] or []
            texts = [self._below("text", turn.get("text"), False, False) for turn in turns]
            hidden["generations"] = [{**turn, "text": text} for turn, text in zip(turns, texts, strict=True)]
        return {**entries, **hidden}

    def hits(self, text: str) -> bool:
        """Return whether a regular expression hits in a text."""
        return any(pattern.search(text) for pattern in self._patterns)

    def is_seen(self, record: dict[str, Any], decode: Decode) -> bool:
        """Return whether the token ids of a record show what a rule hides.

        They do where a regular expression hits in the text of ids, where a rule hides a part of a text that became ids
        (there it may be escaped), and where the text of ids has a value that a rule hides elsewhere in the record.

        Args:
            record: A record before its matches are hidden.
            decode: Returns the text of token ids.
        """
        if not self.names and not self._patterns:
            return False
        redacted = self(record)
        if list(_became_ids(redacted)) != list(_became_ids(record)):
            return True
        ids = [each["ids"] for each in (*record["rows"], *record["generations"]) if each["ids"] is not None]
        texts = [decode([int(each) for each in row]) for row in ids]
        hidden = {
            re.compile(rf"(?<!\w){re.escape(written)}(?!\w)")
            for key in _WHOLE
            for value in _changed(record.get(key), redacted.get(key))
            for written in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
        }
        return any(pattern.search(text) for pattern in (*self._patterns, *hidden) for text in texts)

    def _hide(self, value: Any, named: bool, free: bool) -> Any:
        if isinstance(value, dict):
            return {
                key: item if not free and key in _LEFT else self._below(key, item, named, free)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._hide(item, named, free) for item in value]
        if value is None or isinstance(value, bool) or (not free and (value in _WORDS or not isinstance(value, str))):
            return value
        if named:
            return HIDDEN
        if isinstance(value, str):
            for pattern in self._patterns:
                value = pattern.sub(HIDDEN, value)
        return value

    def _below(self, key: str, value: Any, named: bool, free: bool) -> Any:
        # A session's request may name an earlier one's tools by its number.
        is_free = free or (key in _FREE and not (key == "tools" and isinstance(value, int)))
        return self._hide(value, named or key in self.names, is_free)


def _became_ids(record: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the texts of a record that the model read or wrote."""
    yield record["messages"]
    yield [turn.get("text") for turn in record["generations"]]
    yield [[call["name"], call["arguments"], call["text"]] for call in record["calls"]]
    yield [reply["text"] for reply in record["replies"]]
    for request in (record["session"] or {}).get("requests", ()):
        if request.get("refused") is None:
            yield [request.get(part) for part in ("messages", "said", "tools")]


def _changed(was: Any, now: Any) -> Iterator[str]:
    """Yield the texts and numbers, as texts, that are hidden as a whole."""
    if isinstance(was, dict):
        for key, value in was.items():
            yield from _changed(value, now[key])
    elif isinstance(was, list):
        for value, hidden in zip(was, now, strict=True):
            yield from _changed(value, hidden)
    elif now == HIDDEN and was not in (HIDDEN, ""):
        yield str(was)


def _compiled(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule.removeprefix(_REGEX))
    except re.error as error:
        raise ConfigError(
            f"record_redact has {rule!r}, which is no regular expression: {error}; correct it, or name an entry"
        ) from None
