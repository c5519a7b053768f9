"""Paths as people write them: `~/data` is the home folder's, wherever it stands.

    command line  `--out=~/runs`, `data.train_files=[~/a.parquet,~/b.parquet]`      `word_at_home`
    YAML files    tools, interactions, a run's whole configuration                  `at_home`

A shell expands `~` at the beginning of a word alone, and verl, Hydra and Python never do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_HOME = "~/"
_ITEM = re.compile(r"([\[,]\s*['\"]?)(~/[^,'\"\]]*)")
"""A path below the home folder in a list of values."""
_WHOLE = re.compile(r"(['\"]?)(~/.*)", re.DOTALL)
_VALUE = re.compile(r"(--[\w-]+|[+~]*[\w./@:-]+)=")
"""Part of a word before its value."""


def at_home(value: Any) -> Any:
    """Return a value of a YAML file in which each text that begins with `~/` is the path that it means.

    Args:
        value: A text, a mapping or a list, to any depth; any other value is returned as it is.
    """
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith(_HOME) else value
    if isinstance(value, Mapping):
        return {key: at_home(item) for key, item in value.items()}
    return [at_home(item) for item in value] if isinstance(value, list) else value


def word_at_home(word: str) -> str:
    """Return a word of the command line in which `~/` is the home folder: alone, as a value, in a list of values.

    Example: `--out=~/a` returns `--out=/home/me/a`. Hydra's `~key`, which removes a key, stays.
    """
    begins = word.startswith(_HOME)
    if not begins and (found := _VALUE.match(word)) is None:
        return word
    head = "" if begins or found is None else found[0]
    value = word[len(head) :]
    if value.startswith("["):
        return head + _ITEM.sub(_expanded, value)
    whole = _WHOLE.fullmatch(value)
    return word if whole is None else head + _expanded(whole)


def _expanded(found: re.Match[str]) -> str:
    return found[1] + os.path.expanduser(found[2])
