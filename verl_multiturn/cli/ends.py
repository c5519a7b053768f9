"""How a command ends that cannot do, or has not done, what it was asked for."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from verl_multiturn.errors import MultiTurnError


def fail(message: str, status: int = 1) -> NoReturn:
    """End the program with a message on standard error."""
    print(f"verl-multiturn: {message}", file=sys.stderr)
    raise typer.Exit(status)


def refuse(error: MultiTurnError) -> NoReturn:
    """End the program with status 2: what was asked for cannot be done, as the error says."""
    fail(str(error), status=2)
