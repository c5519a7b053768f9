"""The table of an evaluation, and its one line of JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from verl_multiturn.evaluation.results import Results


def table_of(results: Results) -> Group:
    """Return what a person reads of an evaluation; print it with a `rich.console.Console`."""
    raise NotImplementedError


def summary_of(results: Results) -> dict[str, Any]:
    """Return the object of the last line."""
    raise NotImplementedError
