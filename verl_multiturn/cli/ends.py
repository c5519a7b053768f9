"""How a command ends that cannot do, or has not done, what it was asked for; and where it prints tables."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from rich.console import Console

from verl_multiturn.errors import MultiTurnError

_WIDTH = 160
"""Characters of a line that goes into a file or another program."""


def wide_console() -> Console:
    """Return a console for tables, which are not squeezed where no terminal says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def fail(message: str, status: int = 1) -> NoReturn:
    """End the program with a message on standard error."""
    print(f"verl-multiturn: {message}", file=sys.stderr)
    raise typer.Exit(status)


def refuse(error: MultiTurnError) -> NoReturn:
    """End the program with status 2: what was asked for cannot be done, as the error says."""
    fail(str(error), status=2)
