"""A harness that has a Python of its own: which one that is, and its report on the settings, before a run.

`installed.py` is the beginning of that report, in the harness's Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.forks import ForkError, check_import
from verl_multiturn.processes.interpreters import check_python

_WHERE = f"{PATH}.proxy"


def needed_python(python: str | None, others: Mapping[str, object], name: str, version: str, install: str) -> str:
    """Return the interpreter that has a harness.

    Args:
        python: The setting `proxy.python`.
        others: Settings that name another agent or place of it, by their names; None where one is not set.
        name: The agent's name.
        version: The harness's Python, for the error.
        install: The remedy where it is missing.

    Raises:
        ConfigError: There is none, or other settings name another agent.
    """
    if any(value is not None for value in others.values()):
        names = " and ".join(repr(each) for each in others)
        raise ConfigError(f"{_WHERE}: the agent {name!r} is a process of its own; leave {names} out")
    if python is None:
        raise ConfigError(f"{_WHERE}.python: the agent {name!r} needs {version}; {install}")
    check_python(python, f"{_WHERE}.python")
    return python


def check_in(python: str, program: str, settings: Mapping[str, Any], name: str, install: str, **spec: Any) -> None:
    """Let a harness's Python check the settings of its bridge.

    Args:
        python: The interpreter.
        program: The module that checks, as `processes/zygote.py` has it.
        settings: The bridge's settings.
        name: The agent's name, which is also that of its settings.
        install: The remedy where the harness is missing.
        spec: Further input of the module's `load`.

    Raises:
        ConfigError: Something is missing, unknown, or does not fit.
    """
    given = {"settings": settings, "where": f"{_WHERE}.{name}", "install": install, **spec}
    try:
        check_import(program, given, f"agent {name!r}", python)
    except ForkError as error:
        raise ConfigError(f"{_WHERE}.python: {python!r}: {error}; {install}") from None
