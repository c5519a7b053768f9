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
    r"(^|_)(api_?keys?|tokens?|passw(or)?ds?|passphrases?|secrets?|credentials?|private_?keys?|access_?keys?"
    r"|secret_?(access_)?keys?|authorization|cookies?)$",
    re.IGNORECASE,
)
"""The end of a key: `token_level` and `tokenizer` are no secrets."""
_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/?#@\s]+@", re.IGNORECASE)
_IN_QUERY = re.compile(
    r"(?P<key>[?&](?:[\w-]*[_-])?(?:api_?key|token|password|secret|key|sig|signature)=)[^&#\s]+", re.I
)
_BEARER = re.compile(r"(?P<word>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE)


def new_start(now: float | None = None) -> str:
    """Return the name of a start, as in `20261126T101500_9f3c2a`: its time in UTC, and a random part."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}_{secrets.token_hex(3)}"


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a configuration in which secrets are `***`.

    A value is a secret where its key names one (`api_key`, `hf_token`, `PASSWORD`); in a text, the user and password of
    a URL, the parameters of a URL that name a secret, and what follows `Bearer`. Numbers, truth values and null are
    none, whatever their key: `max_tokens` is a limit.

    Args:
        value: Mappings, lists and plain values.
        key: The key that leads to it.
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET.search(_WORD_EDGE.sub("_", key).replace("-", "_")):
        return HIDDEN
    hidden = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", value)
    hidden = _IN_QUERY.sub(rf"\g<key>{HIDDEN}", hidden)
    return _BEARER.sub(rf"\g<word>{HIDDEN}", hidden)


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
