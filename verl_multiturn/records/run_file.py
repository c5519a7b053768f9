"""What a run is: its start, and its configuration with secrets taken out.

Invariants:
- no value whose key names a secret, and no user and password of a URL, is written;
- a start names one process that trains. It orders by time, and holds no `-`, so that it can be read out of the names of
  files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"((^|_)(api_?keys?|tokens?|pwd|pass|passphrases?|secrets?|credentials?|private_?keys?|access_?keys?"
    r"|secret_?(access_)?keys?|(proxy_)?authorization|auth|pat|cookies?)|passw(or)?ds?)$",
    re.IGNORECASE,
)
"""The end of a key: `token_level` and `tokenizer` are no secrets."""
_KEY, _COLUMN = re.compile(r"_key$", re.IGNORECASE), re.compile(r"[A-Za-z]+(_[A-Za-z]+)*")
"""`openai_key` is a secret; `prompt_key` of verl's `data` names a column."""
_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/?#@\s]+@", re.IGNORECASE)
_IN_QUERY = re.compile(
    r"(?P<key>[?&](?:[\w-]*[_-])?(?:api_?key|token|password|secret|key|sig|signature)=)[^&#\s]+", re.I
)
_BEARER = re.compile(r"(?P<word>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s&;,'")}\]]+)"""
_GIVEN = (
    re.compile(rf"(?<![\w-])(?P<before>--?(?P<key>[a-z][\w.-]*)\s+(?!-)){_VALUE}", re.IGNORECASE),
    re.compile(rf"(?<![\w.])(?P<before>(?P<key>[a-z_][\w.-]*)=(?!=)){_VALUE}", re.IGNORECASE),
    re.compile(
        r"(?<![\w-])(?P<before>(?P<key>(?:proxy-)?authorization|x-[\w-]+|[\w-]*api[-_]?key)[\"']?:\s*"
        rf"(?:(?:bearer|basic|token)\s+)?){_VALUE}",
        re.IGNORECASE,
    ),
)
"""An option, an assignment and a header in a text."""
_OPTION = re.compile(r"--?(?P<key>[a-z][\w.-]*)", re.IGNORECASE)
_NO_SECRET = re.compile(r"[\d.,]+|none|null|true|false", re.IGNORECASE)


def new_start(now: float | None = None) -> str:
    """Return the name of a start, as in `20261126T101500_9f3c2a`: its time in UTC, and a random part."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}_{secrets.token_hex(3)}"


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a configuration in which secrets are `***`.

    A value is a secret, and so is all below it, where its key names one (`api_key`, `hf_token`, `PGPASSWORD`); in a
    text, the user and password of a URL, the parameters of a URL that name a secret, what follows `Bearer`, and the
    values of options, assignments and headers that name one. Numbers, truth values and null are none, whatever their
    key: `max_tokens` is a limit. A key that ends in `_key` names a secret, except below `data` where it names a column.

    Args:
        value: Mappings, lists and plain values.
        key: The key that leads to it, after a dot each.
    """
    return _without(value, key, is_secret=False)


def _without(value: Any, path: str, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        below = is_secret or _names_secret(path, None)
        return {name: _without(item, f"{path}.{name}" if path else str(name), below) for name, item in value.items()}
    if isinstance(value, list | tuple):
        options = [None, *(isinstance(item, str) and _OPTION.fullmatch(item) for item in value)]
        return [
            _without(item, path, is_secret or bool(option and _names_secret(option["key"], item) and _is_value(item)))
            for option, item in zip(options, value, strict=False)
        ]
    if not isinstance(value, str) or not value:
        return value
    if is_secret or _names_secret(path, value):
        return HIDDEN
    hidden = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", value)
    hidden = _IN_QUERY.sub(rf"\g<key>{HIDDEN}", hidden)
    hidden = _BEARER.sub(rf"\g<word>{HIDDEN}", hidden)
    for given in _GIVEN:
        hidden = given.sub(_hide_given, hidden)
    return hidden


def _names_secret(path: str, value: object) -> bool:
    """Tell whether the last key of a path names a secret; the value decides whether it names a column."""
    *above, last = path.split(".")
    key = _WORD_EDGE.sub("_", last).replace("-", "_")
    if _SECRET.search(key):
        return True
    is_column = above[:1] == ["data"] and isinstance(value, str) and _COLUMN.fullmatch(value) is not None
    return _KEY.search(key) is not None and not is_column


def _hide_given(found: re.Match[str]) -> str:
    value = found["value"].strip("\"'")
    if not _names_secret(found["key"], value) or not _is_value(value):
        return found[0]
    return f"{found['before']}{HIDDEN}"


def _is_value(given: object) -> bool:
    """Tell whether what follows an option is its value, and may be a secret."""
    return isinstance(given, str) and not given.startswith("-") and _NO_SECRET.fullmatch(given) is None


def digest(data: bytes) -> str:
    """Return the digest (blake2b-128) of bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """Return the digest of a tokenizer's vocabulary, whatever the order of its entries."""
    ordered = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
    return digest(json.dumps(ordered).encode())


def path_of(folder: Path, start: str) -> Path:
    """Return the path of a start's file in a folder of records."""
    return folder / f"run-{start}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, and rename it into place.

    Raises:
        OSError: It cannot be written. What was there under the name stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
