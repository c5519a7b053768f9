"""The description of a run: its start, and its configuration without secrets (`configuration_secrets.py`).

Invariants:
- a start names one process that trains. It orders by time, and holds no `-`, so that it can be read out of the names of
  files.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import whole_file
from verl_multiturn.records.schema import SCHEMA
from verl_multiturn.records.write.configuration_secrets import without_secrets

_KNOWN_OF_MODEL = ("versions", "settings", "tools", "schemas", "tokenizer", "template")


def new_start(now: float | None = None) -> str:
    """Return the name of a start, as in `20261126T101500_9f3c2a`: its time in UTC, and a random part."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}_{secrets.token_hex(3)}"


def later_start(folder: Path, now: float) -> str:
    """Return the name of a start that orders behind those of a folder; a gateway calls it.

    So a restart within a second, or after the clock was put back, is the later one.
    """
    newest = max((path.stem.removeprefix("run-") for path in folder.glob("run-*.json")), default="")
    start = new_start(now)
    if start > newest:
        return start
    try:
        return new_start(calendar.timegm(time.strptime(newest[:15], "%Y%m%dT%H%M%S")) + 1)
    except ValueError:  # a start of another form
        return start


def digest(data: bytes) -> str:
    """Return the digest (blake2b-128) of bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of_vocabulary(vocabulary: Mapping[str, int]) -> str:
    """Return the digest of a tokenizer's vocabulary, whatever the order of its entries."""
    ordered = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
    return digest(json.dumps(ordered).encode())


def gateway_run(start: str, began: float, about: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the file of a gateway's start, a `schema.RunFile`.

    Args:
        start: The start, as file names have it.
        began: When it began.
        about: What the caller knows of the model: `versions`, `settings`, `tools`, `schemas`, `tokenizer`, `template`,
            as `schema.RunFile` has them.
        limits: The gateway's own settings. By `settings.gateway` readers know a gateway's folder.

    Raises:
        ConfigError: `about` has another entry.
    """
    if unknown := sorted(set(about) - set(_KNOWN_OF_MODEL)):
        raise ConfigError(f"about has {unknown[0]!r}, expected {', '.join(_KNOWN_OF_MODEL)}; leave it out")
    known = {"versions": {"verl_multiturn": version("verl-multiturn"), "python": python_version()}, **about}
    return {
        "schema": SCHEMA,
        "start": start,
        "began": began,
        "host": socket.gethostname(),
        **known,
        "settings": without_secrets({**known.get("settings", {}), "gateway": dict(limits)}),
        "tools": without_secrets(known.get("tools")),
        "resumed_from": None,
    }


def path_of(folder: Path, start: str) -> Path:
    """Return the path of a start's file in a folder of records."""
    return folder / f"run-{start}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, and rename it into place.

    Raises:
        OSError: It cannot be written. The old file of that name stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as half:
        half.write_text(text, encoding="utf-8")
