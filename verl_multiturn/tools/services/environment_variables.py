"""Addresses and headers of a tools' YAML, which may hold `${NAME}`: the value of an environment variable."""

from __future__ import annotations

import os
import re

from verl_multiturn.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_USER = re.compile(r"(?<=:)//[^/]*@")
"""Part of an address before its host."""


def expand(value: str, where: str) -> str:
    """Return a value in which each `${NAME}` is replaced by the environment variable.

    Raises:
        ConfigError: There is no such environment variable; the error begins with `where`.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{where}: the environment variable {match[1]!r} is not set; export it before the run")
        return os.environ[match[1]]

    return _VARIABLE.sub(replace, value)


def header(value: str, where: str) -> str:
    """Return the value of a header as it is sent.

    Raises:
        ConfigError: There is no such environment variable, or no header can hold the value.
    """
    text = expand(value, where)
    if not text.isascii() or not text.isprintable() or text != text.strip():
        raise ConfigError(
            f"{where}: it holds something that no header can hold: a line end, white space at an end or a "
            "character beyond ASCII; set it again, or the environment variable that it names"
        )
    return text


def shown(address: str) -> str:
    """Return an address for messages: without its user, password and query, which may hold secrets."""
    return _USER.sub("//", address.partition("?")[0])
