"""Whether a Python has the version of a harness that a bridge was written for.

It runs there, in a program of `processes/zygote.py` from which nothing is forked. The standard library alone is
imported, so that a Python without the harness can report that.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from typing import Any

from verl_multiturn.errors import ConfigError


def check_version(spec: Mapping[str, Any], package: str, version: str, oldest: tuple[int, int]) -> None:
    """Check, in a harness's Python, that the harness is there.

    Args:
        spec: As `check_in` makes it.
        package: The harness's distribution.
        version: The version that the bridge was written for.
        oldest: The oldest Python for it.

    Raises:
        ConfigError: It is another one, or not installed.
    """
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if sys.version_info[:2] < oldest or found != version:
        raise ConfigError(
            f"{spec['where']}: {sys.executable!r} is Python {sys.version_info[0]}.{sys.version_info[1]}, and its "
            f"{package.capitalize()} is {found}, expected {oldest[0]}.{oldest[1]} or newer and {version}; "
            f"{spec['install']}"
        )
